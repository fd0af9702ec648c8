"""Options that choose a parameter or vectors, and the unchanged steps of a frozen token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trajstore.analysis.motion.unchanged import MIN_UNCHANGED

if TYPE_CHECKING:
    import xarray as xr

OF_WHOLE_RUN = "Values of selected steps are still those of the whole run."
"""Note of ``--select`` in commands that have ``--within``."""

WITHIN = click.option(
    "--within",
    is_flag=True,
    help="Compute from the selected steps only, as if the run had no other steps.",
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
PARAMETER = click.option(
    "--parameter",
    metavar="NAME",
    help="Use the rows of this parameter of a run with everything in place of the tokens of W; "
    "`info` lists the names.",
)


def of_parameter(ds: xr.Dataset, name: str | None) -> xr.Dataset:
    """The history of a parameter; without a name, the run itself."""
    from trajstore.store.reading.run_info import parameter_dataset

    return ds if name is None else parameter_dataset(ds, name)
