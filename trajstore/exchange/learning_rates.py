"""Learning rates that a file does not hold, by a schedule that its user names."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument

__all__ = ["completed_rule", "scheduled_rates"]

Array = npt.NDArray[Any]

_ADAMW = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
"""Defaults of `torch.optim.AdamW`."""


def scheduled_rates(schedule: str, peak: float, steps: Array) -> npt.NDArray[np.float64]:
    """Learning rate that each step used.

    Parameters
    ----------
    schedule : str
        ``constant``, or ``linear:N``: from `peak` in step 1 to 0 after step N, as the schedule of
        Hugging Face's Trainer without warm-up.
    peak : float
    steps : ndarray of int64, (step,)

    Returns
    -------
    ndarray of float64, (step,)
        NaN in step 0, which no step made.

    Raises
    ------
    InvalidArgument
        If the schedule cannot be read.

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
                f"cannot read {schedule!r} as a schedule; write constant, or linear:10000 for one "
                "that falls to 0 within 10,000 steps"
            )
        last = int(match[1])
        rates = peak * np.maximum(last - (steps - 1), 0) / last
    return np.where(steps == 0, np.nan, rates)


def completed_rule(optimizer: dict[str, Any], *, has_moments: bool) -> tuple[dict[str, Any], str]:
    """Optimizer of a run whose file names no class, and what was added to it.

    A file tells some of Adam's numbers and never the class. Without momentum and squares it was
    SGD; else `torch.optim.AdamW` is what the notebooks train with, whose defaults stand for what is
    not told.

    Parameters
    ----------
    optimizer : dict
        ``hyperparameters``, as far as they are told.
    has_moments : bool
        Whether some moment is not 0.

    Returns
    -------
    optimizer : dict
    note : str
    """
    given = dict(optimizer.get("hyperparameters", {}))
    if not has_moments and given.get("betas") == [0.0, 0.0]:
        rule = {"class": "torch.optim.sgd.SGD", "hyperparameters": given}
        return rule, "betas and moments of 0 were taken for SGD"
    added = {name: value for name, value in _ADAMW.items() if name not in given}
    told = "".join(f", {name} {value}" for name, value in added.items())
    return (
        {"class": "torch.optim.adamw.AdamW", "hyperparameters": added | given},
        f"the file names no optimizer; taken for AdamW of torch{told}: for another one pass "
        "optimizer= to what asks for its rule",
    )
