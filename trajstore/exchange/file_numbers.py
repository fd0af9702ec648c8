"""Single numbers of a file, and the attributes of a run that they become: its configuration.

They are attributes, strings with numbers, and arrays of one value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError
from trajstore.exchange.usual_names import (
    ARRAY_KINDS,
    POPULATION_SIZES,
    SCALARS,
    Scalar,
    is_pair,
    named,
    scalar_of,
)
from trajstore.formats.array_file import ArrayFile, is_number, number_in, plain_number, values_of
from trajstore.schema import STEP

STARTING_STEP = ("starting_step", "start_step", "resumed_from", "resume_step")
"""Names of the step at which a training was resumed."""

_ELSEWHERE = ("config", "scalars")
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
    numbers = dict(_of_attributes(file, ignored))
    for key in file.keys:
        shape = file.shape(key)
        if key in ignored or (shape and named(key).kind is not None):
            continue
        if shape == () or shape == (1,):
            number = number_of_one(file, key)
            if number is not None:
                numbers[key] = number
        elif shape == (2,) and is_pair(key) and is_number(file.dtype(key)):
            numbers |= _both(key, [plain_number(value) for value in values_of(file, key)])
    return numbers | _agreed_of_groups(numbers)


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
        single = value[0] if isinstance(value, list) and len(value) == 1 else value
        number = _number(single) if isinstance(single, str) else single
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


def attributes_of(
    where: Path, numbers: Mapping[str, Any], mapped: Mapping[str, str]
) -> dict[str, Any]:
    """Attributes of a run, from the numbers of a file.

    Parameters
    ----------
    where : Path
        Path of the file, for messages.
    numbers : mapping of str to int, float or bool
        Numbers by their keys in the file.
    mapped : mapping of str to str
        Keys and the scalars that they are mapped to.

    Raises
    ------
    FormatError
        If two numbers mean the same quantity and differ.
    """
    attributes: dict[str, Any] = {}
    first: dict[tuple[str, ...], str] = {}
    for key, path, value in _placed(numbers, mapped):
        other = first.setdefault(path, key)
        if other is not key and not _same(numbers[other], numbers[key]):
            raise FormatError(
                f"{where}: {other} is {numbers[other]} and {key} is {numbers[key]}, but both mean "
                f"{'.'.join(path)}; omit one with --map ignore={key}"
            )
        _put(attributes, path, value)
    given = attributes.get("optimizer", {}).get("hyperparameters", {})
    betas = given.pop("betas", {})
    if len(betas) == 2:
        given["betas"] = [betas["0"], betas["1"]]
    elif betas:
        number = next(iter(betas))
        _put(attributes, (*_ELSEWHERE, f"adam_beta{int(number) + 1}"), betas[number])
    if attributes.get("optimizer") == {"hyperparameters": {}}:
        del attributes["optimizer"]
    return attributes


def places_of(numbers: Mapping[str, Any], mapped: Mapping[str, str]) -> dict[str, str]:
    """Path of each number in the attributes, by its key, for display."""
    return {key: ".".join(path) for key, path, _ in _placed(numbers, mapped)}


def scalar_numbers(
    numbers: Mapping[str, Any], name: str, mapped: Mapping[str, str]
) -> dict[str, Any]:
    """Numbers that are a given scalar of the table, by their keys."""
    of_key = {key: _scalar(key, mapped) for key in numbers}
    return {
        key: numbers[key]
        for key, scalar in of_key.items()
        if scalar is not None and scalar.name == name
    }


def _scalar(key: str, mapped: Mapping[str, str]) -> Scalar | None:
    return SCALARS.get(mapped[key]) if key in mapped else scalar_of(key)


def _placed(
    numbers: Mapping[str, Any], mapped: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for key, value in numbers.items():
        lower = key.lower()
        if lower in (*POPULATION_SIZES, *STARTING_STEP):
            continue  # checked, not kept
        if lower in ARRAY_KINDS[STEP.name].names:
            continue  # the label of a row
        if isinstance(value, float) and not math.isfinite(value):
            continue
        if isinstance(value, int) and abs(value) >= 1 << 63:
            continue
        scalar = _scalar(key, mapped)
        if scalar is None and "." in key:
            continue  # a number of one of many parts of a checkpoint
        # The first of several words for a number.
        words = {code: word for word, code in reversed([*scalar.codes.items()])} if scalar else {}
        if scalar is None or (scalar.codes and value not in words):
            yield key, (*_ELSEWHERE, key), value
        else:
            yield key, scalar.paths[0], words.get(value, value)


def _same(number: Any, other: Any) -> bool:
    """True if two numbers are equal to the precision of float32."""
    return math.isclose(number, other, rel_tol=1e-6)


def _put(attributes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        attributes = attributes.setdefault(key, {})
    attributes[last] = value
