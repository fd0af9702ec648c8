"""Options that select steps or vectors, and the number of unchanged steps of a frozen token."""

from __future__ import annotations

import click

from trajstore.analysis.motion.unchanged import MIN_UNCHANGED

__all__ = ["STEPS", "UNCHANGED", "VECTORS", "WITHIN"]

STEPS = click.option(
    "--steps",
    metavar="A:B:K",
    help="Show only these steps, such as 0:500 or 0:10000:10. Values are still those of the "
    "whole run.",
)
WITHIN = click.option(
    "--within",
    is_flag=True,
    help="Compute from --steps only, as if the run had no other steps.",
)
UNCHANGED = click.option(
    "--min-unchanged",
    type=click.IntRange(1),
    help="A token is frozen if at least this many final steps leave it unchanged; "
    f"default: {MIN_UNCHANGED}.",
)
VECTORS = click.option(
    "--vectors",
    metavar="NAME|NAME:POPULATION",
    help="Use other vectors in place of W: grad, exp_avg, exp_avg_sq or delta of each token, "
    "hidden_mean, or centroid or largest_cluster of a population, such as centroid:all.",
)
