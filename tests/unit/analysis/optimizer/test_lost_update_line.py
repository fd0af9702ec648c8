"""The plane of the moments, and motion on both sides of the line."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

ADAM = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}


@pytest.fixture
def run(make_run):
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


def test_counts_of_the_moment_plane(run):
    found = analysis.moment_plane(run, step=5).compute()
    edges = np.append(found.lower, found.upper[-1])
    last = run.isel(step=-1)
    for population, members in (("dead", slice(0, 5)), ("live", slice(5, None))):
        root = np.sqrt(last.exp_avg_sq.values[members].astype(np.float64)).ravel()
        size = abs(last.exp_avg.values[members].astype(np.float64)).ravel()
        expected = np.histogram2d(root, size, (edges, edges))[0]
        np.testing.assert_array_equal(found["count"].sel(population=population), expected)
    assert found.elsewhere.sel(population="dead") == 1
    assert found.elsewhere.sel(population="live") == 0
    assert analysis.moment_plane(run).step == 5


def test_below_the_line_updates_are_less_than_half_a_spacing(run):
    found = analysis.moment_plane(run, step=3).compute()
    line = found.threshold.sel(quantile=0.5)
    assert (found.threshold == line).all()  # all of W is 1.5
    for root, threshold in zip(found.root.values, line.values, strict=True):
        update = 0.01 / (1 - 0.9**3) * threshold / (root / np.sqrt(1 - 0.999**3) + 1e-8)
        np.testing.assert_allclose(update, 2.0**-8)


def test_the_threshold_without_a_learning_rate(run):
    still = run.assign(lr=run.lr * 0)
    assert np.isinf(analysis.moment_plane(still).threshold).all()
    assert np.isnan(analysis.moment_plane(run, step=0).threshold).all()


def test_moment_plane_names_what_is_missing(run):
    with pytest.raises(StepNotFound, match="nearest recorded one is 5"):
        analysis.moment_plane(run, step=9)
    with pytest.raises(VariableNotRecorded, match="exp_avg"):
        analysis.moment_plane(run.drop_vars("exp_avg"))
    hyper = {**ADAM["hyperparameters"], "amsgrad": True}
    with pytest.raises(InvalidArgument, match="amsgrad"):
        analysis.moment_plane(run, optimizer={**ADAM, "hyperparameters": hyper})
