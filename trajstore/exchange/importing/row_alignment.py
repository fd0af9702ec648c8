"""What the rows of a file mean: states after their steps or before them, and what row 0 holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.importing.imported_file import ImportedVariable, first_row_is_blank
from trajstore.schema import VARIABLES
from trajstore.values.native_types import is_zero_or_nan

__all__ = ["Alignment", "aligned"]

Array = npt.NDArray[Any]
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
