"""Rows of a file: their number, their steps, and the state that each row holds.

Some labels count callbacks instead of steps, and some files have no labels. A row holds the state
after its step, or the state before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.byte_sizes import format_bytes
from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.importing.imported_file import ImportedVariable, first_row_is_blank
from trajstore.schema import VARIABLES
from trajstore.values.native_types import is_zero_or_nan

__all__ = [
    "Alignment",
    "aligned",
    "check_size",
    "checked_labels",
    "named_steps",
    "true_steps",
    "unlabeled_steps",
]

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
            f"{format_bytes(need)}, but the memory budget is {format_bytes(memory)}; raise it "
            f"(--memory {-(-need >> 20)}MiB)"
        )


Array = npt.NDArray[Any]


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
            "numbers of at least 0; replace them with --labels steps=…"
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
        f"labeled as optimizer steps 0 to {len(labels) - 1} (--labels steps={name} keeps its "
        "labels)"
    )


def unlabeled_steps(rows: int, *, first: int = 0) -> tuple[Array, str]:
    """Steps of the rows of a file without labels, and a note on them."""
    last = first + rows - 1
    note = f"the file has no labels of steps; its rows were taken as steps {first} to {last}"
    return np.arange(first, first + rows, dtype=np.int64), note


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
            f"got {count} steps from {text!r}, expected {rows} that increase, one for each row"
        )
    return steps


Variables = tuple[ImportedVariable, ...]

_STATE = ("W", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Properties of the rows, except their values.

    Attributes
    ----------
    steps : ndarray of int64, (step,)
    single : bool
        True for one state, without an axis of steps.
    resumed : bool
        True if the first row is the state at which a training was resumed.
    labeled : bool
        True if an array labels the rows.
    fits_before : bool
        True if the names fit a layout whose states are before the step of their row.
    is_before : bool
        True if an option or the file names that layout.
    forced : str, optional
        That layout, if an option names it.
    first_row_is_given : bool
        True if an option gives the step of the first row.
    """

    steps: Array
    single: bool
    resumed: bool
    labeled: bool
    fits_before: bool
    is_before: bool
    forced: str | None
    first_row_is_given: bool


def aligned(where: Any, variables: Variables, rows: Alignment) -> tuple[Variables, list[str]]:
    """Mark the variables that precede the step of their row, and those without a value in row 0.

    Parameters
    ----------
    where : path-like
        Path of the file, for messages.
    variables : tuple of ImportedVariable
    rows : Alignment

    Returns
    -------
    variables : tuple of ImportedVariable
    notes : list of str

    Raises
    ------
    FormatError
        If a result of a step has values in the row of step 0, or the rows do not fit the named
        layout.
    """
    notes: list[str] = []
    if not rows.single and _is_before(where, variables, rows):
        variables = _before(where, variables, rows)
    return tuple(_with_first_row(where, held, rows, notes) for held in variables), notes


def _before(where: Any, variables: Variables, rows: Alignment) -> Variables:
    for held in variables:
        if held.variable in _STATE and (np.diff(rows.steps) != 1).any():
            raise FormatError(
                f"{where}: {held.key} is the value before the step of its row, so its steps must "
                "be consecutive; use the run from which it was exported"
            )
    return tuple(
        replace(held, shift=held.shift + 1) if held.variable in _STATE else held
        for held in variables
    )


def _is_before(where: Any, variables: Variables, rows: Alignment) -> bool:
    """True if W and the moments are the values before the step of their row.

    Rows 0 and 1 of each are then equal, both before step 1, and the moments do not depend on the
    gradient of row 1. Without moments, and with the names of such a layout, an option must decide.
    """
    if rows.first_row_is_given and not rows.is_before:
        return False
    held = {each.variable: each for each in variables}
    states = [held[name] for name in _STATE if name in held]
    if "W" not in held or rows.steps[0] != 0 or len(rows.steps) < 2:
        return rows.is_before and "W" in held
    same = [np.array_equal(each.read(0, 1), each.read(1, 2)) for each in states]
    if rows.forced is not None and not all(same):
        raise FormatError(
            f"{where}: {states[same.index(False)].key} differs between rows 0 and 1, but in layout "
            f"{rows.forced} both come before step 1; omit --layout {rows.forced}"
        )
    if not all(same) or "grad" not in held or held["grad"].shift:
        return False
    if rows.is_before:
        return True
    if len(states) == 1 and rows.fits_before and not rows.labeled:
        raise FormatError(
            f"{where}: {held['W'].key} is equal in rows 0 and 1, either because files of 1.12a "
            "hold W before the step of each row, or because the first step had a learning rate of "
            "0; pass --layout 1.12a, or --first-row 0"
        )
    gradient, last = held["grad"], len(rows.steps) - 1
    pushed = not is_zero_or_nan(gradient.read(1, 2), gradient.native).all()
    moments = any(
        not is_zero_or_nan(each.read(last, last + 1), each.native).all() for each in states[1:]
    )
    return moments and pushed and first_row_is_blank(gradient)


def _with_first_row(
    where: Any, held: ImportedVariable, rows: Alignment, notes: list[str]
) -> ImportedVariable:
    """The variable. Its first row becomes NaN if no step precedes it."""
    if held.shift or VARIABLES[held.variable].row0 != "nan":
        return held
    if rows.steps[0] != 0 and not rows.resumed:
        if held.variable == "grad" and len(rows.steps) > 1 and first_row_is_blank(held):
            notes.append(
                f"{held.key} of step {rows.steps[0]}, the first row, is 0 or NaN everywhere and "
                "was kept; if a training was resumed there, add the number starting_step "
                f"{rows.steps[0]} to the file"
            )
        return held
    if first_row_is_blank(held):
        note = (
            f"resumed at step {rows.steps[0]}: the file does not hold the results of that step, "
            "which are NaN in the run"
        )
        notes += [note] if rows.resumed and note not in notes else []
        return replace(held, blank=True)
    if rows.resumed:
        return held
    if held.variable == "logits":
        notes.append(
            f"{held.key} of row 0 omitted: they come from a forward pass before the first step"
        )
        return replace(held, blank=True)
    if held.variable == "hidden_mean":
        notes.append(f"{held.key} of row 0 comes from a forward pass before the first step")
        return held
    raise FormatError(
        f"{where}: {held.key} has values in the row of step 0, before the first step; a row of a "
        "run holds the gradient, logits and loss of its step, and the state after it. If the first "
        f"row belongs to step 1, pass --first-row 1; or omit it with --map ignore={held.key}"
    )
