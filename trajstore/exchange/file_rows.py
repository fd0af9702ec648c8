"""Rows of a file: their number, their steps, and the state that each row holds.

Some labels count callbacks instead of steps, and some files have no labels. A row holds the state
after its step, or the state before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.imported_file import ImportedVariable, ImportOptions, RunPart
from trajstore.exchange.layouts import Layout
from trajstore.exchange.named_arrays import NamedArray
from trajstore.exchange.usual_names import ARRAY_KINDS, STARTING_STEP
from trajstore.formats.array_file import ArrayFile, values_of
from trajstore.schema import STEP, VARIABLES
from trajstore.units import format_bytes

Array = npt.NDArray[Any]
Variables = tuple[ImportedVariable, ...]
_STATE = ("W", "exp_avg", "exp_avg_sq")

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


class FileRows:
    """Rows of a run in a file: their steps, and the state that each of them holds.

    Parameters
    ----------
    file : ArrayFile
    part : RunPart
    options : ImportOptions
    layout : Layout, optional
        Layout of the file.
    anchor : NamedArray
        The array that defines the number of rows.

    Attributes
    ----------
    single : bool
        True for one state, without an axis of steps.
    count : int
    steps : ndarray of int64, (step,)
    notes : list of str

    Raises
    ------
    FormatError, InvalidArgument
        If the labels contradict each other, or do not fit the rows.
    """

    def __init__(
        self,
        file: ArrayFile,
        part: RunPart,
        options: ImportOptions,
        layout: Layout | None,
        anchor: NamedArray,
    ) -> None:
        self._file, self._part, self._options, self._anchor = file, part, options, anchor
        self._layout = layout
        self.notes: list[str] = []
        self.single = len(anchor.shape) == 2
        self.count = 1 if self.single else anchor.shape[anchor.extra]
        self._labels = [
            array for array in part.arrays if array.kind.name == STEP.name and array.shape
        ]
        self._start = self._number(STARTING_STEP)
        self.steps = self._steps()
        self._resumed = bool(self._start) and int(self.steps[0]) == self._start
        if self._start and not self._resumed:
            self.notes.append(
                f"by a number in the file, the training was resumed at step {self._start}, but its "
                f"first row is labeled {self.steps[0]}"
            )

    def _steps(self) -> Array:
        """Steps of the rows."""
        wanted, labels = self._options.steps, self._labels
        trusted = self._file.attributes.get("steps") == "optimizer"
        if wanted is not None and wanted not in self._file.keys:
            return named_steps(wanted, self.count)
        if wanted is not None:
            labels = [array for array in labels if array.key == wanted]
        if labels:
            labeled = {array.key: self._labels_of(array) for array in labels}
            key, steps = next(iter(labeled.items()))
            for other, values in labeled.items():
                if not np.array_equal(values, steps):
                    raise FormatError(
                        f"{self._file.path}: {key} and {other} label the rows differently; choose "
                        f"with --labels steps={key}"
                    )
            trusted = trusted or self._file.format == "folder" or key == wanted
            steps, note = true_steps(steps, name=key, trusted=trusted)
            self.notes += [note] if note else []
            return steps
        first = self._options.first_row or 0
        if self.single:
            step = self._number(ARRAY_KINDS[STEP.name].names, in_groups=True)
            if step is None:
                step = first
                self.notes.append(
                    f"{self._anchor.key} is one state without a step number; it was taken as the "
                    f"state after step {step} (--labels steps=N)"
                )
            return np.array([step], np.int64)
        steps = (self._start or first) + np.arange(self.count, dtype=np.int64)
        if not trusted:
            self.notes.append(
                f"the file has no labels of steps; its rows were taken as steps {steps[0]} to "
                f"{steps[-1]}"
            )
        return steps

    def _labels_of(self, array: NamedArray) -> Array:
        """Labels of the rows. Labels of several runs have a first axis of runs."""
        shape, outer = array.shape, self._part.outer
        if self.count in shape:
            values = values_of(self._file, array.key)
            if values.ndim == 2 and outer is not None and len(values) > outer:
                values = values[outer]
            shape = values.shape
        if shape != (self.count,):
            raise FormatError(
                f"{self._file.path}: {array.key} has shape {shape}, expected ({self.count},): "
                f"{self._anchor.key} has {self.count} rows"
            )
        return checked_labels(self._file.path, array.key, values)

    def _number(self, names: Collection[str], *, in_groups: bool = False) -> int | None:
        """A number of the file that counts steps, by its name, or also by its name in a group."""
        for key, value in self._part.numbers.items():
            name = key.lower().rpartition(".")[2] if in_groups else key.lower()
            if name in names and isinstance(value, int) and 0 <= value < 1 << 61:
                return value
        return None

    def aligned(self, variables: Variables) -> Variables:
        """Mark the variables that precede the step of their row, and those without a first value.

        Raises
        ------
        FormatError
            If a result of a step has values in the row of step 0, or the rows do not fit the named
            layout.
        """
        if not self.single and self._layout is not None and self._are_before(self._layout):
            self._check_before(variables, self._layout)
            variables = tuple(
                replace(variable, shift=variable.shift + 1)
                if variable.variable in _STATE
                else variable
                for variable in variables
            )
        return tuple(map(self._with_first_row, variables))

    def _are_before(self, layout: Layout) -> bool:
        """True if W and the moments are those before the step of their row.

        An option, the attribute of an export, or the names of 1.12a say so. Files of 1.12a have no
        labels.
        """
        if all(column.time != "before" for column in layout.columns):
            return False
        is_named = self._file.attributes.get("layout") == layout.name
        by_names = self._options.first_row is None and (is_named or not self._labels)
        return self._options.layout is not None or by_names

    def _check_before(self, variables: Variables, layout: Layout) -> None:
        """Refuse states that are not those before the step of their row.

        Rows 0 and 1 are both before step 1, so they are equal. Steps are consecutive.
        """
        for variable in variables:
            if variable.variable not in _STATE:
                continue
            if (np.diff(self.steps) != 1).any():
                raise FormatError(
                    f"{self._file.path}: {variable.key} is the value before the step of its row, "
                    "so its steps must be consecutive; use the run from which it was exported"
                )
            both = self.steps[0] == 0 and len(self.steps) > 1
            if both and not np.array_equal(variable.read(0, 1), variable.read(1, 2)):
                name = layout.name
                fix = f"omit --layout {name}" if self._options.layout else "pass --first-row 0"
                raise FormatError(
                    f"{self._file.path}: {variable.key} differs between rows 0 and 1, but in "
                    f"layout {name} both come before step 1; {fix}"
                )

    def _with_first_row(self, variable: ImportedVariable) -> ImportedVariable:
        """The variable. Its first row becomes NaN if no step precedes it."""
        first = self.steps[0]
        if variable.shift or VARIABLES[variable.variable].row0 != "nan":
            return variable
        if first != 0 and not self._resumed:
            if variable.variable == "grad" and len(self.steps) > 1 and variable.is_blank(0):
                self.notes.append(
                    f"{variable.key} of step {first}, the first row, is 0 or NaN everywhere and "
                    "was kept; if a training was resumed there, add the number starting_step "
                    f"{first} to the file"
                )
            return variable
        if variable.is_blank(0):
            note = (
                f"resumed at step {first}: the file does not hold the results of that step, which "
                "are NaN in the run"
            )
            self.notes += [note] if self._resumed and note not in self.notes else []
            return replace(variable, blank=True)
        if self._resumed:
            return variable
        if variable.variable == "logits":
            self.notes.append(
                f"{variable.key} of row 0 omitted: they come from a forward pass before the first "
                "step"
            )
            return replace(variable, blank=True)
        if variable.variable == "hidden_mean":
            self.notes.append(
                f"{variable.key} of row 0 comes from a forward pass before the first step"
            )
            return variable
        raise FormatError(
            f"{self._file.path}: {variable.key} has values in the row of step 0, before the first "
            "step; a row of a run holds the gradient, logits and loss of its step, and the state "
            "after it. If the first row belongs to step 1, pass --first-row 1; or omit it with "
            f"--map ignore={variable.key}"
        )
