from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis

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


def test_lost_update_has_a_gradient(make_run, walk):
    rng = np.random.default_rng(0)
    shape = (10, 6, 4)
    W = walk(1, 6, 4).repeat(10, 0)
    tiny = rng.normal(0, 1e-3, shape).astype(np.float32)
    ds = make_run(
        W, grad=tiny, exp_avg=tiny, exp_avg_sq=tiny**2 + 1, lr=np.full(10, 1e-3)
    ).assign_attrs(optimizer=ADAM)
    cause = analysis.freeze_cause(ds)
    assert (cause == analysis.CAUSES.index("lost_update")).all()
    assert (analysis.grad_norms(ds) > 0).all()
    assert (abs(analysis.adam_update(ds).adam_update_ulp) <= 0.5).all()
