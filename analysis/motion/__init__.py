"""Motion of tokens and populations, and the steps at which it stops."""
