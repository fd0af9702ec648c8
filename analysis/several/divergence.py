"""How far several runs go apart."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import over_hidden
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several.many_runs import each_run
from trajstore.argument_types import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations.masks import populations

__all__ = ["divergence"]

Array = npt.NDArray[Any]


@checks_types
def divergence(ds: xr.Dataset) -> xr.Dataset:
    """How far W of each run is from that of the first, at each step and for each population.

    Parameters
    ----------
    ds : Dataset
        As `trajstore.open_runs` returns it.

    Returns
    -------
    Dataset
        ``distance``, float64 (run, step, population): L2 norm of the difference of all values of
        the population's tokens; ``mean_distance``: mean over these tokens of the L2 norm of each
        one's difference. Of the first run, both are 0; a population without tokens has NaN.

    Raises
    ------
    InvalidArgument
        If there is no dimension run, or the runs differ in which tokens are dead.
    VariableNotRecorded
        If they do not hold W.

    Examples
    --------
    >>> from trajstore import open_runs
    >>> divergence(open_runs("gatsby.zarr")).distance.sel(population="dead").values.max()
    np.float64(0.0)
    """
    if any(c.dims == ("run", "token") for c in ds.coords.values() if c.dtype == bool):
        raise InvalidArgument(
            "these runs differ in which tokens are dead, so they have no populations in common; "
            "give them ones: drop_vars('is_dead')"
        )
    scans = [Scan(run) for run in each_run(ds)]
    names, groups = populations(scans[0].ds)
    members = da.from_array(groups, chunks=groups.shape)  # once, and not with each task
    first = scans[0].blocks("W")
    tables = []
    for scan in scans:
        squares = over_hidden(
            _squares, scan.blocks("W").rechunk(first.chunks), first, dtype=np.float64
        )
        tables.append(_by_group(squares.rechunk({1: -1}), members))
    table = xr.DataArray(
        da.stack(tables),
        dims=("run", "step", "population", "measure"),
        coords={"step": ds["step"], "population": names},
    )
    along = {name: c for name, c in ds.coords.items() if c.dims == ("run",)}
    attrs = {"units": scans[0].units}
    long_names = {
        "distance": "L2 distance of W from that of the first run",
        "mean_distance": "mean distance of the tokens from those of the first run",
    }
    return xr.Dataset(
        {
            name: table.isel(measure=at).assign_attrs(long_name=text, **attrs)
            for at, (name, text) in enumerate(long_names.items())
        }
    ).assign_coords(along)


def _squares(block: Array, first: Array) -> Array:
    """Squared distance of each vector, (row, token)."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.subtract(block, first, dtype=np.float64)
        return np.asarray(np.einsum("...i,...i->...", difference, difference))


def _by_group(squares: da.Array, members: da.Array) -> da.Array:
    """Distance and mean distance of each group, (row, group, 2)."""
    return da.blockwise(
        _distances,
        "sgm",
        squares,
        "st",
        members,
        "gt",
        new_axes={"m": 2},
        concatenate=True,
        align_arrays=False,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
    )


def _distances(squares: Array, groups: npt.NDArray[np.bool_]) -> Array:
    result = np.full((squares.shape[0], len(groups), 2), np.nan)
    for number, group in enumerate(groups):
        if group.any():
            chosen = squares[:, group]
            result[:, number, 0] = np.sqrt(chosen.sum(-1))
            result[:, number, 1] = np.sqrt(chosen).mean(-1)
    return result
