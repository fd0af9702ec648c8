"""Whether the arrays of a run are described as the schema has them, and so read as recorded.

What xarray makes of values depends on attributes and types that no checksum of a block covers. Who
opens a run by `open_run` has them checked, in a small part of a millisecond.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import zarr

from trajstore.codec.block_codec import BlockCodec, local_folder
from trajstore.codec.block_form import Runs
from trajstore.errors import FormatError
from trajstore.schema import STEP, Coordinate, coordinate, entry_of
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE

__all__ = ["DECODED", "check_array", "means_time"]

DECODED = frozenset(
    {"scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "calendar", "dtype"}
)
"""Attributes by which xarray reads other values than are stored; no array of a run has one."""

_TIMES = frozenset(
    {"days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"}
)


def means_time(units: Any) -> bool:
    """Whether xarray takes numbers of these units for times.

    >>> means_time("nat"), means_time("days since 2000-01-01")
    (False, True)
    """
    return isinstance(units, str) and (" since " in units or units in _TIMES)


def check_array(name: str, array: zarr.Array[Any], runs: Runs) -> None:
    """Refuse an array that would be read as something else than was recorded.

    Parameters
    ----------
    name : str
    array : zarr.Array
        As zarr opened it. One that no run has is not looked at.
    runs : Runs
        Identity of the run, by the attributes of its root.

    Raises
    ------
    FormatError
        If it has another type or other dimensions than the schema says, an attribute that changes
        its values, a codec of another array or run, or shards of zarr's own; or if the values of
        a coordinate are missing.
    """
    entry = entry_of(name)
    if entry is None:
        return
    attributes = array.attrs.asdict()
    odd = sorted(name for name in DECODED & attributes.keys() if not _is_nan(name, attributes))
    bool_of_xarray = _is_bool_of_xarray(entry, array, attributes)
    if odd and not bool_of_xarray:
        raise _refused(name, f"it has the attribute {odd[0]}, by which xarray changes its values")
    if means_time(attributes.get("units")):
        raise _refused(name, f"its units are {attributes['units']!r}, so xarray reads it as times")
    named = getattr(array.metadata, "dimension_names", None)
    if named != entry.dims:
        raise _refused(name, f"its dimensions are {named}, expected {entry.dims}")
    expected = np.dtype(np.int8) if bool_of_xarray else _stored_type(entry.name, attributes)
    if expected is not None and np.dtype(array.dtype) != expected:
        raise _refused(name, f"it is of type {array.dtype}, expected {expected}")
    if isinstance(entry, Coordinate):
        _check_values_are_there(name, array)
        return
    if array.shards is not None:
        raise _refused(name, "zarr has sharded it, so nothing says whose blocks it holds")
    for codec in getattr(array.metadata, "codecs", ()):
        if isinstance(codec, BlockCodec) and (codec.array, codec.runs) != (name, runs):
            raise _refused(name, "its metadata are those of another array, or of another run")


def _is_nan(name: str, attributes: dict[str, Any]) -> bool:
    """Whether it says that NaN is NaN, as xarray does in its copies."""
    return name == "_FillValue" and attributes[name] in ("AAAAAAAA+H8=", "NaN")


def _is_bool_of_xarray(entry: Any, array: zarr.Array[Any], attributes: dict[str, Any]) -> bool:
    """Whether it is a mask in a copy by an xarray before 2026.9, which has its values as int8."""
    return (
        isinstance(entry, Coordinate)
        and entry.dtype == "bool"
        and np.dtype(array.dtype) == np.int8
        and {name: attributes[name] for name in DECODED & attributes.keys()} == {"dtype": "bool"}
    )


def _stored_type(name: str, attributes: dict[str, Any]) -> np.dtype[Any] | None:
    """Type that an array has in Zarr; None where nothing but a text can be it."""
    if name == STEP.name:
        return STEP_TYPE.stored
    entry = coordinate(name)
    if entry is not None:
        return None if entry.dtype == "string" else np.dtype(entry.dtype)
    native = NATIVE_TYPES.get(str(attributes.get("native_dtype")))
    if native is None:
        raise _refused(name, f"its native_dtype is {attributes.get('native_dtype')!r}")
    return native.stored


def _check_values_are_there(name: str, array: zarr.Array[Any]) -> None:
    """A lost object of a coordinate reads as its fill value; where that can be told, refuse it."""
    root = local_folder(array.store)
    if root is None or array.chunks != array.shape:
        return
    key = array.metadata.encode_chunk_key((0,) * array.ndim)
    if "/" in key:  # a copy that zarr has made, which leaves out what is all fill value
        return
    if not os.path.exists(os.path.join(root, array.path, key)):
        raise _refused(name, "its values are missing")


def _refused(name: str, what: str) -> FormatError:
    return FormatError(
        f"{name} is not as it was recorded: {what}; see what is wrong with: trajstore verify"
    )
