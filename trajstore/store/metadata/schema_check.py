"""Comparison of the arrays' metadata with the schema, so that values are read as recorded.

The values that xarray returns depend on attributes and types that no checksum of a block covers.
`open_run` checks them, in a small fraction of a millisecond.
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
"""Attributes by which xarray changes stored values. No array of a run has one."""

_TIMES = frozenset(
    {"days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"}
)


def means_time(units: Any) -> bool:
    """True if xarray interprets numbers with these units as times.

    >>> means_time("nat"), means_time("days since 2000-01-01")
    (False, True)
    """
    return isinstance(units, str) and (" since " in units or units in _TIMES)


def check_array(name: str, array: zarr.Array[Any], runs: Runs) -> None:
    """Raise an error if the values of an array would be read otherwise than recorded.

    Parameters
    ----------
    name : str
    array : zarr.Array
        Opened by zarr. An array that is not in the schema is ignored.
    runs : Runs
        Identity of the run, from the attributes of its root.

    Raises
    ------
    FormatError
        If the type or the dimensions differ from the schema, an attribute changes the values, the
        codec belongs to another array or run, zarr sharded the array, or the values of a coordinate
        are missing.
    """
    entry = entry_of(name)
    if entry is None:
        return
    attributes = array.attrs.asdict()
    odd = sorted(name for name in DECODED & attributes.keys() if not _is_nan(name, attributes))
    bool_of_xarray = _is_bool_of_xarray(entry, array, attributes)
    if odd and not bool_of_xarray:
        raise _refused(name, f"its attribute {odd[0]} makes xarray change its values")
    if means_time(attributes.get("units")):
        raise _refused(name, f"its units are {attributes['units']!r}, so xarray reads it as times")
    named = getattr(array.metadata, "dimension_names", None)
    if named != entry.dims:
        raise _refused(name, f"its dimensions are {named}, expected {entry.dims}")
    expected = np.dtype(np.int8) if bool_of_xarray else _stored_type(entry.name, attributes)
    if expected is not None and np.dtype(array.dtype) != expected:
        raise _refused(name, f"its type is {array.dtype}, expected {expected}")
    if isinstance(entry, Coordinate):
        _check_values_exist(name, array)
        return
    if array.shards is not None:
        raise _refused(name, "zarr sharded it, so its blocks have no labels")
    for codec in getattr(array.metadata, "codecs", ()):
        if isinstance(codec, BlockCodec) and (codec.array, codec.runs) != (name, runs):
            raise _refused(name, "its metadata belongs to another array or another run")


def _is_nan(name: str, attributes: dict[str, Any]) -> bool:
    """True for the fill value NaN, which xarray adds in its copies and which changes nothing."""
    return name == "_FillValue" and attributes[name] in ("AAAAAAAA+H8=", "NaN")


def _is_bool_of_xarray(entry: Any, array: zarr.Array[Any], attributes: dict[str, Any]) -> bool:
    """True for a mask in a copy by xarray before 2026.9, which stores its values as int8."""
    return (
        isinstance(entry, Coordinate)
        and entry.dtype == "bool"
        and np.dtype(array.dtype) == np.int8
        and {name: attributes[name] for name in DECODED & attributes.keys()} == {"dtype": "bool"}
    )


def _stored_type(name: str, attributes: dict[str, Any]) -> np.dtype[Any] | None:
    """Type of an array in Zarr; None for strings, which have no other type."""
    if name == STEP.name:
        return STEP_TYPE.stored
    entry = coordinate(name)
    if entry is not None:
        return None if entry.dtype == "string" else np.dtype(entry.dtype)
    native = NATIVE_TYPES.get(str(attributes.get("native_dtype")))
    if native is None:
        raise _refused(name, f"its native_dtype is {attributes.get('native_dtype')!r}")
    return native.stored


def _check_values_exist(name: str, array: zarr.Array[Any]) -> None:
    """Raise an error if the object of a coordinate is missing: zarr would read its fill value."""
    root = local_folder(array.store)
    if root is None or array.chunks != array.shape:
        return
    key = array.metadata.encode_chunk_key((0,) * array.ndim)
    if "/" in key:  # a copy by zarr, which omits objects that hold the fill value only
        return
    if not os.path.exists(os.path.join(root, array.path, key)):
        raise _refused(name, "its values are missing")


def _refused(name: str, why: str) -> FormatError:
    return FormatError(
        f"{name} differs from what was recorded: {why}; list the damage with: trajstore verify"
    )
