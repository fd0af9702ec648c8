from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis

ROWS = 200


def history(kick: float = 0.0, at: int = 100, seed: int = 0, freeze: bool = True) -> np.ndarray:
    """Random walk whose pace decays to zero, with a kick that also decays."""
    rng = np.random.default_rng(seed)
    rows = np.arange(1, ROWS)
    pace = 1e-3 * np.exp(-rows / 20) if freeze else np.full(ROWS - 1, 1e-3)
    pace = pace + np.where(rows >= at, kick * np.exp(-(rows - at) / 8), 0)
    W = np.zeros((ROWS, 40, 8), np.float32)
    W[1:] = np.cumsum(pace[:, None, None] * rng.normal(size=(ROWS - 1, 40, 8)), axis=0)
    return W


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("freeze", [True, False])
def test_a_clean_run_has_no_discontinuity(seed, freeze, make_run):
    ds = make_run(history(seed=seed, freeze=freeze), native="float32")
    got = analysis.discontinuities(ds).compute()
    assert not got.discontinuity.any()
    assert abs(got.discontinuity_score).max() < 5


@pytest.mark.parametrize("at", [20, 100, 150, ROWS - 3])
def test_a_bad_checkpoint_is_found_where_it_is(at, make_run):
    ds = make_run(history(kick=5e-4, at=at), native="float32", chunks=(17, 9, -1))
    got = analysis.discontinuities(ds).compute()
    assert got.step.values[got.discontinuity.values].tolist() == [at]


def test_a_step_that_was_lost_is_found(make_run):
    W = history(freeze=False)
    W[120:] += W[40] - W[100]  # the state jumps back
    got = analysis.discontinuities(make_run(W, native="float32")).compute()
    assert 120 in got.step.values[got.discontinuity.values]


def test_one_moving_element_is_no_discontinuity(make_run):
    W = history()
    W[100:] = W[99]
    W[150:, 0, 0] += 1e-6
    got = analysis.discontinuities(make_run(W, native="float32")).compute()
    assert 150 not in got.step.values[got.discontinuity.values]
    still = make_run(np.ones((30, 4, 2), np.float32), native="float32")
    assert not analysis.discontinuities(still).discontinuity.any()


def test_a_mean_of_nan_is_a_discontinuity_where_it_begins(make_run):
    W = history(freeze=False)
    W[90:, 3] = np.nan
    got = analysis.discontinuities(make_run(W, native="float32")).compute()
    assert got.step.values[got.discontinuity.values].tolist() == [90]


def test_few_rows_are_no_neighborhood(make_run, walk):
    assert analysis.discontinuities(make_run(walk(4, 3, 2))).discontinuity_score.isnull().all()
