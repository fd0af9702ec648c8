"""Checks of the input, and their messages."""

from __future__ import annotations

import pytest

from trajstore.analysis.scan import input_checks
from trajstore.errors import StepNotFound, VariableNotRecorded


@pytest.mark.parametrize(
    ("missing", "recorded"),
    [
        (["grad"], "weights\\+grads"),
        (["exp_avg", "lr"], "matrix"),
        (["param_norm"], "norms"),
        (["hidden_mean"], "matrix,hidden_mean"),
        (["grad", "hidden_states", "batch"], "weights\\+grads,hidden_states,batch"),
        (["exp_avg", "param_norm"], "matrix,norms"),
    ],
    ids=str,
)
def test_what_to_record(missing, recorded, make_run, walk):
    with pytest.raises(VariableNotRecorded, match=f"; record it with variables='{recorded}'$"):
        input_checks.require_variables(make_run(walk(2, 2, 2)), *missing)


def test_missing_coordinates_have_no_advice_to_record(make_run, walk):
    run = make_run(walk(2, 2, 2))
    with pytest.raises(VariableNotRecorded, match=r"which the run does not hold$"):
        input_checks.require_variables(run, "parameter")
    with pytest.raises(VariableNotRecorded, match="because the imported file does not"):
        input_checks.require_variables(run.assign_attrs(imported={}), "hidden_mean")


@pytest.mark.parametrize(
    ("step", "suffix"),
    [
        (5, "; the nearest recorded ones are 4 and 6$"),
        (9, "; the nearest recorded one is 8$"),
        (-1, "; the nearest recorded one is 0$"),
    ],
)
def test_the_nearest_steps(step, suffix, make_run, walk):
    run = make_run(walk(5, 2, 2), steps=range(0, 10, 2))
    with pytest.raises(StepNotFound, match=f"step {step} is not in the run{suffix}"):
        input_checks.row_of_step(run, step)
    with pytest.raises(StepNotFound, match="which has no rows"):
        input_checks.row_of_step(run.isel(step=slice(0)), step)
