"""The intended update, compared with W of torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from adam_runs import trained
from bits_and_calls import nightly_but

from trajstore import analysis, open_run
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.values.native_types import spacing
from trajstore.values.optimizer_rule import OptimizerRule, next_weights

VARIANTS = {
    "strong decay": ("AdamW", {"weight_decay": 0.3}),
    "coupled decay": ("Adam", {"weight_decay": 0.1}),
    "other betas and eps": ("AdamW", {"betas": (0.5, 0.99), "eps": 1e-3}),
    "no memory": ("Adam", {"betas": (0.0, 0.0)}),
    "amsgrad": ("AdamW", {"amsgrad": True}),
    "amsgrad, coupled decay": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    "maximize": ("AdamW", {"maximize": True}),
    "foreach": ("AdamW", {"foreach": True, "weight_decay": 0.1}),
}


def trained_run(kind: str, options: dict, dtype: str, rows: int = 25):
    """A run whose gradients come and go, without clipping."""
    return trained(kind, options, dtype, rows, max_norm=np.inf).chunk({"step": 4, "token": 4})


@pytest.mark.parametrize(
    "variant",
    nightly_but(
        VARIANTS, "coupled decay", "other betas and eps", "amsgrad, coupled decay", "maximize"
    ),
)
def test_float32_updates_are_those_of_torch(variant):
    ds = trained_run(*VARIANTS[variant], "float32", rows=12)
    got = analysis.adam_update(ds)
    W = ds.W.values.astype(np.float64)
    # The only difference is one rounding of W.
    slack = np.spacing(np.abs(ds.W.values)).max(axis=0)
    difference = np.abs(W[:-1] + got.adam_update.values - W[1:])
    assert (difference <= slack).all()
    hops = got.adam_update_ulp.values * np.spacing(np.abs(ds.W.values[:-1]))
    np.testing.assert_allclose(hops, got.adam_update.values, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        ("AdamW", {"weight_decay": 0.3}, "bfloat16"),
        ("AdamW", {"amsgrad": True}, "bfloat16"),
        ("Adam", {"eps": 1e-4}, "float16"),
    ],
)
def test_updates_of_16_bit_types_round_to_the_next_weights(kind, options, dtype):
    assert wrongly_rounded(trained_run(kind, options, dtype), dtype) == 0


def test_a_fused_kernel_is_followed_but_for_what_it_keeps_to_itself():
    ds = trained_run("AdamW", {"fused": True}, "bfloat16")
    # It divides by float32 moments, but only rounded ones are recorded.
    assert wrongly_rounded(ds, "bfloat16") < 0.05
    as_if_stepwise = {
        "class": "AdamW",
        "hyperparameters": {**ds.attrs["optimizer"]["hyperparameters"], "fused": None},
    }
    stepwise = ds.assign_attrs(optimizer=as_if_stepwise)
    assert wrongly_rounded(ds, "bfloat16") < wrongly_rounded(stepwise, "bfloat16")


ROUNDED = {
    "float32 state": ("RoundedAdamW", "bfloat16", {"state_dtype": "float32", "weight_decay": 0.3}),
    "float32 state of float16": ("RoundedAdam", "float16", {"state_dtype": "float32"}),
    "float64 state": ("RoundedAdamW", "float32", {"state_dtype": "float64"}),
    "amsgrad": ("RoundedAdam", "bfloat16", {"state_dtype": "float32", "amsgrad": True}),
}  # fmt: skip


def recorded(path, kind, dtype, **options):
    """A real run of a tiny model, trained by an optimizer that rounds once a step."""
    rounded_optimizer = pytest.importorskip("trajstore.trainers.rounded_optimizer")
    from trainings import tiny_run

    made = partial(getattr(rounded_optimizer, kind), lr=0.01, **options)
    return open_run(tiny_run(path, made, dtype=getattr(torch, dtype), count=30, block_rows=8))


@pytest.mark.parametrize("variant", nightly_but(ROUNDED, "amsgrad"))
def test_an_update_with_a_wider_state_rounds_to_the_next_weights(variant, tmp_path):
    kind, dtype, options = ROUNDED[variant]
    ds = recorded(tmp_path / "run.zarr", kind, dtype, **options)
    assert ds.exp_avg.attrs["native_dtype"] == options["state_dtype"]
    assert OptimizerRule.of(ds.attrs["optimizer"]).rounds_once
    if dtype == "float32":  # the update is also rounded to float32
        W, update = ds.W.values, analysis.adam_update(ds).adam_update.values
        slack = np.spacing(np.maximum(np.abs(W[1:]), np.abs(update)))
        assert (np.abs(W[:-1].astype(np.float64) + update - W[1:]) <= slack).all()
    else:
        assert wrongly_rounded(ds, dtype) == 0
    # With the intermediate rounding of torch, the update would differ.
    given = ds.attrs["optimizer"]["hyperparameters"]
    stepwise = {"class": kind.removeprefix("Rounded"), "hyperparameters": given}
    if dtype == "bfloat16":
        assert wrongly_rounded(ds.assign_attrs(optimizer=stepwise), dtype) > 0


def test_at_random_the_next_weights_are_a_neighbor_of_the_sum(tmp_path):
    options = {"state_dtype": "float32", "rounding": "stochastic"}
    ds = recorded(tmp_path / "run.zarr", "RoundedAdamW", "bfloat16", **options)
    update = analysis.adam_update(ds).adam_update.values
    W = ds.W.values.astype(np.float64)
    apart = np.abs(W[:-1] + update - W[1:])
    assert (apart < spacing(ds.W.values[1:], "bfloat16") * (1 + 1e-4)).all()
    share = wrongly_rounded(ds, "bfloat16")
    assert 0.05 < share < 0.5


@pytest.mark.nightly
def test_moments_that_were_rounded_after_the_step_are_near(tmp_path):
    ds = recorded(tmp_path / "run.zarr", "RoundedAdamW", "bfloat16", state_dtype="bfloat16")
    assert wrongly_rounded(ds, "bfloat16") < 0.2


def wrongly_rounded(ds, dtype) -> float:
    """Fraction of elements whose W + update does not round to the next W."""
    update = analysis.adam_update(ds).adam_update.values
    W = ds.W.values
    return (next_weights(W[:-1], update, dtype) != W[1:]).mean()


def test_a_skipped_step_does_not_count():
    rows = np.insert(np.arange(25), 6, 5)  # row 5 again, as the result of a skipped step
    ds = trained_run("AdamW", {}, "bfloat16").isel(step=rows).assign_coords(step=np.arange(26))
    ds = ds.assign(skipped=("step", np.eye(26, dtype=np.float32)[6]))
    W, update = ds.W.values, analysis.adam_update(ds).adam_update.values
    equal = (next_weights(W[:-1], update, "bfloat16") == W[1:]).all((1, 2))
    assert np.flatnonzero(~equal).tolist() == [5]  # the skipped step


def test_rows_whose_previous_step_is_missing_are_nan():
    ds = trained_run("AdamW", {}, "float32")
    whole = analysis.adam_update(ds).compute()
    some = analysis.adam_update(ds.isel(step=[0, 1, 4, 5, 9])).compute()
    for name in whole:
        np.testing.assert_array_equal(some[name].sel(step=[1, 5]), whole[name].sel(step=[1, 5]))
        assert np.isnan(some[name].sel(step=[4, 9])).all()
    without = trained_run("Adam", {}, "float32").isel(step=[0, 4, 9])
    got = analysis.adam_update(without).compute()
    assert np.isfinite(got.adam_update).all()
    assert np.isnan(got.adam_update_ulp).all()


def with_optimizer(kind, **hyperparameters):
    return lambda ds: ds.assign_attrs(optimizer={"class": kind, "hyperparameters": hyperparameters})


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda ds: ds.drop_vars("exp_avg_sq"), r"exp_avg_sq.*variables='matrix'"),
        (lambda ds: ds.drop_attrs(), "attribute optimizer"),
        (with_optimizer("torch.optim.sgd.SGD"), r"sgd\.SGD.*RoundedAdamW"),
        (with_optimizer("Adam", weight_decay=0), "'Adam' lack betas, eps"),
    ],
)
def test_missing_inputs_are_reported(alter, message):
    with pytest.raises((InvalidArgument, VariableNotRecorded), match=message):
        analysis.adam_update(alter(trained_run("AdamW", {}, "float32", rows=3)))


def test_amsgrad_needs_all_steps():
    amsgrad = trained_run("Adam", {"amsgrad": True}, "float32")
    with pytest.raises(InvalidArgument, match=r"steps 3 to 24 .* amsgrad"):
        analysis.adam_update(amsgrad.isel(step=slice(3, None)))
