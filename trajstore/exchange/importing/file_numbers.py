"""Single numbers of a file, as attributes of a run: its configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError
from trajstore.exchange.guessing.kind_table import ARRAY_KINDS, SCALARS, Scalar, scalar_of
from trajstore.exchange.importing.token_tables import POPULATION_SIZES
from trajstore.schema import STEP

STARTING_STEP = ("starting_step", "start_step", "resumed_from", "resume_step")
"""Names of the step at which a training was resumed."""

_ELSEWHERE = ("config", "scalars")


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


def _same(one: Any, other: Any) -> bool:
    """True if two numbers are equal to the precision of float32."""
    return math.isclose(one, other, rel_tol=1e-6)


def _put(attributes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        attributes = attributes.setdefault(key, {})
    attributes[last] = value
