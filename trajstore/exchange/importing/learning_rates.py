"""Learning rates from a schedule, for files without them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.exchange.importing.imported_file import ImportedVariable
from trajstore.schema import VARIABLES
from trajstore.values.native_types import NATIVE_TYPES, is_zero_or_nan

__all__ = ["completed_rule", "scheduled_rates", "with_rates"]

Array = npt.NDArray[Any]
Variables = tuple[ImportedVariable, ...]

_ADAMW: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""Defaults of `torch.optim.AdamW`."""


def with_rates(
    variables: Variables, attributes: dict[str, Any], schedule: str, peak: float, steps: Array
) -> tuple[Variables, dict[str, Any], list[str]]:
    """Add `lr` to the variables, and complete the optimizer's rule.

    Parameters
    ----------
    variables : tuple of ImportedVariable
    attributes : dict
        Attributes of the run.
    schedule : str
        As in `scheduled_rates`.
    peak : float
    steps : ndarray of int64, (step,)

    Returns
    -------
    variables : tuple of ImportedVariable
    attributes : dict
        Attributes whose ``imported`` records the given values.
    notes : list of str

    Raises
    ------
    InvalidArgument
        If the file holds the learning rates itself, or the schedule is invalid.
    """
    if any(held.variable == "lr" for held in variables):
        raise InvalidArgument(
            f"got schedule {schedule!r}, but the file holds the learning rate of each step; omit "
            "the schedule"
        )
    rates = scheduled_rates(schedule, peak, steps)
    scalars = attributes.get("config", {}).get("scalars", {})
    betas = tuple(scalars.get(f"adam_beta{number}") for number in (1, 2))
    rule, note, added = completed_rule(
        attributes.get("optimizer", {}), has_moments=_moved(variables), betas=betas
    )
    given = {"lr": {"schedule": schedule, "learning_rate": peak}, "optimizer": note}
    if added:
        given["defaults"] = added
    double = NATIVE_TYPES["float64"]
    made = ImportedVariable(
        variable="lr",
        native=double,
        wanted=double,
        rows=len(rates),
        row_shape=(),
        given=rates.view(double.bits),
    )
    order = list(VARIABLES)
    every = sorted((*variables, made), key=lambda held: order.index(held.variable))
    return (
        tuple(every),
        attributes | {"optimizer": rule, "imported": {"given": given}},
        [f"lr is given: {schedule} from learning_rate {peak}", note],
    )


def _moved(variables: Variables) -> bool:
    """True if any moment is not 0 after the first step or the last one."""
    return any(
        not is_zero_or_nan(held.read(at, at + 1), held.native).all()
        for held in variables
        if held.variable.startswith("exp_avg")
        for at in {min(1, held.rows - 1), held.rows - 1}
    )


def scheduled_rates(schedule: str, peak: float, steps: Array) -> npt.NDArray[np.float64]:
    """Learning rate that each step used.

    Parameters
    ----------
    schedule : str
        ``constant``, or ``linear:N``: from `peak` in step 1 to 0 after step N, as in Hugging
        Face's Trainer without warmup.
    peak : float
    steps : ndarray of int64, (step,)

    Returns
    -------
    ndarray of float64, (step,)
        NaN for step 0, the state before training.

    Raises
    ------
    InvalidArgument
        If the schedule is invalid.

    Examples
    --------
    >>> scheduled_rates("linear:4", 0.5, np.arange(5))
    array([  nan, 0.5  , 0.375, 0.25 , 0.125])
    """
    if schedule == "constant":
        rates = np.full(len(steps), peak)
    else:
        match = re.fullmatch(r"linear:([1-9]\d{0,14})", schedule)
        if match is None:
            raise InvalidArgument(
                f"got schedule {schedule!r}, expected constant, or linear:10000 for a rate that "
                "falls to 0 within 10,000 steps"
            )
        last = int(match[1])
        rates = peak * np.maximum(last - (steps - 1), 0) / last
    return np.where(steps == 0, np.nan, rates)


def completed_rule(
    optimizer: dict[str, Any],
    *,
    has_moments: bool,
    betas: tuple[float | None, ...] = (None, None),
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Complete the optimizer of a run whose file names no class.

    A file holds some of Adam's hyperparameters and never the class. If betas and moments are 0, the
    optimizer was SGD. Otherwise it was `torch.optim.AdamW`, with which the notebooks train; its
    defaults replace missing values.

    Parameters
    ----------
    optimizer : dict
        ``hyperparameters``, as far as they are known.
    has_moments : bool
        True if any moment is not 0.
    betas : tuple of float or None
        Both betas, None for an unknown one; used if the hyperparameters lack ``betas``.

    Returns
    -------
    optimizer : dict
    note : str
    added : dict
        Defaults that were added.
    """
    given = dict(optimizer.get("hyperparameters", {}))
    if not has_moments and given.get("betas") == [0.0, 0.0]:
        rule = {"class": "torch.optim.sgd.SGD", "hyperparameters": given}
        return rule, "optimizer taken as SGD, since betas and moments are 0", {}
    added = {name: value for name, value in _ADAMW.items() if name not in given}
    if "betas" in added and betas != (None, None):
        default = added.pop("betas")
        given["betas"] = [default[at] if beta is None else beta for at, beta in enumerate(betas)]
        added |= {
            f"adam_beta{at + 1}": default[at] for at, beta in enumerate(betas) if beta is None
        }
    assumed = "".join(f", {name} {value}" for name, value in added.items())
    known = {name: value for name, value in added.items() if name in _ADAMW}
    return (
        {"class": "torch.optim.adamw.AdamW", "hyperparameters": known | given},
        f"the file names no optimizer; taken as AdamW of torch{assumed}. For another one, pass "
        "optimizer= to the analyses that need its rule",
        added,
    )
