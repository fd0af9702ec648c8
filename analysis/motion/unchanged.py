"""Default number of unchanged steps of a frozen token."""

from __future__ import annotations

MIN_UNCHANGED = 50
"""Optimizer steps. In Lil Gatsby, 6 % of the tokens that are unchanged for 50 steps at the end of a
recording move again when the training continues, and 19 % of those unchanged for one step."""
