"""First difference of two runs, and their distance."""

from __future__ import annotations

import math
from collections.abc import Hashable

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, field, measure
from trajstore.analysis.several.differences import (
    DIFFERENCE,
    check_comparable,
    differences,
    differing_names,
    first_step,
)
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.schema import NAMES, VARIABLES, variables_of


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


def _without_empty_start(late: xr.DataArray, other: xr.DataArray) -> xr.DataArray:
    """Replace the first row by that of the other run if it is NaN: no step produced its values."""
    start, rest = late.isel(step=[0]), late.isel(step=slice(1, None))
    filled = start.where(~start.isnull().all(), other.isel(step=[0]))
    return xr.concat([filled, rest], "step", combine_attrs="override").rename(late.name)


def _relative(first: Array, second: Array) -> Array:
    size = np.abs(second - first)
    with np.errstate(divide="ignore"):
        return np.asarray(size / np.where(size > 0, np.abs(first), 1))


def _loss_difference(a: xr.Dataset, b: xr.Dataset, over: float) -> dict[str, xr.DataArray]:
    """Relative difference of the losses, and the first step at which it exceeds `over`."""
    if not 0 <= over < math.inf:
        raise InvalidArgument(f"got over={over!r}, expected a fraction such as 0.01")
    for run in (a, b):
        input_checks.variables(run, "loss")
    losses = (run["loss"].astype(np.float64) for run in (a, b))
    relative = xr.apply_ufunc(
        _relative, *losses, join="override", dask="parallelized", output_dtypes=[np.float64]
    )
    return {
        "loss_difference": relative.assign_attrs(
            long_name="difference of the losses, relative to that of the first run", units="1"
        ),
        "first_over": first_step(relative > over).assign_attrs(
            long_name=f"first step at which the losses differ by more than {over:g} of the first"
        ),
    }


@checks_types
def compare(a: xr.Dataset, b: xr.Dataset, over: float | None = None) -> xr.Dataset:
    """First step at which two runs differ in any bit, per variable, and their distance.

    NaNs of the same bits are equal. If one run begins later than the other, the NaN of its first
    row are not compared: no recorded step produced these values.

    Parameters
    ----------
    a, b : Dataset
        Two runs with the same tokens and hidden dimensions. Only common variables and steps are
        compared, those of two types in a type that holds both. Variables of single examples are
        left out if the number of examples differs, and variables of all parameters, or of
        hyperparameters, if their names differ.
    over : float, optional
        A fraction, such as 0.01: also return from which step on the losses differ by more.

    Returns
    -------
    Dataset
        ``first_difference``, int64 (variable): the first common step at which any bit differs, −1
        if none; ``differs``, bool (step, variable); ``distance``, float64 (step, variable): L2
        norm of the difference of all values of a row. The attribute ``differing_settings`` names
        the fields of configuration and optimizer that differ. With `over`, also
        ``loss_difference``, float64 (step): abs(b − a) / abs(a) of the losses, and ``first_over``,
        int64: the first step at which it is larger than `over`, −1 if there is none.

    Raises
    ------
    InvalidArgument
        If tokens or hidden dimensions differ, or there is no common step or variable. The message
        names the difference. For a negative `over`.
    VariableNotRecorded
        With `over`, if a run does not hold ``loss``.

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
        for name in variables_of(a.attrs)
        if name in a and name in b and _shape_of_rows(a[name]) == _shape_of_rows(b[name])
        if all(a[dim].equals(b[dim]) for dim in NAMES if dim in VARIABLES[name].dims)
    ]
    if not steps.size or not names:
        what = "step" if names else "variable"
        raise InvalidArgument(f"the runs have no common {what}; compare runs with a common {what}")
    begins = int(a["step"][0]), int(b["step"][0])
    a, b = a.isel(step=rows_a), b.isel(step=rows_b)
    pairs = []
    for name in names:
        first, second = a[name], b[name]
        if VARIABLES[name].row0 == "nan" and begins[0] != begins[1] and steps[0] == max(begins):
            if begins[0] == steps[0]:
                first = _without_empty_start(first, second)
            else:
                second = _without_empty_start(second, first)
        pairs.append(_difference(first, second).rechunk(-1))
    table = da.stack(pairs, axis=1)

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
            **({} if over is None else _loss_difference(a, b, over)),
        },
        attrs={"differing_settings": differing_names(a, b)},
    )
