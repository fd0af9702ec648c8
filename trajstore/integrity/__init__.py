"""Verification and repair of runs: metadata, the bytes of all arrays, checkpoints, other files."""
