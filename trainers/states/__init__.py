"""The state after an optimizer step: read from rows, keyframes and checkpoints, and set again."""
