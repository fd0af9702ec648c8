"""Positions of tokens relative to each other and to axes."""
