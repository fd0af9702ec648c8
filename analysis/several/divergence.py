"""Distances between several runs over time."""

from __future__ import annotations

from collections.abc import Sequence

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several.differences import (
    DIFFERENCE,
    check_comparable,
    differences,
    first_step,
)
from trajstore.analysis.several.many_runs import each_run
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations import populations

_OTHER_DEAD = (
    "the runs have different dead tokens, so their populations cannot be compared; remove is_dead "
    "with drop_vars('is_dead')"
)


@checks_types
def divergence(ds: xr.Dataset, other: xr.Dataset | None = None) -> xr.Dataset:
    """Distance of W between the first run and the others, per step and population.

    Runs with a common start, such as a run and its fork, have distance 0 before
    ``first_difference``.

    Parameters
    ----------
    ds : Dataset
        Several runs from `trajstore.open_runs`; or, with `other`, the first of two runs.
    other : Dataset, optional
        A second run with the same tokens and hidden dimensions. Only common steps are compared, and
        the result has no dimension run.

    Returns
    -------
    Dataset
        ``distance``, float64 (run, step, population): L2 norm of the difference over all values of
        a population; ``mean_distance``: mean over its tokens of the L2 norm of each token's
        difference; ``differing``: fraction of its elements that differ in any bit.
        ``first_difference``, int64 (run): the first step at which any element differs, −1 if none.
        The first three are 0 for the first run, and NaN for a population without tokens.

    Raises
    ------
    InvalidArgument
        If `ds` has no dimension run and `other` is missing, or has one and `other` is given; if
        dead tokens, tokens or hidden dimensions differ, or if there is no common step.
    VariableNotRecorded
        If a run does not hold W.

    Examples
    --------
    >>> from trajstore import open_runs
    >>> divergence(open_runs("gatsby.zarr")).distance.sel(population="dead").values.max()
    np.float64(0.0)
    >>> changed = ds.assign(W=ds.W.where(ds.step < 7, 0))
    >>> int(divergence(ds, changed).first_difference)
    7
    """
    if other is not None:
        first, second = _of_common_steps(ds, other)
        return _divergence([first, second]).isel(run=1)
    if any(c.dims == ("run", "token") for c in ds.coords.values() if c.dtype == bool):
        raise InvalidArgument(_OTHER_DEAD)
    found = _divergence(each_run(ds))
    return found.assign_coords({name: c for name, c in ds.coords.items() if c.dims == ("run",)})


def _of_common_steps(ds: xr.Dataset, other: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    if "run" in ds.dims:
        raise InvalidArgument("got several runs and other; open all runs together with open_runs")
    check_comparable(ds, other)
    if "is_dead" in ds and "is_dead" in other and (ds.is_dead.values != other.is_dead.values).any():
        raise InvalidArgument(_OTHER_DEAD)
    steps = (ds["step"].values, other["step"].values)
    common, one, two = np.intersect1d(*steps, return_indices=True)
    if not common.size:
        raise InvalidArgument("the runs have no common step; compare runs with common steps")
    return ds.isel(step=one), other.isel(step=two)


def _divergence(runs: Sequence[xr.Dataset]) -> xr.Dataset:
    scans = [Scan(run) for run in runs]
    names, groups = populations(scans[0].ds)
    first = scans[0].blocks("W")
    unit = scans[0].units
    facts = {
        "distance": Fact("f8", "L2 distance of W from that of the first run", unit),
        "mean_distance": Fact(
            "f8", "mean distance of the tokens from those of the first run", unit
        ),
        "differing": Fact(
            "f8", "fraction of the elements that differ in any bit from the first run"
        ),
    }
    tables = []
    for scan in scans:
        blocks = scan.blocks("W")
        widest = np.result_type(blocks.dtype, first.dtype)
        pieces = measure(
            differences,
            "st",
            blocks.astype(widest).rechunk(first.chunks),
            first.astype(widest),
            dtype=DIFFERENCE,
        )
        tables.append(
            measure(
                _measures,
                "sg",
                pieces.rechunk({1: -1}),
                groups=groups,
                hidden=first.shape[-1],
                dtype=facts,
                sizes={"g": len(groups)},
                by_row=True,
            )
        )
    coords = {"step": scans[0].ds["step"], "population": names}
    result = table(da.stack(tables), facts, ("run", "step", "population"), coords)
    return result.assign(first_difference=first_step((result["differing"] > 0).any("population")))


def _measures(
    pieces: npt.NDArray[np.void], groups: npt.NDArray[np.bool_], hidden: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Distance, mean distance and differing fraction of each group, (group)."""
    squares = [np.ascontiguousarray(pieces["square"][group]) for group in groups]
    sizes = groups.sum(-1)
    distances = np.sqrt([each.sum() for each in squares])
    means = np.array([np.sqrt(each).sum() for each in squares]) / sizes
    differing = np.array([pieces["differing"][group].sum() for group in groups]) / sizes / hidden
    return {
        "distance": np.where(sizes > 0, distances, np.nan),
        "mean_distance": means,
        "differing": differing,
    }
