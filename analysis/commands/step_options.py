"""Options about steps: which are shown, and how many without motion are rest."""

from __future__ import annotations

import click

from trajstore.analysis.motion.unchanged import MIN_UNCHANGED

__all__ = ["STEPS", "UNCHANGED", "WITHIN"]

STEPS = click.option(
    "--steps",
    metavar="A:B:K",
    help="Show these steps only, such as 0:500 or 0:10000:10, of what the whole run gives.",
)
WITHIN = click.option(
    "--within",
    is_flag=True,
    help="Compute from --steps alone, as if the run had no other steps.",
)
UNCHANGED = click.option(
    "--min-unchanged",
    type=click.IntRange(1),
    help="Steps without motion, up to the last one, that make a token frozen; "
    f"default: {MIN_UNCHANGED}.",
)
