"""Commands that train models, and that rebuild, label or recompute recorded ones."""
