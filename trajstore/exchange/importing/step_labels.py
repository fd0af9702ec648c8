"""Steps of the rows of a file: some labels count callbacks instead, and some files have none."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument

__all__ = ["checked_labels", "named_steps", "true_steps", "unlabelled_steps"]

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
