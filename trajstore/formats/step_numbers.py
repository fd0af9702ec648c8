"""Numbers and tables of a folder of one file per step: what all files say alike, and what differs.

What all say alike is told once, as one file would; numbers that differ have a row per file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["common_numbers", "numbers_of_steps"]

Array = npt.NDArray[Any]

_LARGEST = 1 << 62
_MOST_NAMED = 12
_LONGEST_TEXT = 64


def common_numbers(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all files say alike."""
    first = told[0]
    return {
        key: value
        for key, value in first.items()
        if all(key in other and _same(other[key], value) for other in told)
    }


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _of_text(value: Any) -> Any:
    """The number that a text is, as metadata of safetensors have it; any other value as it is."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        return value
    try:
        return int(value) if value.lstrip("+-").isdecimal() else float(value)
    except ValueError:
        return value


def numbers_of_steps(
    told: Sequence[Mapping[str, Any]], name: Callable[[int], str]
) -> tuple[dict[str, tuple[int, Array]], dict[str, str]]:
    """Numbers that differ from file to file, by key, with the first file that has them; the rest.

    A number that the first file alone lacks begins with the second, as arrays may; where others
    lack it, its row is NaN.

    Parameters
    ----------
    told : sequence of mapping
        Texts and numbers of each file.
    name : callable
        Name of a file, by its place.

    Returns
    -------
    series : dict of str to (int, ndarray)
    left_out : dict of str to str
        What differs and has no row per file, and why; and the rows that are NaN.
    """
    common = common_numbers(told)
    series: dict[str, tuple[int, Array]] = {}
    left: dict[str, str] = {}
    for key in dict.fromkeys(key for each in told for key in each):
        if key in common or "." in key or "/" in key:
            continue  # those are of the parts of a model or of an optimizer
        values = [_of_text(each.get(key)) for each in told]
        first = 1 if values[0] is None and len(values) > 1 else 0
        absent = [place for place in range(first, len(values)) if values[place] is None]
        held = [value for value in values if value is not None]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in held):
            left[key] = "no number that is the same in all files"
        elif any(isinstance(value, int) and abs(value) >= _LARGEST for value in held):
            left[key] = "a number too large"
        elif not absent and all(isinstance(value, int) for value in held):
            series[key] = first, np.array(values[first:], np.int64)
        else:
            rows = [math.nan if value is None else float(value) for value in values[first:]]
            series[key] = first, np.array(rows, np.float64)
            if absent:
                names = ", ".join(name(place) for place in absent[:_MOST_NAMED])
                more = " …" if len(absent) > _MOST_NAMED else ""
                left[f"{key} of {names}{more}"] = "not there, so NaN in the run"
    return series, left
