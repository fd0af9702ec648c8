"""Exact moments, compared with NumPy loops, with torch in float64, and with recorded moments."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import xarray as xr
from adam_runs import by_hand, trained
from bits_and_calls import nightly_but
from dask.callbacks import Callback

from trajstore import analysis
from trajstore.analysis.optimizer import moments
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.threads import CompiledLoop

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MOMENTS = ("exp_avg", "exp_avg_sq")

VARIANTS = {
    "AdamW": ("AdamW", {"weight_decay": 0.3}),
    "Adam": ("Adam", {}),
    "Adam, coupled decay": ("Adam", {"weight_decay": 0.1}),
    "Adam, decoupled decay": ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "no memory": ("Adam", {"betas": (0.0, 0.0)}),
    "maximize": ("AdamW", {"maximize": True}),
    "maximize, coupled decay": ("Adam", {"maximize": True, "weight_decay": 0.1}),
}


def chunked(ds: xr.Dataset, chunks: tuple[int, int, int] | None) -> xr.Dataset:
    return ds.chunk(dict(zip(("step", "token", "hidden"), chunks, strict=True))) if chunks else ds


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_float64_they_are_those_of_torch(variant):
    ds = trained(*VARIANTS[variant], "float64")
    assert (ds.clip_coef[1:3] < 1).all()
    assert (ds.clip_coef[-4:] == 1).all()
    got = analysis.exact_moments(ds).compute()
    for moment in MOMENTS:
        exact, recorded = got[f"exact_{moment}"], ds[moment]
        assert exact.dtype == np.float64
        largest = float(abs(recorded).max())
        np.testing.assert_allclose(exact, recorded, rtol=1e-12, atol=1e-15 * largest)


def test_a_single_row_without_its_dimension_is_refused():
    ds = trained("AdamW", {}, "bfloat16").isel(step=0)
    with pytest.raises(InvalidArgument, match=r"select rows with a list .* ds\.isel\(step=\[0\]\)"):
        analysis.exact_moments(ds)


def test_blocks_without_rows_are_passed_over():
    ds = trained("AdamW", {}, "bfloat16")
    rows = ds.sizes["step"]
    for chunks in ((0, 4, rows - 4), (4, 0, rows - 4), (4, rows - 4, 0)):
        got = analysis.exact_moments(ds.chunk(step=chunks)).compute()
        for moment, expected in by_hand(ds).items():
            np.testing.assert_array_equal(got[f"exact_{moment}"], expected)


def test_exact_moments_equal_a_plain_loop():
    ds = trained(*VARIANTS["AdamW"], "float32")
    got = analysis.exact_moments(chunked(ds, (4, 5, -1))).compute()
    for moment, expected in by_hand(ds).items():
        np.testing.assert_array_equal(got[f"exact_{moment}"], expected)


def most_held(*arrays: xr.DataArray) -> int:
    """Largest number of blocks of moments in memory during a computation."""
    most = 0

    def count(key, result, graph, state, worker):
        nonlocal most
        values = [held for held in state["cache"].values() if isinstance(held, np.ndarray)]
        blocks = [held for held in values if held.dtype == np.float64 and held.ndim == 3]
        most = max(most, sum(len(block) > 1 and any(block.strides) for block in blocks))

    with Callback(posttask=count):
        dask.compute(*arrays, scheduler="sync")
    return most


def test_a_sum_of_exact_moments_holds_few_blocks():
    ds = trained("AdamW", {}, "bfloat16")
    ds = xr.concat([ds.assign_coords(step=ds.step + len(ds.step) * at) for at in range(6)], "step")
    ds = ds.assign(clip_coef=ds.clip_coef.fillna(1))
    exact = analysis.exact_moments(chunked(ds, (4, 2, -1)))
    blocks = exact.exact_exp_avg.data.npartitions
    # Check of the measure: computing both completely needs more blocks than one.
    assert most_held(*exact.data_vars.values()) > blocks
    assert most_held(*exact.sum().data_vars.values()) < blocks / 8


def test_rows_from_a_later_step_begin_with_their_own_moments():
    ds = trained("AdamW", {}, "bfloat16").isel(step=slice(5, None))
    got = analysis.exact_moments(chunked(ds, (4, 5, -1))).compute()
    for moment, expected in by_hand(ds).items():
        np.testing.assert_array_equal(got[f"exact_{moment}"], expected)
        np.testing.assert_array_equal(got[f"exact_{moment}"][0], ds[moment][0])
    without = ds.drop_vars("exp_avg")
    with pytest.raises(
        VariableNotRecorded, match=r"start at step 5.*exp_avg is not recorded.*from 0"
    ):
        analysis.exact_moments(without)


def test_exact_moments_from_row_0_need_gradients_only():
    ds = trained("AdamW", {}, "bfloat16")
    alone = ds.drop_vars(["W", "exp_avg", "exp_avg_sq", "lr"])
    assert analysis.exact_moments(alone).equals(analysis.exact_moments(ds))
    coupled = trained("Adam", {"weight_decay": 0.1}, "bfloat16").drop_vars("W")
    with pytest.raises(VariableNotRecorded, match="requires W"):
        analysis.exact_moments(coupled)


def test_skipped_steps_leave_the_moments():
    ds = trained("AdamW", {}, "float16")
    skipped = np.isin(ds.step, [3, 4, 11]).astype(np.float32)
    skipped[0] = np.nan
    clip = np.where(skipped == 1, np.nan, ds.clip_coef)
    ds = ds.assign(skipped=("step", skipped), clip_coef=("step", clip.astype(np.float32)))
    got = analysis.exact_moments(chunked(ds, (4, 3, -1))).compute()
    for moment, expected in by_hand(ds).items():
        exact = got[f"exact_{moment}"]
        np.testing.assert_array_equal(exact, expected)
        np.testing.assert_array_equal(exact.sel(step=4), exact.sel(step=2))
        assert (exact.sel(step=5) != exact.sel(step=4)).all()


def test_missing_inputs_are_reported():
    ds = trained("AdamW", {}, "bfloat16")
    for quantity in (
        analysis.exact_moments,
        analysis.moment_error,
        analysis.moment_stuck,
        analysis.freeze_attribution,
    ):
        with pytest.raises(InvalidArgument, match=r"step 6 is followed by step 8.*every=1"):
            quantity(ds.drop_isel(step=7))
        with pytest.raises(VariableNotRecorded, match="clip_coef"):
            quantity(ds.drop_vars("clip_coef"))
        with pytest.raises(VariableNotRecorded, match="grad"):
            quantity(ds.drop_vars("grad"))
        note = {"note": "", "first_step": 4, "last_step": 4, "count": 1, "unproven": [[4, 4]]}
        unknown = ds.clip_coef.where(ds.step != 4)
        with pytest.raises(InvalidArgument, match=r"NaN at step 4 \(1 such.*max_grad_norm"):
            quantity(ds.assign(clip_coef=unknown).assign_attrs(notes=[note]))
        with pytest.raises(InvalidArgument, match="requires at least 1 row"):
            quantity(ds.isel(step=[]))
        amsgrad = {**ds.attrs["optimizer"]["hyperparameters"], "amsgrad": True}
        with pytest.raises(InvalidArgument, match="amsgrad"):
            quantity(ds, {"class": "AdamW", "hyperparameters": amsgrad})
        with pytest.raises(InvalidArgument, match="SGD"):
            quantity(ds, {"class": "torch.optim.sgd.SGD", "hyperparameters": {}})
    for quantity in (analysis.moment_stuck, analysis.freeze_attribution):
        for name in ("W", "exp_avg", "exp_avg_sq", "lr"):
            with pytest.raises(VariableNotRecorded, match=name):
                quantity(ds.drop_vars(name))
    with pytest.raises(VariableNotRecorded, match=r"exp_avg_sq.*variables='matrix'"):
        analysis.moment_error(ds.drop_vars("exp_avg_sq"))
    with pytest.raises(InvalidArgument, match="from 0 to 1"):
        analysis.moment_error(ds, quantiles=[0.5, np.nan])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_error_is_that_by_hand(dtype):
    ds = trained("AdamW", {}, dtype)
    odd = ds.token.values % 2 == 1  # overlaps dead and live tokens
    ds = ds.assign_coords(is_odd=("token", odd))
    levels = [0.1, 0.5, 1.0]
    got = analysis.moment_error(chunked(ds, (4, 4, -1)), quantiles=levels).compute()
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


class SpiedLoop(CompiledLoop):
    """A loop that is worth it for any size, and notes if it ran."""

    def __init__(self, *, compiled):
        super().__init__(moments.__name__, "follow_rows")
        self.compiled, self.has_run = compiled, False

    def is_worth(self, count):
        return True

    def run(self, *arguments):
        self.has_run = self.compiled and super().run(*arguments)
        return self.has_run


def follow(moment, before, gradient, taken, *, compiled):
    """The moment after each step, and whether the compiled loop computed it."""
    pytest.importorskip("numba")
    out, loop = np.full(gradient.shape, -1.0), SpiedLoop(compiled=compiled)
    betas = np.linspace(0.9, 0.999, len(gradient))
    moments.follow(moment, betas, before, gradient, taken, out, loop)
    return out, loop.has_run


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("dtype", nightly_but(["float32", "float64"], "float32"))
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 5), (16, 300, 64)], ids=str)
def test_the_compiled_recurrence_equals_that_of_numpy(moment, dtype, shape):
    rng = np.random.default_rng(1)
    gradient = rng.standard_normal(shape).astype(dtype)
    gradient[rng.random(shape) < 0.01] = np.nan
    gradient[rng.random(shape) < 0.01] = -np.inf
    gradient[rng.random(shape) < 0.01] = np.finfo(dtype).smallest_subnormal
    before = rng.standard_normal(shape[1:])
    for taken in (np.ones(shape[0], bool), np.zeros(shape[0], bool), rng.random(shape[0]) < 0.6):
        arguments = moment, before, gradient, taken
        expected, by_loop = follow(*arguments, compiled=False)
        assert not by_loop
        got, by_loop = follow(*arguments, compiled=True)
        assert by_loop
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))


def test_where_its_arrays_lie_does_not_matter():
    rng = np.random.default_rng(1)
    around = rng.standard_normal((5, 12, 6)).astype("f4")
    before = np.broadcast_to(np.zeros(()), (7, 6))  # as dask's zeros come
    taken = np.array([False, True, True, False, True])[::-1]
    read_only = around[:, 3:10].copy()
    read_only.flags.writeable = False
    for gradient, expected in (
        (around[:, 3:10], True),
        (read_only, True),
        (around[:, 3:10].astype(">f4"), False),
        (around[:, 3:10].astype("f2"), False),
        (np.asfortranarray(around)[:, 3:10], False),
        (around[::-1, 3:10], False),
    ):
        arguments = "exp_avg_sq", before, gradient, taken
        want, _ = follow(*arguments, compiled=False)
        got, by_loop = follow(*arguments, compiled=True)
        assert by_loop == expected
        np.testing.assert_array_equal(got, want)
