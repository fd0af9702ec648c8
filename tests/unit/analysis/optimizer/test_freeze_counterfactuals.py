"""Counterfactuals of frozen tokens, compared with a computation in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from adam_runs import attributed_by_hand, trained
from bits_and_calls import nightly_but
from held_arrays import BLOCK, held_at_most, made_of_blocks

from trajstore import analysis
from trajstore.analysis import COUNTERFACTUALS, OUTCOMES
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CASES = {
    "AdamW, bfloat16": ("AdamW", {}, "bfloat16"),
    "AdamW, strong decay": ("AdamW", {"weight_decay": 0.3}, "bfloat16"),
    "Adam, coupled decay": ("Adam", {"weight_decay": 0.1}, "bfloat16"),
    "maximize": ("Adam", {"maximize": True}, "bfloat16"),
    "fused": ("AdamW", {"fused": True}, "bfloat16"),
    "float16": ("AdamW", {"eps": 1e-4}, "float16"),
    "float32": ("AdamW", {"weight_decay": 0.0}, "float32"),
    "float64": ("AdamW", {"weight_decay": 0.0}, "float64"),
}
QUICK = ("AdamW, bfloat16", "Adam, coupled decay", "fused", "float32")


def resting(case: str, rows: int = 24) -> xr.Dataset:
    """A run whose tokens freeze one after the other, some by assignment."""
    ds = trained(*CASES[case], rows=rows)
    W = ds.W.values.copy()
    for token, row in ((0, 9), (1, 17), (2, 17)):
        W[row:, token] = W[row, token]
    W[:, 3] = W[0, 3]  # never moves
    W[-1, 4] = -2 * W[-2, 4]  # moves at the last row
    return ds.assign(W=ds.W.copy(data=W))


def assert_as_by_hand(ds: xr.Dataset, got: xr.Dataset, window: int) -> None:
    for name, expected in attributed_by_hand(ds, window).items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)


@pytest.mark.parametrize("case", nightly_but(CASES, *QUICK))
def test_attribution_equals_a_plain_computation(case):
    ds = resting(case)
    got = analysis.freeze_attribution(ds.chunk(step=5, token=4)).compute()
    assert_as_by_hand(ds, got, 100)
    assert got.attribution.dims == ("counterfactual", "token")
    assert got.attribution_steps.values[:5].tolist() == [14, 6, 6, 23, 0]


def test_the_counts_are_of_each_population():
    got = analysis.freeze_attribution(resting("AdamW, bfloat16")).compute()
    assert got.attribution_counts.dims == ("counterfactual", "population", "outcome_name")
    dead = got.is_dead.values
    for population, members in (("dead", dead), ("live", ~dead), ("all", np.ones_like(dead))):
        for at, outcome in enumerate(OUTCOMES):
            count = (got.attribution.values[:, members] == at).sum(1)
            of = {"population": population, "outcome_name": outcome}
            np.testing.assert_array_equal(got.attribution_counts.sel(of), count)


def test_a_moment_that_cannot_decay_is_the_cause_where_it_is():
    """Large early gradients, which only the exact second moment forgets."""
    rows, shape = 600, (2, 1)
    rule = {"betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    small = np.full((rows, *shape), 2.0**-4, np.float32)
    dims = ("step", "token", "hidden")
    attrs = {"native_dtype": "bfloat16"}
    ds = xr.Dataset(
        {
            "W": (dims, np.ones((rows, *shape), np.float32), attrs),
            "grad": (dims, small, attrs),
            "exp_avg": (dims, small, attrs),
            "exp_avg_sq": (dims, np.ones((rows, *shape), np.float32), attrs),
        },
        coords={"step": np.arange(rows) + 500, "is_dead": ("token", [True, False])},
        attrs={"optimizer": {"class": "AdamW", "hyperparameters": rule}},
    ).assign(clip_coef=("step", np.ones(rows)), lr=("step", np.full(rows, 6e-3)))
    got = analysis.freeze_attribution(ds.chunk(step=100), window=rows).compute()
    attribution = {
        str(of): OUTCOMES[at]
        for of, at in zip(COUNTERFACTUALS, got.attribution.values[:, 0], strict=True)
    }
    assert attribution == {
        "recorded": "rounded_away",
        "exact_moments": "moves",
        "peak_lr": "rounded_away",
        "live_moments": "rounded_away",
        "float32_weights": "moves",
    }
    # W is 1, whose spacing is 2^-7. The recorded update is lr / 16, the exact one tends to lr.
    margin = got.attribution_margin[:, 0].values
    left = 0.99 ** (rows - 1)
    largest = 6e-3 * 2.0**-4 / np.sqrt(left + 2.0**-8 * (1 - left)) * 2**7
    assert margin[COUNTERFACTUALS.index("exact_moments")] == pytest.approx(largest, rel=0.02)
    assert margin[COUNTERFACTUALS.index("recorded")] == pytest.approx(6e-3 / 16 * 2**7, rel=0.02)
    # Before the exact one has decayed, it is not the cause either.
    early = analysis.freeze_attribution(ds, window=20).attribution.sel(
        counterfactual="exact_moments"
    )
    assert OUTCOMES[int(early[0])] == "rounded_away"


def test_skipped_steps_are_not_tried():
    ds = resting("AdamW, bfloat16")
    skipped = np.isin(ds.step, [11, 12, 22]).astype(np.float32)
    ds = ds.assign(skipped=("step", skipped))
    for window in (3, 100):
        got = analysis.freeze_attribution(ds.chunk(step=7), window=window).compute()
        assert_as_by_hand(ds, got, window)
    alone = ds.assign(skipped=("step", np.ones(ds.sizes["step"], np.float32)))
    assert (analysis.freeze_attribution(alone).attribution[:, 3] == OUTCOMES.index("unknown")).all()
    with pytest.raises(InvalidArgument, match=r"steps before step 3.*all steps from 0"):
        analysis.freeze_attribution(ds.isel(step=slice(3, None)))


def test_rows_from_a_later_step():
    ds = resting("AdamW, bfloat16").isel(step=slice(7, None))
    assert_as_by_hand(ds, analysis.freeze_attribution(ds.chunk(step=4)).compute(), 100)
    one = analysis.freeze_attribution(ds.isel(step=[0])).compute()
    assert (one.attribution == OUTCOMES.index("moving")).all()


def test_without_live_or_without_any_known_tokens():
    ds = resting("AdamW, bfloat16")
    unknown = OUTCOMES.index("unknown")
    for other in (ds.drop_vars("is_dead"), ds.assign_coords(is_dead=("token", np.ones(6, bool)))):
        got = analysis.freeze_attribution(other).compute()
        assert_as_by_hand(other, got, 100)
        rest = got.attribution.isel(token=[0, 1, 2, 3])
        assert (rest.sel(counterfactual="live_moments") == unknown).all()
        assert (rest.sel(counterfactual="peak_lr") != unknown).all()
    assert got.attribution_counts.sel(population="live").sum() == 0
    none = ds.assign_coords(is_dead=("token", np.zeros(6, bool)))
    assert_as_by_hand(none, analysis.freeze_attribution(none).compute(), 100)
    assert analysis.freeze_attribution(none).attribution_counts.sel(population="dead").sum() == 0


def test_other_lattices_are_refused():
    ds = resting("AdamW, bfloat16")
    got = analysis.freeze_attribution(ds, lattice="bfloat16")
    xr.testing.assert_identical(got, analysis.freeze_attribution(ds))
    for compute in (
        lambda: analysis.freeze_attribution(ds, lattice="float16"),
        lambda: analysis.compute(ds, ["freeze_cause", "freeze_attribution"], "float16"),
        lambda: compute_named(ds, ["freeze_attribution"], lattice="float16"),
    ):
        with pytest.raises(InvalidArgument, match=r"lattice='float16'; use freeze_cause"):
            compute()


@pytest.mark.nightly
@pytest.mark.parametrize("quantity", [analysis.freeze_attribution, analysis.moment_error])
def test_memory_does_not_grow_with_the_number_of_steps(quantity, monkeypatch):
    # A block has several tasks.
    monkeypatch.setattr("trajstore.analysis.optimizer.moments._TASK_BYTES", 8 * BLOCK // 16)
    attrs = trained("AdamW", {}, "bfloat16", rows=2).attrs
    few, many = (
        held_at_most(lambda rows=rows: quantity(made_of_blocks(rows).assign_attrs(attrs)).compute())
        for rows in (10, 40)
    )
    assert many < 1.3 * few
