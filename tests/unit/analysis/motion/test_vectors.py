from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

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
    answered = compute_named(run, ["clusters"], ["population=live"], vectors="grad").compute()
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
        compute_named(run, ["speed"], vectors="hidden_means")
    with pytest.raises(InvalidArgument, match="population='dead' for grad"):
        run.traj.vectors("grad", "dead")
    with pytest.raises(InvalidArgument, match="population='undead'"):
        run.traj.vectors("centroid", "undead")
    with pytest.raises(VariableNotRecorded, match="exp_avg"):
        run.traj.vectors("exp_avg")
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        run.drop_vars("hidden_mean").traj.vectors("hidden_mean")


def norm(vectors: np.ndarray, order: float = 2) -> np.ndarray:
    """The direct computation in float64."""
    with np.errstate(all="ignore"):
        wide = np.abs(vectors.astype(np.float64))
        if order == 2:
            return np.sqrt((wide**2).sum(-1)).astype(np.float32)
        return (wide.sum(-1) if order == 1 else wide.max(-1)).astype(np.float32)


@pytest.mark.parametrize("order", [1, 2, np.inf])
def test_gradient_norms(bits, chunks, order, make_run):
    ds = make_run(bits, grad=bits, chunks=chunks)
    got = analysis.grad_norms(ds, ord=order)
    assert got.name == "grad_norms"
    assert got.chunks is not None, "lazy"
    assert got.dims == ("step", "token")
    assert got.dtype == np.float32
    assert got.token.values.tolist() == ds.token.values.tolist()
    np.testing.assert_array_equal(got, norm(ds.grad.values, order))


def test_displacement_from_a_step(bits, chunks, make_run):
    steps = np.arange(len(bits)) ** 2 + 3
    ds = make_run(bits, steps=steps, chunks=chunks)
    row = len(bits) // 2
    got = analysis.displacement(ds, since=int(steps[row]))
    W = ds.W.values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, norm(W - W[row]))
    assert got.step.values.tolist() == steps.tolist()


def test_displacement_from_the_previous_row(bits, chunks, make_run):
    ds = make_run(bits, chunks=chunks)
    got = analysis.displacement(ds, since="previous")
    with np.errstate(invalid="ignore"):
        expected = norm(np.diff(ds.W.values.astype(np.float64), axis=0))
    np.testing.assert_array_equal(got, expected)
    assert got.step.values.tolist() == ds.step.values[1:].tolist()


def test_other_types(make_run, walk):
    values = np.random.default_rng(0).normal(size=(6, 5, 4))
    for name in ("float16", "float32"):
        stored = values.astype(name).astype(np.float32)
        ds = make_run(stored, grad=stored, native=name)
        np.testing.assert_array_equal(analysis.grad_norms(ds), norm(stored))
    ds = make_run(values, grad=values, native="float64")
    got = analysis.grad_norms(ds)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, np.linalg.norm(values, axis=-1), rtol=1e-15)


def test_a_stored_summary_is_used_and_agrees_to_the_last_bit(make_run, walk):
    ds = make_run(walk(20, 6, 8), grad=walk(20, 6, 8, 1))
    computed = analysis.grad_norms(ds).compute()
    with_stored = ds.assign(grad_token_norm=computed.rename("grad_token_norm"))
    xr.testing.assert_identical(analysis.grad_norms(with_stored).compute(), computed)
    # Without gradients, only the stored norms remain.
    xr.testing.assert_identical(
        analysis.grad_norms(with_stored.drop_vars("grad")).compute(), computed
    )
    with pytest.raises(VariableNotRecorded, match="grad"):
        analysis.grad_norms(with_stored.drop_vars("grad"), ord=1)


def test_a_stored_way_is_not_used_where_rows_are_left_out(make_run, walk):
    ds = make_run(walk(21, 6, 8))
    way = analysis.displacement(ds, since="previous").reindex(step=ds.step)
    stored = ds.assign(W_step_norm=way.astype(np.float32))
    for rows in (slice(None), slice(4, 9), slice(None, None, 5), [0, 3, 4, 11]):
        expected = analysis.displacement(ds.isel(step=rows), since="previous")
        got = analysis.displacement(stored.isel(step=rows), since="previous")
        xr.testing.assert_identical(got.compute(), expected.compute())
    only_stored = stored.drop_vars("W").sel(step=slice(3, 9))
    np.testing.assert_array_equal(
        analysis.displacement(only_stored, since="previous"), way.sel(step=slice(4, 9))
    )


def test_wrong_steps_orders_and_dimensions_are_refused(make_run, walk):
    ds = make_run(walk(6, 3, 4), steps=np.arange(6) * 10)
    with pytest.raises(StepNotFound):
        analysis.displacement(ds, since=24)
    with pytest.raises(InvalidArgument, match="'yesterday'"):
        analysis.displacement(ds, since="yesterday")
    with pytest.raises(InvalidArgument, match="order 3"):
        analysis.grad_norms(ds.assign(grad=ds.W), ord=3)
    with pytest.raises(InvalidArgument, match="do not increase"):
        analysis.displacement(ds.isel(step=[0, 2, 1]))
    with pytest.raises(InvalidArgument, match="token, hidden, expected step"):
        analysis.displacement(ds.assign(W=ds.W.isel(step=0, drop=True)))


@pytest.mark.filterwarnings("error")
def test_motion_at_irregular_steps(bits, chunks, make_run):
    steps = np.cumsum(1 + np.arange(len(bits)) % 4)
    ds = make_run(bits, steps=steps, chunks=chunks)
    with np.errstate(all="ignore"):
        expected = np.diff(ds.W.values.astype(np.float64), axis=0) / np.diff(steps)[:, None, None]
        lengths = np.sqrt((expected**2).sum(-1)).astype(np.float32)
        changes = np.diff(expected, axis=0).astype(np.float32)
        velocity = analysis.velocity(ds)
        np.testing.assert_array_equal(velocity, expected.astype(np.float32))
    assert velocity.attrs["units"] == "1 per step"
    assert velocity.step.values.tolist() == steps[1:].tolist()
    speed = analysis.speed(ds).values
    assert speed.dtype == np.float32
    np.testing.assert_allclose(speed, lengths, rtol=3e-7)
    acceleration = analysis.acceleration(ds)
    np.testing.assert_array_equal(acceleration, changes)
    assert acceleration.step.values.tolist() == steps[2:].tolist()
