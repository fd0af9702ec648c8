"""Differences of two arrays per vector: number of differing elements, and distance."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import Array
from trajstore.analysis.scan.input_checks import flag_attributes
from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_info import comparable_settings
from trajstore.values.native_types import unsigned_view

DIFFERENCE = np.dtype([("differing", np.int64), ("square", np.float64)])
"""Number of elements that differ in any bit, and the squared distance."""


def differences(first: Array, second: Array) -> npt.NDArray[np.void]:
    """`DIFFERENCE` of two arrays of one type along their last axis, (row, …)."""
    x, y = np.ascontiguousarray(first), np.ascontiguousarray(second)
    result = np.empty(x.shape[:-1], DIFFERENCE)
    different = unsigned_view(x) != unsigned_view(y)
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.square(np.subtract(x, y, dtype=np.float64))
    square[~different] = 0  # equal infinities and NaN have no distance
    result["differing"] = different.sum(-1)
    result["square"] = square.sum(-1)
    return result


def first_step(differs: xr.DataArray) -> xr.DataArray:
    """First step at which two runs differ, −1 if they never do: (step, …) of bool to (…)."""
    steps = differs["step"].values
    first: xr.DataArray = xr.apply_ufunc(
        lambda flags: np.where(flags.any(-1), steps[np.argmax(flags, axis=-1)], -1),
        differs.chunk(step=-1),
        input_core_dims=[["step"]],
        dask="parallelized",
        output_dtypes=[np.int64],
    )
    return first.assign_attrs(
        long_name="first step at which any bit differs",
        units="1",
        **flag_attributes({-1: "never"}),
    )


def differing_names(a: xr.Dataset, b: xr.Dataset) -> list[str]:
    """Full names of the settings in which two runs differ, including those of the optimizer."""
    keys = ("config", "segments", "optimizer")
    first, second = comparable_settings([a.attrs, b.attrs], keys)
    return sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )


def check_comparable(a: xr.Dataset, b: xr.Dataset) -> None:
    """Check that two runs have the same tokens and hidden dimensions.

    Raises
    ------
    InvalidArgument
    """
    problems = []
    dims: tuple[Hashable, ...] = ("token", "hidden")
    for dim in dims:
        if a.sizes.get(dim) != b.sizes.get(dim):
            problems.append(f"{dim} has length {a.sizes.get(dim)} and {b.sizes.get(dim)}")
        elif dim in a.coords and dim in b.coords and not (a[dim].values == b[dim].values).all():
            differing = int((a[dim].values != b[dim].values).sum())
            problems.append(f"{differing} of {a.sizes[dim]} ids along {dim} differ")
    if problems:
        names = ", ".join(differing_names(a, b))
        raise InvalidArgument(
            f"the runs cannot be compared: {'; '.join(problems)}"
            + (f"; their configurations differ in {names}" if names else "")
            + "; select the same tokens in the same order from both"
        )
