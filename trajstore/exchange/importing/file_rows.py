"""The rows of a file: how many there may be, their steps, and the state that each of them holds.

Some labels count callbacks instead of steps, and some files have none. A row holds the state after
its step, or the one before it.
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
    "unlabelled_steps",
]

_MOST_ROWS = 1 << 22
_COPIES_OF_A_ROW = 3
_BYTES_OF_A_TOKEN = 64  # its id, whether it is dead, how often it occurs, while they are checked


def check_size(path: Path, key: str, shape: tuple[int, ...], dtype: str, memory: int) -> None:
    """Insist that what is held of all rows, of all tokens and of one row at once is not too much.

    Parameters
    ----------
    path : Path
        Of the file, for messages.
    key : str
        Of the array.
    shape : tuple of int
        (step, token, hidden).
    dtype : str
    memory : int
        Bytes that may be taken.

    Raises
    ------
    FormatError
        If there are more than 4,194,304 rows.
    InvalidArgument
        If a row needs more memory to be read; the message says how much.
    """
    rows, tokens, hidden = shape
    if rows > _MOST_ROWS:
        raise FormatError(
            f"{path}: {key} has {rows:,} rows, and an import takes at most {_MOST_ROWS:,}"
        )
    row = tokens * hidden * (8 if "64" in dtype else 4 if "32" in dtype else 2)
    need = _COPIES_OF_A_ROW * row + _BYTES_OF_A_TOKEN * tokens
    if need > memory:
        raise InvalidArgument(
            f"{path}: {key} has rows of {format_bytes(row)}, of which {format_bytes(need)} are "
            f"needed to read one, and {format_bytes(memory)} may be taken: give more memory "
            f"(--memory {-(-need >> 20)}MiB)"
        )


Array = npt.NDArray[Any]


def checked_labels(where: Any, name: str, labels: Array) -> Array:
    """Labels of the rows of a file, as step numbers.

    Parameters
    ----------
    where : path-like
        Of the file, for messages.
    name : str
        Of the array that holds them.
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
            f"{where}: {name} holds {labels[row]}{after} in row {row}, expected step numbers from "
            "0 on that increase; --labels steps=… gives others"
        )
    return labels.astype(np.int64)


def true_steps(
    labels: Array, *, name: str = "recorded_steps", trusted: bool = False
) -> tuple[Array, str | None]:
    """Optimizer steps of the rows of a file.

    The recorder of notebooks 14.1a, 15.1a and 1.12f counted a callback that fires after every step
    and once more at the end of an epoch, when nothing is recorded. So its labels skip a number
    after every epoch: 10,001 rows are labelled 0 to 10001, and every label past step 8,306 is one
    too high. Holes at every multiple of one number of rows are this mistake; any other labels are
    taken as they are.

    Parameters
    ----------
    labels : ndarray of int64, (step,)
    name : str
        Of the array that holds them.
    trusted : bool
        Whether the file or its user says that they count optimizer steps.

    Returns
    -------
    steps : ndarray of int64, (step,)
    note : str, optional
        What was corrected.
    """
    spacing = np.diff(labels)
    holes = np.flatnonzero(spacing == 2)
    if trusted or not len(holes) or labels[0] != 0 or spacing.max() > 2:
        return labels, None
    epoch = int(holes[0])
    if epoch == 0 or not np.array_equal(holes, np.arange(epoch, len(spacing), epoch)):
        return labels, None
    return np.arange(len(labels), dtype=np.int64), (
        f"{name} ran from 0 to {labels[-1]} in {len(labels)} rows and skipped a number "
        f"every {epoch} rows, at the end of each epoch: it counted callbacks; the rows are "
        f"optimizer steps 0 to {len(labels) - 1} and were labelled so (--labels steps={name} keeps "
        "what it says)"
    )


def unlabelled_steps(rows: int, *, first: int = 0) -> tuple[Array, str]:
    """Steps of the rows of a file that does not say them, and a note on how they were taken."""
    last = first + rows - 1
    note = f"the file labels no steps; its rows were taken as steps {first} to {last}"
    return np.arange(first, first + rows, dtype=np.int64), note


def named_steps(text: str, rows: int) -> Array:
    """Steps that the user names: ``0:2001:50`` as in Python, or numbers between commas.

    Raises
    ------
    InvalidArgument
        If it cannot be read, or names other than as many increasing steps as there are rows.

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
            f"cannot read {text!r} as steps; write the name of an array, 0:2001:50, or 0,10,50"
        )
    if count != rows or (np.diff(steps) <= 0).any():
        raise InvalidArgument(
            f"steps {text} are {count}, expected {rows} that increase, one for each row"
        )
    return steps


Variables = tuple[ImportedVariable, ...]

_STATE = ("W", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What is known of the rows, but for their values.

    Attributes
    ----------
    steps : ndarray of int64, (step,)
    single : bool
        Whether there is one state, without an axis of steps.
    resumed : bool
        Whether the first row is a state that a training went on from.
    labelled : bool
        Whether an array labels the rows.
    fits_before : bool
        Whether the names are those of a layout whose states are before the step of their row.
    is_before : bool
        Whether the user or the file names that layout.
    forced : str, optional
        The layout that the user names, if it is such a one.
    first_row_is_given : bool
        Whether the user says which step the first row is of.
    """

    steps: Array
    single: bool
    resumed: bool
    labelled: bool
    fits_before: bool
    is_before: bool
    forced: str | None
    first_row_is_given: bool


def aligned(where: Any, variables: Variables, rows: Alignment) -> tuple[Variables, list[str]]:
    """The variables, marked where they are before the step of their row, or know nothing of row 0.

    Parameters
    ----------
    where : path-like
        Of the file, for messages.
    variables : tuple of ImportedVariable
    rows : Alignment

    Returns
    -------
    variables : tuple of ImportedVariable
    notes : list of str

    Raises
    ------
    FormatError
        If what a step makes has values in the row of step 0, or the rows are not those of the
        layout that is named.
    """
    notes: list[str] = []
    if not rows.single and _is_before(where, variables, rows):
        variables = _before(where, variables, rows)
    return tuple(_with_first_row(where, held, rows, notes) for held in variables), notes


def _before(where: Any, variables: Variables, rows: Alignment) -> Variables:
    for held in variables:
        if held.variable in _STATE and (np.diff(rows.steps) != 1).any():
            raise FormatError(
                f"{where}: {held.key} is that before the step of its row, so its steps must follow "
                "one another; take the run that it was exported from"
            )
    return tuple(
        replace(held, time="before") if held.variable in _STATE else held for held in variables
    )


def _is_before(where: Any, variables: Variables, rows: Alignment) -> bool:
    """Whether W and the moments are those before the step of their row.

    Then rows 0 and 1 of each are the same, both before step 1; and the moments know nothing of the
    gradient of row 1. Where there are no moments to tell, and the names are those of such a layout,
    that is not decided by itself.
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
            f"{rows.forced} both come before step 1"
        )
    if not all(same) or "grad" not in held or held["grad"].missing:
        return False
    if rows.is_before:
        return True
    if len(states) == 1 and rows.fits_before and not rows.labelled:
        raise FormatError(
            f"{where}: {held['W'].key} is the same in rows 0 and 1, as in files of 1.12a, which "
            "hold W before the step of each row, and as after a first step with a learning rate "
            "of 0; no moments tell which: say --layout 1.12a, or --first-row 0"
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
    """The variable, its first row taken as NaN where no step had been taken yet."""
    if held.missing or held.time == "before" or VARIABLES[held.variable].row0 != "nan":
        return held
    if rows.steps[0] != 0 and not rows.resumed:
        if held.variable == "grad" and len(rows.steps) > 1 and first_row_is_blank(held):
            notes.append(
                f"{held.key} of step {rows.steps[0]}, the first row, is 0 or NaN everywhere and "
                "was kept: a training that was resumed there would have made none (a number "
                f"starting_step of {rows.steps[0]} in the file says so)"
            )
        return held
    if first_row_is_blank(held):
        note = (
            f"resumed at step {rows.steps[0]}: what its first step made is not in the file, and "
            "NaN in the run"
        )
        notes += [note] if rows.resumed and note not in notes else []
        return replace(held, blank=True)
    if rows.resumed:
        return held
    if held.variable == "logits":
        notes.append(
            f"{held.key} of row 0 are of a forward pass that no step made; they were left out"
        )
        return replace(held, blank=True)
    if held.variable == "hidden_mean":
        notes.append(f"{held.key} of row 0 is of a forward pass that no step made")
        return held
    raise FormatError(
        f"{where}: {held.key} has values in the row of step 0, where no step had been taken; a run "
        "holds in each row the gradient, logits and loss of its step, and the state after it. If "
        "the first row is that after step 1, say --first-row 1; or leave it out with --map "
        f"ignore={held.key}"
    )
