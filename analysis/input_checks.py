"""What every question checks first."""

from __future__ import annotations

import numpy as np
import xarray as xr

from trajstore.errors import StepNotFound, VariableNotRecorded
from trajstore.schema import TIERS

__all__ = ["row_of_step", "variables"]


def variables(ds: xr.Dataset, *names: str) -> None:
    """Check that the run holds the variables of a question.

    Raises
    ------
    VariableNotRecorded
        Which are missing, and which tier records them.
    """
    missing = [name for name in names if name not in ds]
    if missing:
        tier = next(
            (tier for tier, held in TIERS.items() if set(missing) <= set(held)),
            None,
        )
        remedy = f"; record it with --record {tier}" if tier else ""
        raise VariableNotRecorded(
            f"this question needs {', '.join(missing)}, which the run does not hold{remedy}"
        )


def row_of_step(ds: xr.Dataset, step: int) -> int:
    """Row that holds the state after that step.

    Raises
    ------
    StepNotFound
        If the step was not recorded; the message names the nearest ones.
    """
    steps = ds["step"].values
    row = int(np.searchsorted(steps, step))
    if row < steps.size and steps[row] == step:
        return row
    nearest = ", ".join(str(s) for s in steps[max(row - 1, 0) : row + 1])
    raise StepNotFound(
        f"step {step} is not in the run"
        + (f"; the nearest recorded ones are {nearest}" if nearest else ", which has no rows")
    )
