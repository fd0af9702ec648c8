"""Values that are categories or have a special meaning, with CF attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
