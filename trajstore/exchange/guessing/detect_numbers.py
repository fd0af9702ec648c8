"""Single numbers of a file: attributes, strings with numbers, arrays of one value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from trajstore.exchange.guessing.kind_table import is_pair, named
from trajstore.formats.array_file import (
    ArrayFile,
    is_number,
    number_in,
    plain_number,
    values_of,
)

_LONGEST_TEXT = 64
_PAIR = re.compile(r"\s*[(\[]([^,]*),([^,]*?),?\s*[)\]]\s*")
_GROUPED = re.compile(r"(?:.+\.)?param_groups\.\d+\.(betas\.[01]|eps|weight_decay)")


def single_numbers(file: ArrayFile, ignored: tuple[str, ...]) -> dict[str, Any]:
    """Single numbers of a file by key. A pair gives two, such as ``betas[0]`` and ``betas[1]``.

    Parameters
    ----------
    file : ArrayFile
    ignored : tuple of str
        Keys to ignore.
    """
    found = dict(_of_attributes(file, ignored))
    for key in file.keys:
        shape = file.shape(key)
        if key in ignored or (shape and named(key).kind is not None):
            continue
        if shape == () or shape == (1,):
            number = number_of_one(file, key)
            if number is not None:
                found[key] = number
        elif shape == (2,) and is_pair(key) and is_number(file.dtype(key)):
            found |= _both(key, [plain_number(value) for value in values_of(file, key)])
    return found | _agreed_of_groups(found)


def number_of_one(file: ArrayFile, key: str) -> int | float | bool | None:
    """Number in an array of one value; None if it is not a number, or not finite."""
    dtype = file.dtype(key)
    if dtype.startswith(("str", "bytes")):
        value = file.read(key).reshape(-1)[0]
        return _number(value.decode(errors="replace") if isinstance(value, bytes) else str(value))
    return plain_number(values_of(file, key).reshape(-1)[0]) if is_number(dtype) else None


def numbers_per_run(file: ArrayFile, ignored: tuple[str, ...]) -> dict[str, list[Any]]:
    """Attributes that are lists of numbers, by key."""
    return {
        key: value
        for key, value in file.attributes.items()
        if isinstance(value, list) and len(value) > 1 and key not in ignored and not is_pair(key)
    }


def _of_attributes(file: ArrayFile, ignored: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in file.attributes.items():
        if key in ignored:
            continue
        pair = _pair(value) if is_pair(key) else None
        if pair is not None:
            yield from _both(key, pair).items()
            continue
        held = value[0] if isinstance(value, list) and len(value) == 1 else value
        number = _number(held) if isinstance(held, str) else held
        if isinstance(number, int | float):
            yield key, number


def _pair(value: Any) -> list[Any] | None:
    """Both numbers of a list, or of a string such as ``(0.9, 0.95)``."""
    if isinstance(value, str):
        match = _PAIR.fullmatch(value) if len(value) <= _LONGEST_TEXT else None
        value = [_number(text) for text in match.groups()] if match else None
    return value if isinstance(value, list) and len(value) == 2 and None not in value else None


def _both(key: str, values: list[Any]) -> dict[str, Any]:
    return {f"{key}[{at}]": value for at, value in enumerate(values) if value is not None}


def _agreed_of_groups(numbers: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters that are equal in all parameter groups of an optimizer's state."""
    by_name: dict[str, set[Any]] = {}
    for key, value in numbers.items():
        if match := _GROUPED.fullmatch(key):
            by_name.setdefault(f"param_groups.{match[1]}", set()).add(value)
    return {key: next(iter(values)) for key, values in by_name.items() if len(values) == 1}


def _number(text: str) -> int | float | None:
    """The finite number in a text."""
    number = number_in(text)
    return number if isinstance(number, int | float) and abs(number) < math.inf else None
