"""Causes of frozen weights, sizes of moments, and updates that rounding lost."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import parameter_table

from trajstore import analysis
from trajstore.analysis.optimizer.lost_updates import lost_by_parameter
from trajstore.analysis.optimizer.moment_sizes import CLASSES, quantiles_of_counts, ratio_classes
from trajstore.errors import InvalidArgument, StepNotFound

ADAM = {
    "class": "torch.optim.adam.Adam",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0},
}
OTHER_BETAS = {**ADAM, "hyperparameters": {**ADAM["hyperparameters"], "betas": [0.8, 0.9]}}
HIDDEN = 3


@pytest.fixture
def story(make_run):
    """Seven steps of five tokens with known causes; everything is exact in bfloat16."""
    rows, tokens = 8, 5
    shape = (rows, tokens, HIDDEN)
    W = np.ones(shape, np.float32)
    grad = np.full(shape, 2.0**-10, np.float32)
    exp_avg = np.full(shape, 2.0**-10, np.float32)
    exp_avg += (np.arange(rows) * 2.0**-16)[:, None, None]  # the state changes at every step
    exp_avg_sq = np.full(shape, 2.0**-10, np.float32)
    lr = np.full(rows, 1e-6)
    W[1:, 0] = 1 - np.arange(1, rows)[:, None] * 2.0**-7  # token 0 moves
    for array in (grad, exp_avg, exp_avg_sq):
        array[:, 1] = 0  # token 1 has no gradient
    lr[3] = 0  # step 3 has no learning rate
    for array in (exp_avg, exp_avg_sq):
        array[5] = array[4]  # step 5 changes no state, although there are gradients
    W[5] = W[4]
    exp_avg[:, 3] = 1  # token 3 should have moved, and was reset
    exp_avg_sq[:, 3] = 0
    grad[:, 4, 1] = np.nan  # a NaN gradient is a gradient
    grad[0] = np.nan
    ds = make_run(W, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, lr=lr)
    return ds.assign_attrs(optimizer=ADAM)


def test_every_cause_is_found(story):
    got = analysis.freeze_cause(story.chunk(step=3, token=2))
    names = np.array(got.attrs["flag_meanings"].split())
    assert names.tolist() == list(analysis.CAUSES)
    found = names[got.values]
    expected = np.empty(found.shape, "<U13")
    expected[:, 0] = "moved"
    expected[:, 1] = "no_gradient"
    expected[:, 2] = expected[:, 4] = "lost_update"
    expected[:, 3] = "unexplained"
    expected[2, [2, 3, 4]] = "learning_rate"
    expected[4, [0, 2, 3, 4]] = "skipped"
    np.testing.assert_array_equal(found, expected)
    after_a_gap = analysis.freeze_cause(story.isel(step=[0, 2, 3])).sel(token=6).values
    assert names[after_a_gap].tolist() == ["unexplained", "learning_rate"]


def test_what_moves_within_its_cell_is_below_cell(story):
    W = story.W.values.copy()
    W[1:, 0] = 1 + np.arange(1, 8)[:, None] * np.float32(2.0**-10)  # two cells of 2^-7 in the end
    W[1:, 2, 1] += np.arange(1, 8) * np.float32(2.0**-20)  # always the same cell
    W[1:, 1, 0] = -0.0  # a token at zero: its sign is no motion
    W[:, 1, 1:] = W[0, 1, 1:]
    W[0, 1, 0] = 0
    ds = story.assign(W=(story.W.dims, W, story.W.attrs | {"native_dtype": "float32"}))
    ds = ds.chunk(step=3, token=2)
    names = np.array(analysis.CAUSES)
    own = names[analysis.freeze_cause(ds).values]
    got = analysis.freeze_cause(ds, lattice="bfloat16")
    assert got.attrs["lattice"] == "bfloat16"
    found = names[got.values]
    cell = (W.view(np.uint32) + 0x7FFF + ((W.view(np.uint32) >> 16) & 1)) >> 16 & 0x7FFF
    cell_moved = (cell[1:] != cell[:-1]).any(-1)
    expected = np.where(cell_moved, "moved", np.where(own == "moved", "below_cell", own))
    np.testing.assert_array_equal(found, expected)
    assert {"moved", "below_cell"} <= set(found[:, 0])
    assert (found[:, 2] == "below_cell").all()
    assert (found[:, 1] == "no_gradient").all()
    assert "below_cell" not in own


def test_moment_sizes_equal_a_plain_computation(make_run, walk):
    rng = np.random.default_rng(1)
    shape = (9, 5, 4)
    m, v = rng.normal(size=shape).astype("f4"), rng.random(shape).astype("f4")
    m[:, 1, 2] = v[:, 1, 2] = 0
    m[:, 3] = v[:, 3] = m[0] = v[0] = 0
    ds = make_run(walk(*shape), exp_avg=m, exp_avg_sq=v, chunks=(4, 2, 3))
    ds = ds.isel(step=[0, 1, 2, 4, 7]).assign_attrs(optimizer=OTHER_BETAS)
    t = ds.step.values[1:, None, None]
    size = np.abs(ds.exp_avg.values[1:].astype(float)) / (1 - 0.8**t)
    root = np.sqrt(ds.exp_avg_sq.values[1:].astype(float) / (1 - 0.9**t))
    got = analysis.moment_sizes(ds).compute()
    np.testing.assert_allclose(got.first_moment_size[1:], size.mean(-1))
    np.testing.assert_allclose(got.second_moment_root[1:], root.mean(-1))
    with np.errstate(invalid="ignore"):
        ratio = size / root
    np.testing.assert_allclose(
        got.moment_ratio[1:, [0, 1, 2, 4]], np.nanmean(ratio[:, [0, 1, 2, 4]], -1)
    )
    assert got.moment_ratio[1:, 3].isnull().all()
    assert all(got[name][0].isnull().all() for name in got)


def test_skipped_steps_do_not_count(make_run, walk):
    m = np.ones((5, 2, 3), "f4")
    ds = make_run(walk(5, 2, 3), exp_avg=m, exp_avg_sq=m).assign_attrs(optimizer=OTHER_BETAS)
    ds["skipped"] = "step", np.array([np.nan, 0, 1, 1, 0], "f4")
    got = analysis.moment_sizes(ds).first_moment_size
    expected = 1 / (1 - 0.8 ** np.array([1, 1, 1, 2]))
    np.testing.assert_allclose(got[1:], np.repeat(expected[:, None], 2, 1))
    for part in (slice(1, None), slice(None, None, 2)):
        with pytest.raises(InvalidArgument, match="moment_sizes requires"):
            analysis.moment_sizes(ds.isel(step=part))


LEVELS = np.array([0, 0.05, 0.5, 0.95, 1])


def counted(ratios: np.ndarray) -> np.ndarray:
    return np.bincount(ratio_classes(ratios), minlength=CLASSES)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("spread", [1e-6, 1e-2, 1e5])
def test_quantiles_are_right_to_a_part_of_their_distance_from_1(spread, size):
    ratios = 1 + spread * np.random.default_rng(0).standard_normal(size)
    got = quantiles_of_counts(counted(ratios), LEVELS) - 1
    expected = np.quantile(ratios - 1, LEVELS, method="lower")
    np.testing.assert_allclose(got, expected, rtol=1 / 32, atol=2.0**-24)


def test_classes_are_in_the_order_of_the_ratios():
    ratios = np.array([-np.inf, -1e9, -5, 0, 0.5, 1 - 2e-7, 1, 1 + 2e-7, 1.01, 30, 1e6, np.inf])
    found = ratio_classes(ratios)
    assert (np.diff(found) >= 0).all()
    assert found.min() == 0
    assert ratio_classes(np.array([np.nan])) == CLASSES - 1
    assert found.max() < CLASSES - 1
    representatives = [
        float(quantiles_of_counts(counted(np.array([r])), np.array([0.5]))[0]) for r in ratios
    ]
    assert representatives[0] == representatives[1] == -np.inf
    assert representatives[6] == 1
    assert representatives[-1] == np.inf


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


def test_every_step_against_a_count_of_elements(run):
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
            wanted = grad[row] != 0
            skipped = entry["name"] == "bias" and row == 4
            known = wanted.any() and ds.params_lr.values[row, 0] and entry["name"] != "fixed"
            stays = W[row - 1][wanted] == W[row][wanted]
            expected = stays.mean() if known and not skipped else np.nan
            np.testing.assert_equal(found.values[row - 1, number], expected)
    assert 0 < found.sel(parameter="a").mean() < 1
    assert lost_by_parameter(run.isel(step=[0, 2]), [1]).isnull().all(), "after a gap"


def test_the_summary_has_it_for_whole_runs_only(run):
    found = analysis.summary(run).param_update_lost
    assert found.dims == ("when", "parameter")
    np.testing.assert_array_equal(found, lost_by_parameter(run, [1, ROWS - 1]))
    assert "param_update_lost" not in analysis.summary(run.isel(token=slice(3)))


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
    assert found.elsewhere.sel(population=["dead", "live"]).values.tolist() == [1, 0]
    assert analysis.moment_plane(moments_run).step == 5
    with pytest.raises(StepNotFound, match="nearest recorded one is 5"):
        analysis.moment_plane(moments_run, step=9)


def test_below_the_line_updates_are_less_than_half_a_spacing(moments_run):
    found = analysis.moment_plane(moments_run, step=3).compute()
    line = found.threshold.sel(quantile=0.5)
    assert (found.threshold == line).all()  # all of W is 1.5
    update = 0.01 / (1 - 0.9**3) * line.values / (found.root / np.sqrt(1 - 0.999**3) + 1e-8)
    np.testing.assert_allclose(update, 2.0**-8)
    still = moments_run.assign(lr=moments_run.lr * 0)
    assert np.isinf(analysis.moment_plane(still).threshold).all()
    assert np.isnan(analysis.moment_plane(moments_run, step=0).threshold).all()
