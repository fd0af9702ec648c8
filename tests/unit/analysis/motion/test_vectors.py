from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.analysis.registry import answer
from trajstore.errors import InvalidArgument, VariableNotRecorded

DEAD = np.array([True, False, True, True, False, False])


@pytest.fixture
def run(make_run, walk):
    bits = walk(9, 6, 4)
    bits[2:, 3] = bits[2:, 0]  # two dead tokens share a vector from row 2 on
    bits[5:, 2] = bits[5:, 0]
    rng = np.random.default_rng(7)
    grad = rng.normal(size=bits.shape).astype("f4")
    grad[:, 4] = grad[:, 1]
    grad[0] = np.nan
    mean = rng.normal(size=(9, 4)).astype("f4")
    mean[0] = np.nan
    ds = make_run(bits, grad=grad, is_dead=DEAD, chunks=(4, 3, -1))
    ds.grad.attrs["native_dtype"] = "float32"
    return ds.assign(hidden_mean=(("step", "hidden"), mean, {"units": "1"}))


def test_the_mean_state_has_every_quantity_of_a_path(run):
    x = run.hidden_mean.values[1:].astype(np.float64)
    steps = np.diff(x, axis=0)
    mean = analysis.vectors(run, "hidden_mean")
    assert mean.step.values.tolist() == list(range(1, 9))
    found = analysis.autocorrelation(mean, [1, 3]).compute()
    mine = [(steps[:-lag] * steps[lag:]).sum(-1).mean() for lag in (1, 3)]
    expected = np.array(mine) / (steps**2).sum(-1).mean()
    np.testing.assert_allclose(found.autocorrelation.sel(population="hidden_mean"), expected)
    lengths = np.linalg.norm(steps, axis=-1)
    path = analysis.path_efficiency(mean)
    np.testing.assert_allclose(path.path_length.squeeze(), lengths.sum())
    turns = analysis.alignment(mean, "previous", "delta").cosine.squeeze()
    expected = (steps[1:] * steps[:-1]).sum(-1) / lengths[1:] / lengths[:-1]
    np.testing.assert_allclose(turns[2:], expected)


def test_the_centroid_of_each_population_has_a_path(run):
    W = run.W.values.astype(np.float64)
    for population, members in {None: (DEAD, ~DEAD), "all": (DEAD | True,)}.items():
        found = analysis.vectors(run, "centroid", population)
        for number, group in enumerate(members):
            np.testing.assert_allclose(found.W[:, number], W[:, group].mean(1), rtol=1e-12)
    centroids = analysis.vectors(run, "centroid")
    assert centroids.token_text.values.tolist() == ["dead", "live"]
    assert centroids.is_dead.values.tolist() == [True, False]


def test_the_largest_cluster_has_a_path(run):
    found = analysis.vectors(run, "largest_cluster").W.values
    assert np.isnan(found[:2, 0]).all()
    np.testing.assert_array_equal(found[2:, 0], run.W.values[2:, 0])
    assert np.isnan(found[:, 1]).all()


def test_gradients_have_clusters_and_neighbors(run):
    answered = answer(run, ["clusters"], ["population=live"], vectors="grad").compute()
    assert answered.groups.values.tolist() == [1] * 8
    near = analysis.nearest_distance(analysis.vectors(run, "grad"), "live").compute()
    grad = run.grad.values[1:].astype(np.float64)
    expected = np.linalg.norm(grad[:, 1] - grad[:, 5], axis=-1)
    for token in (1, 4, 5):
        np.testing.assert_allclose(near.nearest_distance[:, token], expected)


def test_changes_are_computed_if_they_are_not_recorded(run):
    found = analysis.vectors(run, "delta")
    assert found.step.values.tolist() == list(range(1, 9))
    np.testing.assert_array_equal(found.W, np.diff(run.W.values.astype(np.float64), axis=0))


def test_invalid_vectors(run):
    with pytest.raises(InvalidArgument, match=r"vectors='hidden_means'.*'hidden_mean'"):
        answer(run, ["speed"], vectors="hidden_means")
    with pytest.raises(InvalidArgument, match="population='dead' for grad"):
        run.traj.vectors("grad", "dead")
    with pytest.raises(InvalidArgument, match="population='undead'"):
        run.traj.vectors("centroid", "undead")
    with pytest.raises(VariableNotRecorded, match="exp_avg"):
        run.traj.vectors("exp_avg")
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        run.drop_vars("hidden_mean").traj.vectors("hidden_mean")
