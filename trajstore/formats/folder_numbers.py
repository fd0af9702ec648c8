"""Numbers of a folder of one file per step: equal ones, differing ones, and logged ones.

A number that is equal in all files is stored once; a number that differs has a row per file.
Hugging Face's Trainer logs numbers in `trainer_state.json`, next to its checkpoints or in them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError

__all__ = ["common_numbers", "logged_rows", "numbers_of_steps"]

Array = npt.NDArray[Any]

_LARGEST = 1 << 62
_MOST_NAMED = 12
_LONGEST_TEXT = 64


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


def _of_text(value: Any) -> Any:
    """The number in a string, as in metadata of safetensors; any other value unchanged."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        return value
    try:
        return int(value) if value.lstrip("+-").isdecimal() else float(value)
    except ValueError:
        return value


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
        values = [_of_text(each.get(key)) for each in files]
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


_STATE, _MODEL = "trainer_state.json", "config.json"
_LARGEST_LOG = 64 << 20
_NAMES = ("loss", "learning_rate", "grad_norm")
_TRUE_RATES = (4, 51)
"""First version of transformers that logs the learning rate of the step itself.

Earlier versions log the rate of the following step: huggingface/transformers#36973.
"""


def logged_rows(
    path: Path, entries: Sequence[tuple[int, Path]]
) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, str]]:
    """Numbers that a Trainer logged at the steps of its checkpoints; NaN for other checkpoints.

    A logged loss is the mean over all steps since the previous log. It is the loss of a step only
    if that is one step.

    Parameters
    ----------
    path : Path
        Folder of the checkpoints. If it holds no state, the state of the last checkpoint is read.
    entries : sequence of (int, Path)
        Steps and checkpoints.

    Returns
    -------
    rows : dict of str to ndarray, (checkpoint,)
    omitted : dict of str to str
        Logged numbers without rows, and rows that are NaN, with reasons.

    Raises
    ------
    FormatError
        If a file is not the state or configuration of a Trainer.
    """
    file = next((at / _STATE for at in (path, entries[-1][1]) if (at / _STATE).is_file()), None)
    if file is None:
        return {}, {}
    logged, left = _logged(file, _version(entries[-1][1] / _MODEL))
    rows = {}
    for name, values in logged.items():
        found = [values.get(step, math.nan) for step, _ in entries]
        absent = [f"checkpoint-{step}" for step, _ in entries if step not in values]
        if len(absent) == len(entries):
            left[f"{name} of {_STATE}"] = "logged at none of these steps"
            continue
        rows[name] = np.array(found, np.float64)
        if [step for step, _ in entries if step and step not in values]:
            names = ", ".join(absent[:12]) + (" …" if len(absent) > 12 else "")
            left[f"{name} of {names}"] = f"not in {_STATE}, so NaN in the run"
    return rows, left


def _logged(
    file: Path, version: tuple[int, int] | None
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Numbers by name and step, and omitted ones with reasons."""
    content = _read(file)
    entries = content.get("log_history") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise FormatError(f"{file} holds no list log_history, which a Trainer writes")
    found: dict[str, dict[int, float]] = {name: {} for name in _NAMES}
    means, before = 0, 0
    for entry in entries:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or "loss" not in entry:
            continue  # the log of an evaluation, or of the end
        for name in _NAMES:
            value = _number(entry.get(name))
            if value is not None and (name != "loss" or step - before == 1):
                found[name][step] = value
        means += step - before != 1
        before = step
    left = {}
    if means:
        left[f"loss of {file.name}"] = f"{means} of its entries are means over several steps"
    if version is None and found.pop("learning_rate"):
        left[f"learning_rate of {file.name}"] = (
            f"no {_MODEL} names the version of transformers, and versions before "
            f"{'.'.join(map(str, _TRUE_RATES))} log the rate of the following step"
        )
    elif version is not None and version < _TRUE_RATES:
        rates = found["learning_rate"]
        found["learning_rate"] = {step + 1: rate for step, rate in rates.items()}
    return {name: values for name, values in found.items() if values}, left


def _version(file: Path) -> tuple[int, int] | None:
    """Version of transformers that saved a model; None if unknown."""
    text = _read(file).get("transformers_version") if file.is_file() else None
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text) if isinstance(text, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


def _read(file: Path) -> Any:
    if file.stat().st_size > _LARGEST_LOG:
        raise FormatError(
            f"{file} has {file.stat().st_size} bytes, expected at most {_LARGEST_LOG}"
        )
    try:
        content = json.loads(file.read_bytes().decode())  # a Trainer writes NaN, too
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot read {file}: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{file} holds {type(content).__name__}, expected a JSON object")
    return content


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
