"""Exact moments, what follows from them, and intended updates: compared with loops and torch."""

from __future__ import annotations

import math
import os
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from adam_runs import attributed_by_hand, by_hand, trained
from bits_and_calls import nightly_but
from held_arrays import BLOCK, held_at_most, made_of_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from trainings import tiny_run

from trajstore import analysis, open_run
from trajstore.analysis import OUTCOMES
from trajstore.analysis.optimizer import moments
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.threads import CompiledLoop
from trajstore.trainers.rounded_optimizer import RoundedAdamW
from trajstore.values.native_types import spacing
from trajstore.values.optimizer_rule import next_weights

MOMENTS = ("exp_avg", "exp_avg_sq")
CASES = {
    "AdamW": ("AdamW", {}, "bfloat16"),
    "strong decay": ("AdamW", {"weight_decay": 0.3}, "bfloat16"),
    "coupled decay": ("Adam", {"weight_decay": 0.1}, "bfloat16"),
    "no memory": ("Adam", {"betas": (0.0, 0.0)}, "bfloat16"),
    "maximize": ("Adam", {"maximize": True, "weight_decay": 0.1}, "bfloat16"),
    "fused": ("AdamW", {"fused": True}, "bfloat16"),
    "float16": ("AdamW", {"eps": 1e-4}, "float16"),
    "float32": ("AdamW", {"weight_decay": 0.0}, "float32"),
    "float64": ("AdamW", {"weight_decay": 0.0}, "float64"),
}


def resting(case: str) -> xr.Dataset:
    """A run whose tokens freeze one after the other, some by assignment."""
    ds = trained(*CASES[case], rows=24)
    W = ds.W.values.copy()
    for token, row in ((0, 9), (1, 17), (2, 17)):
        W[row:, token] = W[row, token]
    W[:, 3] = W[0, 3]  # never moves
    W[-1, 4] = -2 * W[-2, 4]  # moves at the last row
    return ds.assign(W=ds.W.copy(data=W))


def skipped(ds: xr.Dataset, *steps: int) -> xr.Dataset:
    """The run with steps that a scaler skipped: all is left as it was."""
    history = {name: ds[name].copy(deep=True) for name in ("W", *MOMENTS)}
    for array in history.values():
        for step in steps:
            array[step] = array[step - 1]
    is_skipped = ds.step.isin(steps)
    clip = ds.clip_coef.where(~is_skipped)
    return ds.assign(skipped=is_skipped.astype(np.float32), clip_coef=clip, **history)


def with_odd_values(ds: xr.Dataset) -> xr.Dataset:
    """Zeros of both signs, and gradients of NaN and infinities."""
    W, grad = ds.W.copy(deep=True), ds.grad.copy(deep=True)
    W[1, 0, 0], W[2, 0, 0] = 0.0, -0.0
    grad[-1, 1, :3] = np.array([np.nan, np.inf, -np.inf])
    return ds.assign(W=W, grad=grad)


SITUATIONS = {
    "a later step": lambda ds: ds.isel(step=slice(7, None)),
    "a single row": lambda ds: ds.isel(step=[7]),
    "skipped steps": lambda ds: skipped(ds, 11, 12, 22),
    "no step taken since": lambda ds: skipped(ds, *range(2, 24)),
    "odd values": with_odd_values,
    "nothing known of tokens": lambda ds: ds.drop_vars("is_dead"),
    "no live tokens": lambda ds: ds.assign_coords(is_dead=("token", np.ones(6, bool))),
}


def counted(ds: xr.Dataset) -> list[dict[str, np.ndarray]]:
    """Per row after the first: elements of each variable that were meant to change, and did not."""
    given = ds.attrs["optimizer"]["hyperparameters"]
    decoupled = given["weight_decay"] * ds.attrs["optimizer"]["class"].endswith("AdamW")
    after, taken, result = by_hand(ds, restart=True), int(ds.step[0]), []
    recorded = {name: ds[name].values.astype(np.float64) for name in ("W", *MOMENTS)}
    for row in range(1, ds.sizes["step"]):
        skips = "skipped" in ds and ds.skipped.values[row] == 1
        taken += not skips
        change = {name: after[name][row] - recorded[name][row - 1] for name in MOMENTS}
        rate, (m, v) = float(ds.lr.values[row]), (recorded[name][row] for name in MOMENTS)
        below = np.sqrt(v) / math.sqrt(1 - given["betas"][1] ** taken) + given["eps"]
        change["W"] = -rate / (1 - given["betas"][0] ** taken) * m / below
        change["W"] -= rate * decoupled * recorded["W"][row - 1]
        found = {}
        for name, values in change.items():
            meant = (values != 0) & np.isfinite(values) & (not skips)
            same = recorded[name][row] == recorded[name][row - 1]
            found[name] = np.array([meant, meant & same])
        squares = np.where(found["W"], np.square(change["W"]), 0)
        result.append({**found, "squares": squares})
    return result


def members_of(ds: xr.Dataset) -> dict[str, np.ndarray]:
    members = {"all": np.ones(ds.sizes["token"], bool)}
    if "is_dead" in ds:
        members |= {"dead": ds.is_dead.values, "live": ~ds.is_dead.values}
    return members


def check_attribution(ds: xr.Dataset, lazy: xr.Dataset, window: int = 100) -> None:
    """Compare exact moments and counterfactuals with loops."""
    got = analysis.exact_moments(lazy).compute(scheduler="sync")
    for moment, expected in by_hand(ds).items():
        np.testing.assert_array_equal(got[f"exact_{moment}"], expected)

    got = analysis.freeze_attribution(lazy, window=window).compute(scheduler="sync")
    assert got.attribution.dims == ("counterfactual", "token")
    assert got.attribution_counts.dims == ("counterfactual", "population", "outcome_name")
    for name, expected in attributed_by_hand(ds, window).items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
    for population, at in members_of(ds).items():
        counts = got.attribution_counts.sel(population=population)
        for number, outcome in enumerate(OUTCOMES):
            expected = (got.attribution.values[:, at] == number).sum(1)
            np.testing.assert_array_equal(counts.sel(outcome_name=outcome), expected)


def check_stuck(ds: xr.Dataset, lazy: xr.Dataset) -> None:
    """Compare what rounding left unchanged with loops."""
    got = analysis.moment_stuck(lazy).compute(scheduler="sync")
    assert got.sizes["step"] == ds.sizes["step"] - 1
    for row, found in enumerate(counted(ds)):
        for population, at in members_of(ds).items():
            if not at.any():
                assert got.sel(population=population).isnull().all().to_array().all()
                continue
            one = got.sel(population=population).isel(step=row)
            for name in ("W", *MOMENTS):
                meant, stuck = found[name][:, at].sum((1, 2))
                of = one.sel(variable=name)
                assert of.meant_fraction == meant / found[name][0, at].size
                np.testing.assert_equal(
                    of.stuck_fraction.item(), stuck / meant if meant else np.nan
                )
            intended, lost = found["squares"][:, at].sum((1, 2))
            expected = math.sqrt(lost / intended) if intended else np.nan
            np.testing.assert_allclose(one.update_lost, expected, rtol=1e-9)


@pytest.mark.parametrize("case", nightly_but(CASES, "coupled decay", "float16", "float32"))
def test_they_equal_a_plain_computation(case):
    ds = resting(case)
    lazy = ds.chunk(step=5, token=4)
    check_attribution(ds, lazy)
    check_stuck(ds, lazy)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_they_equal_a_plain_computation_where(situation):
    ds = SITUATIONS[situation](resting("AdamW"))
    lazy = ds.chunk(step=5, token=4)
    check_attribution(ds, lazy, window=3 if situation == "skipped steps" else 100)
    check_stuck(ds, lazy)


# Zeros of both signs, subnormals, infinities, NaN; and values whose moments rest and move.
BITS = st.one_of(
    st.sampled_from([0, 0x8000, 1, 0x3F80, 0xBF80, 0x3F81, 0x3A80, 0x7F80, 0x7FC0, 0xFF81]),
    st.integers(0, 0xFFFF),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[xr.Dataset, xr.Dataset]:
    """A history of moments that hold any bits, and the same in chunks."""
    rows, tokens, hidden = (draw(st.integers(1, most)) for most in (5, 3, 2))
    dims = ("step", "token", "hidden")
    first = draw(st.sampled_from([0, 0, 5]))

    def matrix() -> tuple[tuple[str, ...], np.ndarray, dict[str, str]]:
        bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=BITS))
        for row in range(1, rows):
            if draw(st.booleans()):
                bits[row] = bits[row - 1]
        return dims, (bits.astype(np.uint32) << 16).view(np.float32), {"native_dtype": "bfloat16"}

    ds = xr.Dataset(
        {name: matrix() for name in ("W", "grad", "exp_avg", "exp_avg_sq")},
        coords={
            "step": first + np.arange(rows),
            "is_dead": ("token", draw(arrays(bool, tokens))),
        },
    )
    factors = draw(arrays(np.float32, rows, elements=st.sampled_from([1.0, 0.5, 0.2509765625])))
    ds = ds.assign(clip_coef=("step", factors), lr=("step", np.full(rows, 1e-3)))
    if first == 0 and draw(st.booleans()):
        ds = ds.assign(skipped=("step", draw(arrays(bool, rows)).astype(np.float32)))
    hyperparameters = {
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5)])),
        "eps": 1e-8,
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "maximize": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["Adam", "AdamW"]))
    ds = ds.assign_attrs(optimizer={"class": kind, "hyperparameters": hyperparameters})
    return ds, ds.chunk({dim: draw(st.integers(1, size)) for dim, size in ds.sizes.items()})


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "4")), deadline=None)
@given(histories(), st.integers(1, 4))
def test_any_history(history: tuple[xr.Dataset, xr.Dataset], window: int) -> None:
    with np.errstate(all="ignore"):
        check_attribution(*history, window)


DECOUPLED = ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, "bfloat16")


@pytest.mark.parametrize("case", [*CASES.values(), DECOUPLED])
def test_in_float64_they_are_those_of_torch(case):
    kind, options, _ = case
    ds = trained(kind, options, "float64")
    assert (ds.clip_coef[1:3] < 1).all()
    assert (ds.clip_coef[-4:] == 1).all()
    got = analysis.exact_moments(ds).compute()
    for moment in MOMENTS:
        exact, recorded = got[f"exact_{moment}"], ds[moment]
        assert exact.dtype == np.float64
        largest = float(abs(recorded).max())
        np.testing.assert_allclose(exact, recorded, rtol=1e-12, atol=1e-15 * largest)


def test_from_row_0_gradients_suffice():
    ds = trained("AdamW", {}, "bfloat16")
    expected = analysis.exact_moments(ds).compute()
    alone = ds.drop_vars(["W", "exp_avg", "exp_avg_sq", "lr"])
    assert analysis.exact_moments(alone.chunk(step=4)).compute().equals(expected)


def without(*names):
    return lambda ds: ds.drop_vars([*names])


def with_unknown_factor(ds):
    note = {"note": "", "first_step": 4, "last_step": 4, "count": 1, "unproven": [[4, 4]]}
    unknown = ds.clip_coef.where(ds.step != 4)
    return ds.assign(clip_coef=unknown).assign_attrs(notes=[note])


def with_optimizer(kind, **options):
    def altered(ds):
        given = {**ds.attrs["optimizer"]["hyperparameters"], **options}
        return ds.assign_attrs(optimizer={"class": kind, "hyperparameters": given})

    return altered


def of_later_rows(*changes):
    def altered(ds):
        for change in changes:
            ds = change(ds)
        return ds.isel(step=slice(5, None))

    return altered


EXACT = "exact_moments moment_error moment_stuck freeze_attribution"
STUCK = "moment_stuck freeze_attribution"
BARE = {"class": "Adam", "hyperparameters": {}}
COUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": False}


@pytest.mark.parametrize(
    ("names", "alter", "message"),
    [
        (EXACT, lambda ds: ds.drop_isel(step=7), r"step 6 is followed by step 8.*every=1"),
        (EXACT, lambda ds: ds.isel(step=[]), "requires at least 1 row"),
        (EXACT, lambda ds: ds.isel(step=0), r"select rows with a list .* ds\.isel\(step=\[0\]\)"),
        (EXACT, with_unknown_factor, r"NaN at step 4 \(1 such.*max_grad_norm"),
        (EXACT, without("clip_coef"), "clip_coef"),
        (EXACT, without("grad"), "grad"),
        (EXACT, with_optimizer("AdamW", amsgrad=True), "amsgrad"),
        (EXACT, with_optimizer("torch.optim.sgd.SGD"), "SGD"),
        (STUCK, of_later_rows(lambda ds: skipped(ds, 3)), "steps before step 5.*all steps from 0"),
        ("exact_moments", of_later_rows(without("exp_avg")), "step 5.*exp_avg is not recorded.*0"),
        ("exact_moments", of_later_rows(without("W"), with_optimizer("Adam", **COUPLED)), "res W"),
        ("moment_error adam_update", without("exp_avg_sq"), r"exp_avg_sq.*variables='matrix'"),
        ("moment_plane", without("exp_avg"), "exp_avg"),
        ("moment_plane", with_optimizer("AdamW", amsgrad=True), "amsgrad"),
        ("adam_update", lambda ds: ds.drop_attrs(), "attribute optimizer"),
        ("adam_update", with_optimizer("torch.optim.sgd.SGD"), r"sgd\.SGD.*RoundedAdamW"),
        ("adam_update", lambda ds: ds.assign_attrs(optimizer=BARE), "'Adam' lack betas, "),
        ("adam_update", of_later_rows(with_optimizer("Adam", amsgrad=True)), "steps 5 to .* amsgr"),
        *((STUCK, without(name), name) for name in ("W", "exp_avg", "exp_avg_sq", "lr")),
    ],
)
def test_missing_inputs_are_reported(names, alter, message):
    ds = alter(trained("AdamW", {}, "bfloat16"))
    for name in names.split():
        with pytest.raises((InvalidArgument, VariableNotRecorded), match=message):
            getattr(analysis, name)(ds)


def test_other_lattices_and_levels_are_refused():
    ds = resting("AdamW")
    got = analysis.freeze_attribution(ds, lattice="bfloat16")
    xr.testing.assert_identical(got, analysis.freeze_attribution(ds))
    for names in (["freeze_attribution"], ["freeze_cause", "freeze_attribution"]):
        with pytest.raises(InvalidArgument, match=r"lattice='float16'.* use freeze_cause"):
            compute_named(ds, names, lattice="float16")
    with pytest.raises(InvalidArgument, match="from 0 to 1"):
        analysis.moment_error(ds, quantiles=[0.5, np.nan])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_error_is_that_by_hand(dtype):
    ds = trained("AdamW", {}, dtype)
    odd = ds.token.values % 2 == 1  # overlaps dead and live tokens
    ds = ds.assign_coords(is_odd=("token", odd))
    levels = [0.1, 0.5, 1.0]
    got = analysis.moment_error(ds.chunk(step=4, token=4), quantiles=levels).compute()
    assert got.norm_ratio.dims == ("step", "population", "moment")
    members = {"dead": ds.is_dead.values, "live": ~ds.is_dead.values, "all": slice(None)}
    members["odd"] = odd
    for moment, exact in by_hand(ds).items():
        for population, at in members.items():
            found = got.sel(moment=moment, population=population)
            a, b = ds[moment].values[:, at].astype(np.float64), exact[:, at]
            ratio = np.sqrt((a**2).sum((1, 2))[1:] / (b**2).sum((1, 2))[1:])
            np.testing.assert_allclose(found.norm_ratio[1:], ratio, rtol=1e-14)
            off = (a[1:] / b[1:]).reshape(len(ratio), -1) - 1
            expected = np.quantile(off, levels, axis=-1, method="lower").T
            np.testing.assert_allclose(
                found.ratio_quantiles[1:] - 1, expected, rtol=1 / 32, atol=2.0**-24
            )
    # Row 0 is zero on both sides.
    assert (got.isel(step=0) == 1).to_array().all()


def test_zero_nan_and_no_tokens_have_their_answers():
    ds = trained("AdamW", {}, "bfloat16").assign_coords(is_dead=("token", np.zeros(6, bool)))
    grad = ds.grad.copy(deep=True)
    grad[1:, 0] = 0
    recorded = {name: ds[name].where(ds.token != 0, 0) for name in MOMENTS}
    got = analysis.moment_error(ds.assign(grad=grad, **recorded)).compute()
    assert got.sel(population="dead").to_array().isnull().all()
    alone = analysis.moment_error(ds.assign(grad=grad, **recorded).isel(token=[0])).compute()
    assert (alone.sel(population="live") == 1).to_array().all()
    grad[7, 3, 2] = np.nan
    got = analysis.moment_error(ds.assign(grad=grad, **recorded)).sel(population="live").compute()
    assert got.isel(step=slice(7)).notnull().to_array().all()
    assert got.isel(step=slice(7, None)).isnull().to_array().all()
    one = analysis.moment_error(ds.drop_vars("is_dead"))
    assert one.population.values.tolist() == ["all"]


def test_a_sum_of_exact_moments_holds_few_blocks():
    attrs = trained("AdamW", {}, "bfloat16", rows=2).attrs
    exact = analysis.exact_moments(made_of_blocks(40).assign_attrs(attrs))
    assert held_at_most(exact.compute) > 0.9 * exact.nbytes, "the measure counts all"
    assert held_at_most(exact.sum().compute) < exact.nbytes / 4


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


LOOP = (moments.__name__, "follow_rows")


def check_follow(moment, before, gradient, taken, by_loop=True):
    """Compare the compiled loop, if it takes these arrays, with NumPy."""
    betas, found = np.linspace(0.9, 0.999, len(gradient)), []
    for enough in (1 << 62, 0):
        out, loop = np.full(gradient.shape, -1.0), CompiledLoop(*LOOP, enough)
        moments.follow(moment, betas, before, gradient, taken, out, loop)
        assert bool(loop._ready) == (by_loop and not enough)
        found.append(out)
    expected, got = found
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("dtype", nightly_but(["float32", "float64"], "float32"))
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 5), (16, 300, 64)], ids=str)
def test_the_compiled_recurrence_equals_that_of_numpy(moment, dtype, shape):
    rng = np.random.default_rng(1)
    gradient = rng.standard_normal(shape).astype(dtype)
    for odd in (np.nan, -np.inf, np.finfo(dtype).smallest_subnormal):
        gradient[rng.random(shape) < 0.02] = odd
    before = rng.standard_normal(shape[1:])
    for taken in (np.ones(shape[0], bool), np.zeros(shape[0], bool), rng.random(shape[0]) < 0.6):
        check_follow(moment, before, gradient, taken)


def test_where_its_arrays_lie_does_not_matter():
    around = np.random.default_rng(1).standard_normal((5, 12, 6)).astype("f4")
    before = np.broadcast_to(np.zeros(()), (7, 6))  # as dask's zeros come
    taken = np.array([False, True, True, False, True])[::-1]
    read_only = around[:, 3:10].copy()
    read_only.flags.writeable = False
    for gradient, by_loop in (
        (around[:, 3:10], True),
        (read_only, True),
        (around[:, 3:10].astype(">f4"), False),
        (around[:, 3:10].astype("f2"), False),
        (np.asfortranarray(around)[:, 3:10], False),
        (around[::-1, 3:10], False),
    ):
        check_follow("exp_avg_sq", before, gradient, taken, by_loop)


def trained_run(kind: str, options: dict, dtype: str, rows: int = 25):
    """A run whose gradients come and go, without clipping."""
    return trained(kind, options, dtype, rows, max_norm=np.inf).chunk({"step": 4, "token": 4})


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Adam", {"amsgrad": True, "weight_decay": 0.1}), ("AdamW", {"maximize": True})],
)
def test_float32_updates_are_those_of_torch(kind, options):
    ds = trained_run(kind, options, "float32", rows=12)
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


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_update_with_a_wider_state_is_rounded_once(rounding, tmp_path):
    options = {"weight_decay": 0.3, "state_dtype": "float32", "rounding": rounding}
    made = partial(RoundedAdamW, lr=0.01, **options)
    path = tiny_run(tmp_path / "run.zarr", made, dtype=torch.bfloat16, count=30, block_rows=8)
    ds = open_run(path)
    share = wrongly_rounded(ds, "bfloat16")
    assert share == 0 if rounding == "nearest" else 0.05 < share < 0.5
    # The next weights are a neighbor of the sum.
    update, W = analysis.adam_update(ds).adam_update.values, ds.W.values.astype(np.float64)
    cells = spacing(ds.W.values[1:], "bfloat16")
    assert (np.abs(W[:-1] + update - W[1:]) < cells * (1 + 1e-4)).all()
    # With the intermediate rounding of torch, the update would differ.
    stepwise = {"class": "AdamW", "hyperparameters": ds.attrs["optimizer"]["hyperparameters"]}
    other = analysis.adam_update(ds.assign_attrs(optimizer=stepwise)).adam_update.values
    assert (other != update).any()


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
