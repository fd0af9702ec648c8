"""The result of an evaluation at one step: a dict of values, as a Dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.schema import COORDINATES, STEP, VARIABLES

_KINDS = "biufO"
"""Kinds of types that are stored: booleans, numbers and texts."""


def step_dataset(result: Any, step: int) -> xr.Dataset:
    """Return the values of one step as a Dataset along ``step``.

    Parameters
    ----------
    result : mapping
        By name: scalars, texts, arrays, tensors, pairs (dimensions, array), or DataArrays. Arrays
        without dimensions get the dimensions ``NAME_0``, ``NAME_1`` …
    step : int

    Raises
    ------
    InvalidArgument
        If the result is something else, or a name is one of a run.
    """
    if not isinstance(result, Mapping) or not result:
        raise InvalidArgument(
            f"step {step}: the function returned {type(result).__name__}, expected a dict of "
            "values by name"
        )
    taken = [name for name in result if name in VARIABLES or name in COORDINATES]
    if taken or STEP.name in result:
        raise InvalidArgument(
            f"step {step}: the function returned {taken[0] if taken else STEP.name}, which is a "
            "name of a run; return it under another name"
        )
    found = {}
    for name, value in result.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"step {step}: got the name {name!r}, expected a string")
        try:
            found[name] = _array(name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"step {step}: {name} is {type(value).__name__}, expected a number, a text, an "
                f"array, or (dimensions, array): {error}"
            ) from error
    try:
        ds = xr.Dataset(found)
    except ValueError as error:
        raise InvalidArgument(f"step {step}: the results do not fit together: {error}") from error
    ds = ds.drop_vars(STEP.name, errors="ignore").expand_dims({STEP.name: [step]})
    ds[STEP.name].attrs = {"long_name": STEP.long_name, "units": STEP.units}
    return ds


def check_like(ds: xr.Dataset, first: xr.Dataset) -> None:
    """Check that the result of a step has the form of the results before.

    Raises
    ------
    InvalidArgument
        If names, dimensions, lengths, types or coordinates differ.
    """
    step = ds[STEP.name].values[0]
    if ds.data_vars.keys() != first.data_vars.keys():
        raise InvalidArgument(
            f"step {step}: the function returned {', '.join(map(str, ds.data_vars))}, but "
            f"{', '.join(map(str, first.data_vars))} at the steps before; return the same names"
        )
    for name, values in ds.data_vars.items():
        for what, new, old in (
            ("dimensions", values.dims[1:], first[name].dims[1:]),
            ("shape", values.shape[1:], first[name].shape[1:]),
            ("type", _type(values), _type(first[name])),
        ):
            if new != old:
                raise InvalidArgument(
                    f"step {step}: {name} has {what} {new}, but {old} at the steps before; return "
                    "the same form at every step"
                )
    for name, values in ds.coords.items():
        if name != STEP.name and not (name in first.coords and values.equals(first[name])):
            raise InvalidArgument(
                f"step {step}: the coordinate {name} differs from that of the steps before"
            )


def _type(values: xr.DataArray) -> str:
    return "text" if values.dtype.kind in "OT" else values.dtype.name


def _array(name: str, value: Any) -> xr.DataArray:
    if isinstance(value, xr.DataArray):
        return value.copy(data=_values(value.values))
    if isinstance(value, tuple):
        dims, *rest = value
        values = _values(rest[0])
        return xr.DataArray(values, dims=dims, attrs=dict(*rest[1:]))
    values = _values(value)
    return xr.DataArray(values, dims=[f"{name}_{axis}" for axis in range(values.ndim)])


def _values(value: Any) -> Any:
    """Return a copy as an array. The function may change its tensors in the next step."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    values = np.array(value)
    if values.dtype.kind in "UT":  # NumPy's fixed width drops NUL characters at the end of a text
        values = np.array(value, dtype=object)
    if values.dtype.kind == "O" and not all(isinstance(one, str) for one in values.flat):
        raise TypeError("it has values that are neither numbers nor texts")
    if values.dtype.kind not in _KINDS:
        raise TypeError(f"values of type {values.dtype} are not stored")
    return values
