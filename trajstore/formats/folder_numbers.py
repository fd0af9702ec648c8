"""Numbers of a folder of one file per step.

A number that is equal in all files is stored once; a number that differs has a row per file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.formats.array_file import number_in

Array = npt.NDArray[Any]

_LARGEST = 1 << 62
_MOST_NAMED = 12


def common_numbers(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers and strings that are equal in all files."""
    first = files[0]
    return {
        key: value
        for key, value in first.items()
        if all(key in other and _same(other[key], value) for other in files)
    }


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def numbers_of_steps(
    files: Sequence[Mapping[str, Any]], name: Callable[[int], str]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Numbers that differ between files, by key; and other differing values.

    A number that only the first file lacks starts with the second file, as arrays may. If other
    files lack it, their rows are NaN.

    Parameters
    ----------
    files : sequence of mapping
        Strings and numbers of each file.
    name : callable
        Name of a file, by its position.

    Returns
    -------
    series : dict of str to ndarray
    omitted : dict of str to str
        Differing values without a row per file, and rows that are NaN, with reasons.
    """
    common = common_numbers(files)
    series: dict[str, Array] = {}
    left: dict[str, str] = {}
    for key in dict.fromkeys(key for each in files for key in each):
        if key in common or "." in key or "/" in key:
            continue  # a number of a part of a model or of an optimizer
        values = [number_in(each.get(key)) for each in files]
        first = 1 if values[0] is None and len(values) > 1 else 0
        absent = [place for place in range(first, len(values)) if values[place] is None]
        held = [value for value in values if value is not None]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in held):
            left[key] = "not a number, and it differs between files"
        elif any(isinstance(value, int) and abs(value) >= _LARGEST for value in held):
            left[key] = "a number too large"
        elif not absent and all(isinstance(value, int) for value in held):
            series[key] = np.array(values[first:], np.int64)
        else:
            rows = [math.nan if value is None else float(value) for value in values[first:]]
            series[key] = np.array(rows, np.float64)
            if absent:
                names = ", ".join(name(place) for place in absent[:_MOST_NAMED])
                more = " …" if len(absent) > _MOST_NAMED else ""
                left[f"{key} of {names}{more}"] = "missing, so NaN in the run"
    return series, left
