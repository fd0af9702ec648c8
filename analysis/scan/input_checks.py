"""What every question checks first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.recorded_changes import hold_only_changes
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded
from trajstore.schema import RECORDED, TIERS
from trajstore.store.metadata.fork_provenance import steps_of_another_optimizer

__all__ = ["optimizer_of", "row_of_step", "rows_of_steps", "variables"]


def variables(ds: xr.Dataset, *names: str) -> None:
    """Check that the run holds the variables of a question.

    Raises
    ------
    VariableNotRecorded
        Which are missing, and what to record to have them.
    """
    missing = [name for name in names if name not in ds]
    if missing:
        asked = _recording_of(missing)
        remedy = f"; record it with --record {asked}" if asked else ""
        if "W" in missing and hold_only_changes(ds):
            remedy = (
                "; it holds delta, the changes of W, which answer how far tokens move (velocity, "
                "speed, acceleration, displacement, freeze, bulk_thermal, coherence), and not "
                "where they are"
            )
        elif "imported" in ds.attrs:
            remedy = (
                "; --schedule constant or linear:N of the import makes it of a file's learning rate"
                if missing == ["lr"]
                else ", as the file that it was imported from does not"
            )
        raise VariableNotRecorded(
            f"this question needs {', '.join(missing)}, which the run does not hold{remedy}"
        )


def _recording_of(names: Sequence[str]) -> str:
    """What ``--record`` is given to have these variables; nothing if it has not all of them."""
    if not set(names) <= set(RECORDED):
        return ""
    in_tiers = set().union(*TIERS.values())
    by_name = [name for name in names if name not in in_tiers]
    tier = next(
        (tier for tier, held in TIERS.items() if set(names) - set(by_name) <= set(held)),
        "all,model",
    )
    return ",".join([tier if len(by_name) < len(names) else "all", *by_name])


def optimizer_of(ds: xr.Dataset, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Optimizer that took the steps of these rows: as given, or as the run says.

    Raises
    ------
    InvalidArgument
        If the run is a fork, and some of the steps were taken before, with another optimizer.
    """
    if given:
        return given
    last = steps_of_another_optimizer(ds.attrs)
    steps = ds["step"].values
    if steps.size > 1 and steps[1] <= last:
        raise InvalidArgument(
            f"the steps up to {last} were taken with another optimizer, before the run was forked; "
            f"ask about those after it, ds.sel(step=slice({last}, None)), or ask the run that it "
            "was forked from"
        )
    optimizer: Mapping[str, Any] | None = ds.attrs.get("optimizer")
    return optimizer


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
    nearest = [str(s) for s in steps[max(row - 1, 0) : row + 1]]
    told = {
        0: ", which has no rows",
        1: f"; the nearest recorded one is {''.join(nearest)}",
        2: f"; the nearest recorded ones are {' and '.join(nearest)}",
    }
    raise StepNotFound(f"step {step} is not in the run{told[len(nearest)]}")


def rows_of_steps(ds: xr.Dataset, steps: Sequence[int] | int | None) -> npt.NDArray[np.int64]:
    """Rows of these steps, or all of them.

    Raises
    ------
    StepNotFound
        If one of the steps was not recorded.
    """
    if steps is None:
        return np.arange(ds.sizes["step"])
    return np.array([row_of_step(ds, step) for step in np.atleast_1d(steps).tolist()], np.int64)
