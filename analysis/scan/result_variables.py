"""Variables of a result: their types, attributes and flags, and Datasets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

NO_ROW_BEFORE = "no_row_before"
"""Meaning of −1 in the first row of a quantity of changes between rows."""


def flag_attributes(
    meanings: Mapping[int, str] | Sequence[str], dtype: npt.DTypeLike = np.int64
) -> dict[str, Any]:
    """CF attributes with the meanings of some values of a variable.

    Parameters
    ----------
    meanings : mapping of int to str, or sequence of str
        Words without spaces, by value, or by position in a sequence. If all flagged values are
        negative, the other values of the variable are numbers; otherwise all values are flags.
    dtype : dtype
        Type of the variable.

    Examples
    --------
    >>> flag_attributes({-1: "never"})
    {'flag_values': array([-1]), 'flag_meanings': 'never'}
    """
    known = meanings if isinstance(meanings, Mapping) else dict(enumerate(meanings))
    return {
        "flag_values": np.array([*known], dtype),
        "flag_meanings": " ".join(known.values()),
    }


def flags_of(array: xr.DataArray) -> dict[int, str]:
    """Meanings of flagged values; empty if all values are numbers."""
    if "flag_values" not in array.attrs:
        return {}
    values = np.atleast_1d(array.attrs["flag_values"]).tolist()
    return dict(zip(values, array.attrs["flag_meanings"].split(), strict=True))


def is_category(array: xr.DataArray) -> bool:
    """True if every value of a variable is a flag."""
    return max(flags_of(array), default=-1) >= 0


def with_flag(array: xr.DataArray, value: int, meaning: str) -> xr.DataArray:
    """The variable with one additional flag."""
    known = {value: meaning, **flags_of(array)}
    return array.assign_attrs(flag_attributes(known, array.dtype))


class ResultVariable(NamedTuple):
    """One variable of a result.

    Attributes
    ----------
    type : str
        NumPy type of one value. A type with a shape adds dimensions.
    long_name : str
    units : str, optional
        Default: 1. None: no units.
    flags : mapping of int to str, or sequence of str
        As for `flag_attributes`.
    """

    type: str
    long_name: str
    units: str | None = "1"
    flags: Mapping[int, str] | Sequence[str] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        """CF attributes of the variable."""
        units = {} if self.units is None else {"units": self.units}
        flags = flag_attributes(self.flags, np.dtype(self.type).base) if self.flags else {}
        return {"long_name": self.long_name, **units, **flags}


ResultVariables = Mapping[str, ResultVariable]
"""Variables of a result by name."""


def record_of(variables: ResultVariables) -> np.dtype[Any]:
    """Structured type with one field per variable."""
    return np.dtype([(name, variable.type) for name, variable in variables.items()])


def dataset(
    variables: Mapping[str, tuple[Any, Any, ResultVariable]], coords: Mapping[Any, Any]
) -> xr.Dataset:
    """Dataset of variables: dimensions, data, and the attributes."""
    arrays = {
        name: (dims, data, variable.attributes)
        for name, (dims, data, variable) in variables.items()
    }
    return xr.Dataset(arrays, coords)


def field(measured: da.Array, name: str) -> da.Array:
    """One field of structured blocks, contiguous. A field with a shape adds dimensions.

    Parameters
    ----------
    measured : dask Array of a structured dtype
    name : str
    """
    kind = measured.dtype[name]
    ndim = measured.ndim + len(kind.shape)
    return measured.map_blocks(
        _field,
        name,
        dtype=kind.base,
        new_axis=list(range(measured.ndim, ndim)) or None,
        chunks=(*measured.chunks, *((length,) for length in kind.shape)),
        meta=np.empty((0,) * ndim, kind.base),
        token=f"field-{name}",
    )


def _field(measured: npt.NDArray[np.void], name: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(measured[name])


def table(
    measured: da.Array, results: ResultVariables, dims: Sequence[str], coords: Mapping[Any, Any]
) -> xr.Dataset:
    """Dataset of measured variables, with their attributes.

    Parameters
    ----------
    measured : dask Array of `record_of` these variables
    results : mapping of str to ResultVariable
    dims : sequence of str
        Dimensions of the array, and the one that a type with a shape adds.
    coords : mapping
    """
    arrays = {name: field(measured, name) for name in results}
    variables = {name: (dims[: data.ndim], data, results[name]) for name, data in arrays.items()}
    return dataset(variables, coords)
