from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.analysis.optimizer.moment_sizes import CLASSES, quantiles_of_counts, ratio_classes
from trajstore.errors import InvalidArgument

ADAM = {
    "class": "torch.optim.adam.Adam",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0},
}
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


def test_a_row_after_a_gap_cannot_be_explained(story):
    names = np.array(analysis.CAUSES)
    found = names[analysis.freeze_cause(story.isel(step=[0, 2, 3])).sel(token=6).values]
    assert found.tolist() == ["unexplained", "learning_rate"]


ADAM = {
    "class": "torch.optim.adam.Adam",
    "hyperparameters": {"betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.0},
}


def test_moment_sizes_equal_a_plain_computation(make_run, walk):
    rng = np.random.default_rng(1)
    shape = (9, 5, 4)
    m, v = rng.normal(size=shape).astype("f4"), rng.random(shape).astype("f4")
    m[:, 1, 2] = v[:, 1, 2] = 0
    m[:, 3] = v[:, 3] = m[0] = v[0] = 0
    ds = make_run(walk(*shape), exp_avg=m, exp_avg_sq=v, chunks=(4, 2, 3))
    ds = ds.isel(step=[0, 1, 2, 4, 7]).assign_attrs(optimizer=ADAM)
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
    ds = make_run(walk(5, 2, 3), exp_avg=m, exp_avg_sq=m).assign_attrs(optimizer=ADAM)
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


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("spread", [1e-6, 1e-2, 1.0, 1e5])
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
