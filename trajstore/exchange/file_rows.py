"""Steps of the rows of a file, by labels, by a number, or counted.

Some labels count callbacks instead of steps, and some files have no labels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.imported_run import RunPart
from trajstore.exchange.layouts import Column, Layout
from trajstore.exchange.usual_names import ARRAY_KINDS, STARTING_STEP
from trajstore.formats.array_file import ArrayFile, values_of
from trajstore.schema import STEP
from trajstore.units import format_bytes

Array = npt.NDArray[Any]

_MOST_ROWS = 1 << 22
_COPIES_OF_A_ROW = 3
_BYTES_OF_A_TOKEN = 64  # its id, mask and count, while they are checked


def check_size(path: Path, key: str, shape: tuple[int, ...], dtype: str, memory: int) -> None:
    """Refuse a file with too many rows, or with rows that do not fit into the memory.

    Parameters
    ----------
    path : Path
        Path of the file, for messages.
    key : str
        Key of the array.
    shape : tuple of int
        (step, token, hidden).
    dtype : str
    memory : int
        Bytes that may be used.

    Raises
    ------
    FormatError
        If there are more than 4,194,304 rows.
    InvalidArgument
        If one row needs more memory; the message names the necessary size.
    """
    rows, tokens, hidden = shape
    if rows > _MOST_ROWS:
        raise FormatError(
            f"{path}: {key} has {rows:,} rows, but an import accepts at most {_MOST_ROWS:,}"
        )
    row = tokens * hidden * (8 if "64" in dtype else 4 if "32" in dtype else 2)
    need = _COPIES_OF_A_ROW * row + _BYTES_OF_A_TOKEN * tokens
    if need > memory:
        raise InvalidArgument(
            f"{path}: {key} has rows of {format_bytes(row)}; reading one needs "
            f"{format_bytes(need)}, but the memory budget is {format_bytes(memory)}; raise it: "
            f"memory='{-(-need >> 20)}MiB'"
        )


def checked_labels(where: Any, name: str, labels: Array) -> Array:
    """Check the labels of the rows of a file, and return them as step numbers.

    Parameters
    ----------
    where : path-like
        Path of the file, for messages.
    name : str
        Name of the array of labels.
    labels : ndarray of int, (step,)

    Raises
    ------
    FormatError
        If they are negative, too large, or do not increase.
    """
    wrong = (labels < 0) | (labels >= 1 << 62)
    wrong[1:] |= labels[1:] <= labels[:-1]
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        after = f" after {labels[row - 1]}" if row else ""
        raise FormatError(
            f"{where}: {name} holds {labels[row]}{after} in row {row}, expected increasing step "
            "numbers of at least 0; replace them with labels={'steps': '0:2001:50'}"
        )
    return labels.astype(np.int64)


def true_steps(
    labels: Array, *, name: str = "recorded_steps", trusted: bool = False
) -> tuple[Array, str | None]:
    """Optimizer steps of the rows of a file, from their labels.

    The recorder of notebooks 14.1a, 15.1a and 1.12f counted a callback that fires after every step
    and once more at the end of an epoch, when nothing is recorded. Its labels therefore skip a
    number after every epoch: 10,001 rows are labeled 0 to 10001, and every label past step 8,306 is
    one too high. Holes at every multiple of one number of rows show this error. All other labels
    are kept.

    Parameters
    ----------
    labels : ndarray of int64, (step,)
    name : str
        Name of the array of labels.
    trusted : bool
        True if the labels are known to count optimizer steps.

    Returns
    -------
    steps : ndarray of int64, (step,)
    note : str, optional
        Note on the correction.
    """
    spacing = np.diff(labels)
    holes = np.flatnonzero(spacing == 2)
    if trusted or not len(holes) or labels[0] != 0 or spacing.max() > 2:
        return labels, None
    epoch = int(holes[0])
    if epoch == 0 or not np.array_equal(holes, np.arange(epoch, len(spacing), epoch)):
        return labels, None
    return np.arange(len(labels), dtype=np.int64), (
        f"{name} runs from 0 to {labels[-1]} in {len(labels)} rows and skips a number "
        f"every {epoch} rows, at the end of each epoch: it counted callbacks; the rows were "
        f"labeled as optimizer steps 0 to {len(labels) - 1}; labels={{'steps': {name!r}}} keeps "
        "its labels"
    )


def named_steps(text: str, rows: int) -> Array:
    """Parse given steps: ``0:2001:50`` as in Python, or numbers separated by commas.

    Raises
    ------
    InvalidArgument
        If the text is invalid, or does not give one increasing step for each row.

    Examples
    --------
    >>> named_steps("0:200:50", 4)
    array([  0,  50, 100, 150])
    """
    span = re.fullmatch(r"(\d{1,15}):(\d{1,15})(?::([1-9]\d{0,14}))?", text)
    if span is not None:
        start, stop, stride = int(span[1]), int(span[2]), int(span[3] or 1)
        count = len(range(start, stop, stride))
        steps = np.arange(min(count, rows + 1), dtype=np.int64) * stride + start
    elif re.fullmatch(r"\d{1,15}(,\d{1,15})*", text):
        steps = np.array([int(word) for word in text.split(",")], np.int64)
        count = len(steps)
    else:
        raise InvalidArgument(
            f"got steps {text!r}, expected the name of an array, 0:2001:50, or 0,10,50"
        )
    if count != rows or (np.diff(steps) <= 0).any():
        raise InvalidArgument(
            f"got {count} steps from {text!r}, expected {rows} that increase, one for each row; "
            "the end of a range is not part of it"
        )
    return steps


def steps_of(file: ArrayFile, layout: Layout, part: RunPart) -> tuple[Array, list[str]]:
    """Optimizer steps of the rows of a run in a file, and notes on them.

    Raises
    ------
    FormatError, InvalidArgument
        If the labels contradict each other, or do not fit the rows.
    """
    rows = part.rows(file)
    if layout.steps is not None:
        return named_steps(layout.steps, rows), []
    trusted = file.attributes.get("steps") == "optimizer" or layout.true_steps
    labels = [each for each in part.columns if each.kind == STEP.name]
    start = number_of_steps(part.numbers, STARTING_STEP)
    if labels:
        steps = _labels_of(file, part, labels[0], rows)
        for other in labels[1:]:
            if not np.array_equal(_labels_of(file, part, other, rows), steps):
                raise FormatError(
                    f"{file.path}: {labels[0].key} and {other.key} label the rows differently; "
                    f"choose with labels={{'steps': {labels[0].key!r}}}"
                )
        name = labels[0].key
        if layout.first_step not in (None, int(steps[0])):
            raise InvalidArgument(
                f"{file.path}: got first_row={layout.first_step}, but {name} labels the first row "
                f"as step {steps[0]}; omit one, or replace the labels with "
                f"labels={{'steps': '{layout.first_step}:{layout.first_step + rows}'}}"
            )
        trusted = trusted or file.format == "folder"
        steps, note = true_steps(steps, name=name, trusted=trusted)
        return steps, [note] if note else []
    first = int(layout.begins_late) if layout.first_step is None else layout.first_step
    if part.is_single(file):
        step = number_of_steps(part.numbers, ARRAY_KINDS[STEP.name].names, in_groups=True)
        note = (
            f"{part.anchor.key} is one state without a step number; it was taken as the state "
            f"after step {first}; labels={{'steps': 'N'}} names another one"
        )
        return np.array([first if step is None else step], np.int64), [note] * (step is None)
    steps = (start or first) + np.arange(rows, dtype=np.int64)
    note = (
        f"the file has no labels of steps; its rows were taken as steps {steps[0]} to {steps[-1]}"
    )
    return steps, [] if trusted else [note]


def _labels_of(file: ArrayFile, part: RunPart, column: Column, rows: int) -> Array:
    """Labels of the rows. Labels of several runs have a first axis of runs."""
    shape = file.shape(column.key) or (1,)
    if rows in shape:
        values = values_of(file, column.key).reshape(shape)
        if values.ndim == 2 and part.outer is not None and len(values) > part.outer:
            values = values[part.outer]
        shape = values.shape
    if shape != (rows,):
        raise FormatError(
            f"{file.path}: {column.key} has shape {shape}, expected ({rows},): {part.anchor.key} "
            f"has {rows} rows"
        )
    return checked_labels(file.path, column.key, values)


def number_of_steps(
    numbers: Mapping[str, Any], names: Collection[str], *, in_groups: bool = False
) -> int | None:
    """A number of a file that counts steps, by its name, or also by its name in a group."""
    for key, value in numbers.items():
        name = key.lower().rpartition(".")[2] if in_groups else key.lower()
        if name in names and isinstance(value, int) and 0 <= value < 1 << 61:
            return value
    return None
