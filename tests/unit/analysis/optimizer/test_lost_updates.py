"""Elements that rounding left unchanged, compared with loops over elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr
from adam_runs import by_hand, trained
from bits_and_calls import nightly_but
from parameter_tables import parameter_table

from trajstore import analysis
from trajstore.analysis.optimizer.lost_updates import lost_by_parameter
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def counted(ds: xr.Dataset, population: np.ndarray, after: dict) -> list[tuple[dict, dict, float]]:
    """Per row after the first: fractions meant and stuck by variable, and of the norm of W."""
    given = ds.attrs["optimizer"]["hyperparameters"]
    decoupled = given["weight_decay"] * ds.attrs["optimizer"]["class"].endswith("AdamW")
    taken, result = int(ds.step[0]), []
    for row in range(1, ds.sizes["step"]):
        skipped = "skipped" in ds and ds.skipped.values[row] == 1
        taken += not skipped
        meant, left = dict.fromkeys(("exp_avg", "exp_avg_sq", "W"), 0), {}
        left |= dict.fromkeys(meant, 0)
        intended, lost, elements = 0.0, 0.0, 0
        for token in np.nonzero(population)[0]:
            for at in range(ds.sizes["hidden"]):
                elements += 1
                m, v = (ds[name].values[row, token, at].astype(float) for name in after)
                W = float(ds.W.values[row - 1, token, at])
                change = {
                    name: after[name][row, token, at] - float(ds[name].values[row - 1, token, at])
                    for name in after
                }
                if not skipped:
                    rate = float(ds.lr.values[row])
                    below = math.sqrt(v) / math.sqrt(1 - given["betas"][1] ** taken) + given["eps"]
                    step = -rate / (1 - given["betas"][0] ** taken) * m / below
                    change["W"] = step - rate * decoupled * W
                    intended += change["W"] ** 2
                for name, value in change.items():
                    is_meant = value != 0 and not skipped
                    same = ds[name].values[row - 1, token, at] == ds[name].values[row, token, at]
                    meant[name] += is_meant
                    left[name] += is_meant and same
                    if name == "W" and is_meant and same:
                        lost += value**2
        shares = {name: n / elements for name, n in meant.items()}
        stuck = {name: n / meant[name] if meant[name] else math.nan for name, n in left.items()}
        result.append((shares, stuck, math.sqrt(lost / intended) if intended else math.nan))
    return result


def assert_counted(ds: xr.Dataset, got: xr.Dataset) -> None:
    dead = ds.is_dead.values
    members = {"dead": dead, "live": ~dead, "all": np.ones_like(dead)}
    after = by_hand(ds, restart=True)
    for population, at in members.items():
        found = got.sel(population=population)
        for row, (meant, stuck, lost) in enumerate(counted(ds, at, after)):
            for name in meant:
                of = {"variable": name}
                assert found.meant_fraction[row].sel(of) == meant[name]
                np.testing.assert_equal(float(found.stuck_fraction[row].sel(of)), stuck[name])
            np.testing.assert_allclose(found.update_lost[row], lost, rtol=1e-9)


CASES = {
    "AdamW, bfloat16": ("AdamW", {}, "bfloat16"),
    "AdamW, strong decay": ("AdamW", {"weight_decay": 0.3}, "bfloat16"),
    "Adam, coupled decay": ("Adam", {"weight_decay": 0.1}, "bfloat16"),
    "maximize": ("Adam", {"maximize": True}, "bfloat16"),
    "float16": ("AdamW", {"eps": 1e-4}, "float16"),
    "float32": ("AdamW", {}, "float32"),
    "float64": ("AdamW", {}, "float64"),
}


@pytest.mark.parametrize("case", nightly_but(CASES, "Adam, coupled decay", "float16"))
def test_fractions_equal_a_plain_count(case):
    ds = trained(*CASES[case])
    got = analysis.moment_stuck(ds.chunk(step=5, token=4)).compute()
    assert got.sizes["step"] == ds.sizes["step"] - 1
    assert_counted(ds, got)


def test_rows_from_a_later_step():
    ds = trained("AdamW", {}, "bfloat16")
    later = ds.isel(step=slice(8, None))
    got = analysis.moment_stuck(later).compute()
    xr.testing.assert_identical(got, analysis.moment_stuck(ds).sel(step=slice(9, None)).compute())


def test_every_bfloat16_second_moment_is_stuck_without_a_gradient():
    every = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    values = every.float().numpy().reshape(1, -1, 64)
    zero = np.zeros_like(values)
    given = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}

    def of(after: torch.Tensor) -> xr.Dataset:
        pair = np.concatenate([values, after.float().numpy().reshape(values.shape)])
        dims = ("step", "token", "hidden")
        return xr.Dataset(
            {
                name: (dims, array.repeat(2, 0) if len(array) == 1 else array)
                for name, array in (
                    ("W", zero), ("grad", zero), ("exp_avg", zero), ("exp_avg_sq", pair),
                )
            },
            coords={"step": [7, 8]},
        ).assign(clip_coef=("step", np.ones(2)), lr=("step", np.full(2, 1e-3)))  # fmt: skip

    for beta2, stuck in ((0.999, 1.0), (0.998, 0.9532), (0.996, 0.0)):
        rule = {"class": "AdamW", "hyperparameters": {**given, "betas": [0.9, beta2]}}
        got = analysis.moment_stuck(of(every.clone().mul_(beta2)), rule).compute()
        moment = got.sel(variable="exp_avg_sq", population="all").isel(step=0)
        assert moment.meant_fraction == 1
        assert moment.stuck_fraction.item() == pytest.approx(stuck, abs=1e-4)
        assert got.meant_fraction.sel(variable="W").item() == 0
        assert got.update_lost.isnull().all()


def test_skipped_steps_have_no_intended_updates():
    ds = trained("AdamW", {}, "bfloat16")
    skipped = np.isin(ds.step, [6, 7]).astype(np.float32)
    history = {name: ds[name].copy(deep=True) for name in ("W", "exp_avg", "exp_avg_sq")}
    for array in history.values():
        array[6] = array[7] = array[5]
    ds = ds.assign(skipped=("step", skipped), **history)
    got = analysis.moment_stuck(ds).compute()
    assert_counted(ds, got)
    rest = got.sel(step=[6, 7])
    assert (rest.meant_fraction == 0).all()
    assert rest.stuck_fraction.isnull().all()
    assert rest.update_lost.isnull().all()
    with pytest.raises(InvalidArgument, match=r"steps before step 3.*all steps from 0"):
        analysis.moment_stuck(ds.isel(step=slice(3, None)))


def test_signs_of_zero_and_infinite_gradients_do_not_count():
    ds = trained("AdamW", {"weight_decay": 0.0}, "bfloat16", rows=3)
    W, grad = ds.W.copy(deep=True), ds.grad.copy(deep=True)
    W[1, 0, 0], W[2, 0, 0] = 0.0, -0.0
    grad[2, 1, :3] = np.array([np.nan, np.inf, -np.inf])
    ds = ds.assign(W=W, grad=grad).isel(token=[0, 1])
    got = analysis.moment_stuck(ds).isel(step=1).sel(population="all").compute()
    assert got.meant_fraction.values.tolist() == [0.7, 0.7, 1]  # all but three of ten
    assert got.stuck_fraction.sel(variable="W") >= 0.1


SHAPES = {"W": [5, 3], "a": [2, 4], "bias": [3], "scalar": [], "fixed": [2, 2]}
ROWS = 6


@pytest.fixture
def run() -> xr.Dataset:
    """A run in which about half of the elements keep their value in a step."""
    rng = np.random.default_rng(2)
    offset = sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name != "W")

    def values(*shape: int, zeros: float) -> np.ndarray:
        found = rng.normal(size=(ROWS, *shape)).astype("f4")
        return np.where(rng.random(found.shape) < zeros, 0, found).astype("f4")

    element, matrix = ("step", "element"), ("step", "token", "hidden")
    params = values(offset, zeros=0.5).cumsum(0)
    params[2, :3], params[3, :3] = 0.0, -0.0
    grad = values(offset, zeros=0.3)
    grad[:, -4:] = np.nan
    count = np.tile(np.arange(ROWS, dtype="f4")[:, None], len(SHAPES))
    count[4:, 2] -= 1
    ds = xr.Dataset(
        {
            "W": (matrix, values(5, 3, zeros=0.5).cumsum(0), {"native_dtype": "float32"}),
            "grad": (matrix, values(5, 3, zeros=0.3)),
            "params": (element, params),
            "params_grad": (element, grad),
            "params_lr": (("step", "group"), np.array([[np.nan, 1, 1, 1, 1, 0]], "f4").T),
            "params_count": (("step", "parameter"), count),
        },
        coords={"step": np.arange(ROWS), "token": np.arange(5), "parameter": list(SHAPES)},
        attrs={"parameters": parameter_table(SHAPES, "W")},
    )
    return ds.chunk(step=2, element=3)


def test_every_step_against_a_loop_over_elements(run):
    found = lost_by_parameter(run, range(1, ROWS)).compute()
    ds = run.compute()
    for row in range(1, ROWS):
        for number, entry in enumerate(run.attrs["parameters"]):
            if entry["variable"] == "W":
                names, part = ("W", "grad"), slice(None)
            else:
                size = int(np.prod(entry["shape"]))
                names = ("params", "params_grad")
                part = slice(entry["offset"], entry["offset"] + size)
            W, grad = (ds[name].values[:, part].reshape(ROWS, -1) for name in names)
            wanted = lost = 0
            for before, after, gradient in zip(W[row - 1], W[row], grad[row], strict=True):
                wanted += gradient != 0
                lost += gradient != 0 and before == after
            rate = ds.params_lr.values[row, 0]
            skipped = entry["name"] == "bias" and row == 4
            known = wanted and rate and not skipped and entry["name"] != "fixed"
            expected = lost / wanted if known else np.nan
            np.testing.assert_equal(found.values[row - 1, number], expected)
    assert 0 < found.sel(parameter="a").mean() < 1


def test_steps_with_a_gap_are_unknown(run):
    assert lost_by_parameter(run.isel(step=[0, 2]), [1]).isnull().all()


def test_the_summary_has_it_for_whole_runs_only(run):
    found = analysis.summary(run).param_update_lost
    assert found.dims == ("when", "parameter")
    np.testing.assert_array_equal(found, lost_by_parameter(run, [1, ROWS - 1]))
    assert "param_update_lost" not in analysis.summary(run.isel(token=slice(3)))


ADAM = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}


@pytest.fixture
def moments_run(make_run):
    rng = np.random.default_rng(0)
    shape = (6, 12, 4)
    m = (10 ** rng.uniform(-8, -1, shape)).astype(np.float32)
    m[5, 0, 0] = 0
    v = (10 ** rng.uniform(-10, -2, shape)).astype(np.float32)
    W = np.full(shape, 1.5, np.float32)  # spacing 2^−7
    return make_run(
        W,
        exp_avg=m,
        exp_avg_sq=v,
        lr=np.full(6, 0.01),
        is_dead=np.arange(12) < 5,
        chunks=(2, 5, 4),
    ).assign_attrs(optimizer=ADAM)


def test_counts_of_the_moment_plane(moments_run):
    found = analysis.moment_plane(moments_run, step=5).compute()
    edges = np.append(found.lower, found.upper[-1])
    last = moments_run.isel(step=-1)
    for population, members in (("dead", slice(0, 5)), ("live", slice(5, None))):
        root = np.sqrt(last.exp_avg_sq.values[members].astype(np.float64)).ravel()
        size = abs(last.exp_avg.values[members].astype(np.float64)).ravel()
        expected = np.histogram2d(root, size, (edges, edges))[0]
        np.testing.assert_array_equal(found["count"].sel(population=population), expected)
    assert found.elsewhere.sel(population="dead") == 1
    assert found.elsewhere.sel(population="live") == 0
    assert analysis.moment_plane(moments_run).step == 5


def test_below_the_line_updates_are_less_than_half_a_spacing(moments_run):
    found = analysis.moment_plane(moments_run, step=3).compute()
    line = found.threshold.sel(quantile=0.5)
    assert (found.threshold == line).all()  # all of W is 1.5
    for root, threshold in zip(found.root.values, line.values, strict=True):
        update = 0.01 / (1 - 0.9**3) * threshold / (root / np.sqrt(1 - 0.999**3) + 1e-8)
        np.testing.assert_allclose(update, 2.0**-8)


def test_the_threshold_without_a_learning_rate(moments_run):
    still = moments_run.assign(lr=moments_run.lr * 0)
    assert np.isinf(analysis.moment_plane(still).threshold).all()
    assert np.isnan(analysis.moment_plane(moments_run, step=0).threshold).all()


def test_moment_plane_names_what_is_missing(moments_run):
    with pytest.raises(StepNotFound, match="nearest recorded one is 5"):
        analysis.moment_plane(moments_run, step=9)
    with pytest.raises(VariableNotRecorded, match="exp_avg"):
        analysis.moment_plane(moments_run.drop_vars("exp_avg"))
    hyper = {**ADAM["hyperparameters"], "amsgrad": True}
    with pytest.raises(InvalidArgument, match="amsgrad"):
        analysis.moment_plane(moments_run, optimizer={**ADAM, "hyperparameters": hyper})
