"""Numbers of a file besides its rows, and their places in the attributes of a run.

Numbers are attributes, strings with numbers, and arrays of one value. They become the configuration
of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from trajstore.exchange.usual_names import (
    ARRAY_KINDS,
    POPULATION_SIZES,
    SCALARS,
    STARTING_STEP,
    Scalar,
    is_pair,
    scalar_of,
)
from trajstore.formats.array_file import (
    ArrayFile,
    contradiction,
    is_number,
    number_in,
    plain_number,
    values_of,
)
from trajstore.schema import STEP

_ELSEWHERE = ("config", "scalars")
_LONGEST_TEXT = 64
_PAIR = re.compile(r"\s*[(\[]([^,]*),([^,]*?),?\s*[)\]]\s*")
_GROUPED = re.compile(r"(?:.+\.)?param_groups\.\d+\.(betas\.[01]|eps|weight_decay)")


def numbers_of(
    file: ArrayFile, besides: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Single numbers of a file by key, and its lists of one number per run.

    A pair gives two numbers, such as ``betas[0]`` and ``betas[1]``.

    Parameters
    ----------
    file : ArrayFile
    besides : collection of str, optional
        Keys of arrays of rows and of tokens, and keys to ignore.
    """
    numbers: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for key, held in chain(file.attributes.items(), _small_arrays(file)):
        if key in besides:
            continue
        values = [_number(value) for value in _parts(key, held)]
        if is_pair(key) and len(values) == 2:
            numbers |= {f"{key}[{at}]": n for at, n in enumerate(values) if n is not None}
        elif len(values) == 1 and values[0] is not None:
            numbers[key] = values[0]
        elif len(values) > 1 and None not in values:
            lists[key] = values
    return numbers | _agreed_of_groups(numbers), lists


def _small_arrays(file: ArrayFile) -> Iterator[tuple[str, list[Any]]]:
    """Arrays of one value, pairs, and arrays with the name of a number."""
    for key in file.keys:
        shape, dtype = file.shape(key), file.dtype(key)
        if shape in ((), (1,)) and dtype.startswith(("str", "bytes")):
            value = file.read(key).reshape(-1)[0]
            yield key, [value.decode(errors="replace") if isinstance(value, bytes) else str(value)]
        elif is_number(dtype) and (
            shape in ((), (1,))
            or (shape == (2,) and is_pair(key))
            or (len(shape) == 1 and scalar_of(key) is not None)
        ):
            yield key, [plain_number(value) for value in values_of(file, key).reshape(-1)]


def _parts(key: str, held: Any) -> list[Any]:
    """The values of a list, or of a pair in a string such as ``(0.9, 0.95)``."""
    if isinstance(held, str) and is_pair(key) and len(held) <= _LONGEST_TEXT:
        match = _PAIR.fullmatch(held)
        return list(match.groups()) if match else [held]
    return held if isinstance(held, list) else [held]


def _number(value: Any) -> int | float | None:
    """A finite number, also one in a text."""
    number = number_in(value)
    return number if isinstance(number, int | float) and abs(number) < math.inf else None


def _agreed_of_groups(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that are equal in all parameter groups of an optimizer's state."""
    by_name: dict[str, set[Any]] = {}
    for key, value in numbers.items():
        if match := _GROUPED.fullmatch(key):
            by_name.setdefault(f"param_groups.{match[1]}", set()).add(value)
    return {key: next(iter(values)) for key, values in by_name.items() if len(values) == 1}


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
        # Equal to the precision of float32.
        if not math.isclose(numbers[other], numbers[key], rel_tol=1e-6):
            raise contradiction(
                where,
                f"{other} is {numbers[other]} and {key} is {numbers[key]}, but both mean "
                f"{'.'.join(path)}",
                key,
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
    return {key: numbers[key] for key, each in of_key.items() if each and each.name == name}


def _scalar(key: str, mapped: Mapping[str, str]) -> Scalar | None:
    return SCALARS[mapped[key]] if key in mapped else scalar_of(key)


def _placed(
    numbers: Mapping[str, Any], mapped: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    checked = (*POPULATION_SIZES, *STARTING_STEP, *ARRAY_KINDS[STEP.name].names)
    for key, value in numbers.items():
        too_large = isinstance(value, int) and abs(value) >= 1 << 63
        if key.lower() in checked or too_large:
            continue  # checked, not kept
        scalar = _scalar(key, mapped)
        if scalar is None and "." in key:
            continue  # a number of one of many parts of a checkpoint
        # The first of several words for a number.
        words = {code: word for word, code in reversed([*scalar.codes.items()])} if scalar else {}
        if scalar is None or (scalar.codes and value not in words):
            yield key, (*_ELSEWHERE, key), value
        else:
            yield key, scalar.paths[0], words.get(value, value)


def _put(attributes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        attributes = attributes.setdefault(key, {})
    attributes[last] = value
