"""How long a token is still before it counts as frozen."""

from __future__ import annotations

__all__ = ["MIN_UNCHANGED"]

MIN_UNCHANGED = 50
"""Optimizer steps. Of Lil Gatsby's tokens that are still for so many at the end of a recording,
6 % move again when it is continued; of those that are still for a single one, 19 %."""
