"""First difference of two runs, and their distance."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import field, measure
from trajstore.analysis.several.differences import (
    DIFFERENCE,
    check_comparable,
    differences,
    differing_names,
    first_step,
)
from trajstore.argument_types import checks_types
from trajstore.errors import InvalidArgument
from trajstore.schema import OF_PARAMETERS, VARIABLES

__all__ = ["compare"]

Array = npt.NDArray[Any]


def _shape_of_rows(array: xr.DataArray) -> dict[Hashable, int]:
    return {dim: length for dim, length in array.sizes.items() if dim != "step"}


def _over_rows(pieces: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    if pieces.ndim == 1:
        return pieces
    result = np.empty(pieces.shape[0], DIFFERENCE)
    others = tuple(range(1, pieces.ndim))
    result["differing"] = np.ascontiguousarray(pieces["differing"]).sum(others)
    result["square"] = np.ascontiguousarray(pieces["square"]).sum(others)
    return result


def _difference(a: xr.DataArray, b: xr.DataArray) -> da.Array:
    """Structured array (step) of `DIFFERENCE`."""
    dims = VARIABLES[str(a.name)].dims
    x, y = (
        array.transpose(*dims).chunk() if array.chunks is None else array.transpose(*dims)
        for array in (a, b)
    )
    if len(dims) == 1:
        x, y = x.expand_dims("value", -1), y.expand_dims("value", -1)
    last = x.ndim - 1
    widest = np.result_type(x.dtype, y.dtype)  # the narrower type would round differences away
    first = x.data.astype(widest).rechunk({last: -1})
    second = y.data.astype(widest).rechunk(first.chunks)
    letters = "stabcdef"[:last]
    pair = (first, letters + "h"), (second, letters + "h")
    pieces = measure(differences, letters, *pair, dtype=DIFFERENCE)
    whole = pieces.rechunk(dict.fromkeys(range(1, last), -1))
    return measure(_over_rows, "s", (whole, letters), dtype=DIFFERENCE)


@checks_types
def compare(a: xr.Dataset, b: xr.Dataset) -> xr.Dataset:
    """First step at which two runs differ in any bit, per variable, and their distance.

    Parameters
    ----------
    a, b : Dataset
        Two runs with the same tokens and hidden dimensions. Only common variables and steps are
        compared, those of two types in a type that holds both. Variables of single examples are
        left out if the number of examples differs, and variables of all parameters if the
        parameters differ.

    Returns
    -------
    Dataset
        ``first_difference``, int64 (variable): the first common step at which any bit differs, −1
        if none; ``differs``, bool (step, variable); ``distance``, float64 (step, variable): L2
        norm of the difference of all values of a row. The attribute ``differing_settings`` names
        the fields of configuration and optimizer that differ.

    Raises
    ------
    InvalidArgument
        If tokens or hidden dimensions differ, or there is no common step or variable. The message
        names the difference.

    Examples
    --------
    >>> other = ds[["W", "loss"]].assign(W=ds.W.where(ds.step < 7, 0))
    >>> compare(ds, other).first_difference.to_series().to_dict()
    {'W': 7, 'loss': -1}
    """
    check_comparable(a, b)
    steps, rows_a, rows_b = np.intersect1d(a["step"].values, b["step"].values, return_indices=True)
    names = [
        name
        for name in VARIABLES
        if name in a and name in b and _shape_of_rows(a[name]) == _shape_of_rows(b[name])
        if name not in OF_PARAMETERS or a["parameter"].equals(b["parameter"])
    ]
    if not steps.size or not names:
        what = "step" if names else "variable"
        raise InvalidArgument(f"the runs have no common {what}; compare runs with a common {what}")
    a, b = a.isel(step=rows_a), b.isel(step=rows_b)
    table = da.stack([_difference(a[name], b[name]).rechunk(-1) for name in names], axis=1)

    differs = xr.DataArray(
        field(table, "differing") > 0,
        dims=("step", "variable"),
        coords={"step": steps, "variable": names},
    )
    distance = differs.copy(data=np.sqrt(field(table, "square")))
    return xr.Dataset(
        {
            "first_difference": first_step(differs),
            "differs": differs.assign_attrs(long_name="any bit differs"),
            "distance": distance.assign_attrs(long_name="L2 norm of the difference"),
        },
        attrs={"differing_settings": differing_names(a, b)},
    )
