"""Checks of the input: a single run, its variables, steps and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded
from trajstore.provenance import OptimizerAttributes, RunAttributes
from trajstore.schema import OF_EXAMPLES, OF_RUN, RECORDED, TIERS
from trajstore.values.optimizer_rule import ADAM, NUMBERS, OptimizerRule

RUN = "run"
"""Name of the dimension of several runs."""


def check_single_run(ds: xr.Dataset) -> None:
    """Raise if the Dataset holds several runs.

    Raises
    ------
    InvalidArgument
        If there is a dimension run.
    """
    if RUN in ds.dims:
        raise InvalidArgument(
            "got several runs, expected one; compute for each with ds.traj or "
            "analysis.over_runs(ds, function), or select one with ds.isel(run=0)"
        )


def with_own_attributes(ds: xr.Dataset) -> xr.Dataset:
    """Restore the own attributes of a run selected from several; else return it unchanged."""
    if RUN in ds.dims or RUN not in ds.coords or OF_RUN not in ds.attrs:
        return ds
    recorded = ds.attrs[OF_RUN].get(str(ds[RUN].values))
    if recorded is None:
        return ds
    shared = {name: value for name, value in ds.attrs.items() if name != OF_RUN}
    single = ds.assign_attrs({})
    single.attrs = {**shared, **recorded["attributes"]}
    for name, attributes in recorded["variables"].items():
        if name in single.variables:
            single[name].attrs = dict(attributes)
    single.encoding["source"] = recorded["source"]
    return single


def hold_only_changes(ds: xr.Dataset) -> bool:
    """True if a Dataset holds ``delta`` but no W."""
    return "delta" in ds and "W" not in ds


def check_every_step(steps: npt.NDArray[np.int64]) -> None:
    """Check that the change of each row is the displacement from the previous row.

    Raises
    ------
    InvalidArgument
        If a step is missing.
    """
    gaps = np.flatnonzero(np.diff(steps) != 1)
    if gaps.size:
        row = int(gaps[0])
        raise InvalidArgument(
            "delta is the change per step, so consecutive steps are required; "
            f"step {steps[row]} is followed by step {steps[row + 1]}; select consecutive steps"
        )


def require_variables(ds: xr.Dataset, *names: str) -> None:
    """Check that the run holds the required variables.

    Raises
    ------
    VariableNotRecorded
        If variables are missing. The message names them, and the option to record them.
    """
    missing = [name for name in names if name not in ds]
    if missing:
        tiers = _recording_of(missing)
        remedy = f"; record it with variables='{tiers}'" if tiers else ""
        if "W" in missing and hold_only_changes(ds):
            remedy = (
                "; it holds delta, the changes of W, which only give quantities of motion "
                "(velocity, speed, acceleration, displacement, freeze, bulk_thermal, coherence)"
            )
        elif "imported" in ds.attrs:
            remedy = (
                "; assign the rate of each step: ds.assign(lr=('step', rates))"
                if missing == ["lr"]
                else ", because the imported file does not"
            )
        raise VariableNotRecorded(
            f"this analysis requires {', '.join(missing)}, which the run does not hold" + remedy
        )


def available(
    questions: Mapping[str, Callable[[], xr.Dataset]],
) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    """Answers by name, and the reason for those that the run does not give."""
    answers: dict[str, xr.Dataset] = {}
    unknown: dict[str, str] = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except (VariableNotRecorded, InvalidArgument) as error:
            unknown[name] = str(error)
    return answers, unknown


def _recording_of(names: Sequence[str]) -> str:
    """Value of ``variables`` for these variables; empty if one of them cannot be recorded."""
    if not set(names) <= set(RECORDED):
        return ""
    in_tiers = {name for names_of_tier in TIERS.values() for name in names_of_tier} - set(
        OF_EXAMPLES
    )
    by_name = [name for name in names if name not in in_tiers]
    tier = next(
        (
            tier
            for tier, names_of_tier in TIERS.items()
            if set(names) - set(by_name) <= set(names_of_tier)
        ),
        "matrix,norms",
    )
    return ",".join([tier if len(by_name) < len(names) else "matrix", *by_name])


def adam_rule(
    ds: xr.Dataset, given: Mapping[str, Any] | None
) -> tuple[OptimizerRule, npt.NDArray[np.void]]:
    """Rule of the optimizer of these rows: as given, or as recorded in the run.

    Returns
    -------
    rule : OptimizerRule
    numbers : ndarray of `NUMBERS`, (step,)
        Numbers of the step of each row, for `OptimizerRule.at`; those of the rule for a first row
        without a step.

    Raises
    ------
    VariableNotRecorded
        If the optimizer is not recorded.
    InvalidArgument
        If it is not Adam, AdamW, RoundedAdam or RoundedAdamW, or lacks a hyperparameter; and if the
        run is a fork, and some steps precede it and used another optimizer.
    """
    optimizer = given or _recorded_optimizer(ds)
    if not optimizer:
        raise VariableNotRecorded(
            "the run has no attribute optimizer, so its update rule is unknown; pass "
            "optimizer={'class': 'AdamW', 'hyperparameters': {'betas': …, 'eps': …, …}}"
        )
    if OptimizerAttributes.of(optimizer).rule not in ADAM:
        raise InvalidArgument(
            f"got the optimizer {optimizer.get('class')!r}, expected one of Adam, AdamW, "
            "RoundedAdam, RoundedAdamW"
        )
    rule = OptimizerRule.of(optimizer)
    recorded = {}
    if not given and {"step", "hyperparameter"} == {
        *ds.get("hyperparameters", xr.DataArray()).dims
    }:
        values = ds["hyperparameters"].transpose("hyperparameter", "step").values
        recorded = dict(zip(ds["hyperparameter"].values.tolist(), values, strict=True))
    numbers = np.empty(ds.sizes["step"], NUMBERS)
    for name in NUMBERS.names or ():
        of_rule = getattr(rule, name)
        numbers[name] = recorded.get(name, of_rule)
        if np.isnan(numbers[name][:1]).any():
            numbers[name][0] = of_rule
    return rule, numbers


def _recorded_optimizer(ds: xr.Dataset) -> Mapping[str, Any]:
    run = RunAttributes.of(ds.attrs)
    last = run.other_optimizer_until
    steps = ds["step"].values
    if steps.size > 1 and steps[1] <= last:
        raise InvalidArgument(
            f"the steps up to {last} precede the fork and used another optimizer; select the steps "
            f"after it with ds.sel(step=slice({last}, None)), or use the original run"
        )
    return run.optimizer.stored


def quantile_levels(quantiles: Sequence[float] | float) -> npt.NDArray[np.float64]:
    """Quantiles as an array.

    Raises
    ------
    InvalidArgument
        If a value is not from 0 to 1.
    """
    levels = np.atleast_1d(np.asarray(quantiles, np.float64))
    if not ((levels >= 0) & (levels <= 1)).all():
        raise InvalidArgument(
            f"got quantiles {tuple(levels.tolist())}, expected values from 0 to 1"
        )
    return levels


def row_of_step(ds: xr.Dataset, step: int) -> int:
    """Row with the state after the given step.

    Raises
    ------
    StepNotFound
        If the step was not recorded. The message names the nearest recorded steps.
    """
    steps = ds["step"].values
    row = int(np.searchsorted(steps, step))
    if row < steps.size and steps[row] == step:
        return row
    nearest = [str(s) for s in steps[max(row - 1, 0) : row + 1]]
    suffixes = {
        0: ", which has no rows",
        1: f"; the nearest recorded one is {''.join(nearest)}",
        2: f"; the nearest recorded ones are {' and '.join(nearest)}",
    }
    raise StepNotFound(f"step {step} is not in the run{suffixes[len(nearest)]}")


def rows_of_steps(ds: xr.Dataset, steps: Sequence[int] | int | None) -> npt.NDArray[np.int64]:
    """Rows of the given steps, or all rows.

    Raises
    ------
    StepNotFound
        If one of the steps was not recorded.
    """
    if steps is None:
        return np.arange(ds.sizes["step"])
    return np.array([row_of_step(ds, step) for step in np.atleast_1d(steps).tolist()], np.int64)
