"""How values are spread over orders of magnitude, per population: counts that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.populations.masks import populations

__all__ = ["log_edges", "log_histogram"]


def log_edges(lowest: float, highest: float, per_decade: int) -> npt.NDArray[np.float64]:
    """Edges of equal ratio from 10^lowest to 10^highest."""
    return np.asarray(
        np.logspace(lowest, highest, round((highest - lowest) * per_decade) + 1), np.float64
    )


def _counts(
    values: npt.NDArray[Any], groups: npt.NDArray[np.bool_], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """From (…, token) to (…, population, kind): the classes, then zero, outside and NaN."""
    classes = edges.size - 1
    rows = values.reshape(-1, values.shape[-1])
    kind = np.searchsorted(edges, rows, side="right") - 1
    kind[(kind < 0) | (kind >= classes)] = classes + 1
    kind[rows == 0] = classes
    kind[np.isnan(rows)] = classes + 2
    result = np.empty((len(rows), len(groups), classes + 3), np.int64)
    for row, found in enumerate(kind):
        for number, group in enumerate(groups):
            result[row, number] = np.bincount(found[group], minlength=classes + 3)
    return result.reshape(*values.shape[:-1], len(groups), classes + 3)


def log_histogram(
    da: xr.DataArray, lowest: float = -12, highest: float = 6, per_decade: int = 10
) -> xr.Dataset:
    """Count the tokens of each population whose value lies in each of many classes of one ratio.

    Every token is counted once: in a class, as zero, as outside of all classes, or as NaN.

    Parameters
    ----------
    da : DataArray, (…, token)
        Lengths, or anything else that is not negative.
    lowest, highest : float
        Powers of ten between which the classes lie.
    per_decade : int
        Classes to each factor of ten.

    Returns
    -------
    Dataset, int64
        ``count`` (…, population, value_class), class i being lower ≤ value < upper with the
        coordinates ``lower`` and ``upper``; (…, population): ``zero``, ``outside`` (negative values
        and infinities among them) and ``nan``. Where nothing says which tokens are dead, the only
        population is ``all``.

    Raises
    ------
    InvalidArgument
        If there is no dimension token, or no class.

    Examples
    --------
    >>> from trajstore.analysis import speed
    >>> found = log_histogram(speed(ds), -4, 0, 1).sel(step=15).compute()
    >>> found["count"].sel(population="all").values, found.zero.sel(population="all").item()
    (array([  0, 118,   0,   0]), 10)
    """
    if "token" not in da.dims:
        raise InvalidArgument(f"got dimensions {da.dims}, expected token among them")
    if per_decade < 1 or not lowest < highest:
        raise InvalidArgument(
            f"got classes from 10^{lowest} to 10^{highest}, {per_decade} to a decade; expected "
            "the second power to be larger, and at least one class"
        )
    edges = log_edges(lowest, highest, per_decade)
    names, groups = populations(da)
    table = xr.apply_ufunc(
        _counts,
        da.chunk({"token": -1}) if da.chunks is not None else da,
        groups,  # no keyword: that would go with each task
        kwargs={"edges": edges},
        input_core_dims=[["token"], ["population", "token"]],
        output_core_dims=[["population", "value_class"]],
        dask="parallelized",
        output_dtypes=[np.int64],
        dask_gufunc_kwargs={
            "output_sizes": {"population": len(names), "value_class": edges.size + 2}
        },
        keep_attrs=False,
    ).assign_coords(population=names)
    classes = edges.size - 1
    name = da.attrs.get("long_name", da.name or "value")
    counts = table.isel(value_class=slice(None, classes)).assign_coords(
        lower=("value_class", edges[:-1]), upper=("value_class", edges[1:])
    )
    return xr.Dataset(
        {
            "count": counts.assign_attrs(long_name=f"tokens by {name}", units="1"),
            **{
                kind: table.isel(value_class=classes + at).assign_attrs(
                    long_name=f"tokens whose {name} is {kind}", units="1"
                )
                for at, kind in enumerate(("zero", "outside", "nan"))
            },
        }
    )
