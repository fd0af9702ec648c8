"""Results of a run with changes of W but no W, compared with a run with W."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.analysis.scan import input_checks
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

ROWS, TOKENS, HIDDEN = 14, 6, 5
QUANTITIES: dict[str, Any] = {
    "velocity": analysis.velocity,
    "speed": analysis.speed,
    "acceleration": analysis.acceleration,
    "previous": lambda ds: analysis.displacement(ds, since="previous"),
    "from the start": analysis.displacement,
    "from step 9": lambda ds: analysis.displacement(ds, since=9),
    "freeze": lambda ds: analysis.freeze(ds, min_unchanged=2),
    "bulk_thermal": analysis.bulk_thermal,
    "coherence": analysis.coherence,
    "grad_norms": analysis.grad_norms,
    "together": lambda ds: analysis.compute(ds, ["speed", "freeze", "velocity"]),
    "summary": lambda ds: analysis.summary(ds).drop_vars("centroid_norm", errors="ignore"),
}


def both(start: int = 0) -> tuple[xr.Dataset, xr.Dataset]:
    """A run with W, on a grid on which differences and their sums are exact, and one of delta."""
    rng = np.random.default_rng(0)
    steps = rng.integers(-9, 9, (ROWS, TOKENS, HIDDEN)) / 256
    steps[5:, 0] = 0  # token 0 is unchanged from row 5 on, token 1 for some rows
    steps[3:8, 1] = 0
    W = (1 + np.cumsum(steps, axis=0)).astype("f4")
    dims = ("step", "token", "hidden")
    coords = {
        "step": np.arange(start, start + ROWS), "token": np.arange(TOKENS) * 3,
        "is_dead": ("token", np.arange(TOKENS) % 2 == 0),
    }  # fmt: skip
    grad = xr.DataArray(rng.normal(size=W.shape).astype("f4"), dims=dims)
    delta = np.diff(W, axis=0, prepend=W[:1])
    delta[0] = np.nan  # the change to the first row is not used
    held = {"native_dtype": "float32", "units": "1"}
    one = xr.Dataset({"W": (dims, W, held), "grad": grad}, coords)
    return one, xr.Dataset({"delta": (dims, delta, held), "grad": grad}, coords)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_quantities_of_changes_equal_those_of_W(quantity: str) -> None:
    with_W, changes = both()
    compute = QUANTITIES[quantity]
    expected = compute(with_W).compute()
    xr.testing.assert_identical(compute(changes.chunk(step=4, token=4)).compute(), expected)


def test_quantities_of_changes_are_lazy() -> None:
    _, changes = both()
    for name in ("velocity", "speed", "displacement", "coherence"):
        assert getattr(analysis, name)(changes.chunk(step=4)).chunks is not None


def test_changes_alone_do_not_give_positions() -> None:
    _, changes = both()
    quantities = (
        analysis.centroid, analysis.regimes, analysis.lifecycle, analysis.distinct, analysis.ulp,
        analysis.lattice_displacement, lambda ds: analysis.freeze(ds, lattice="bfloat16"),
    )  # fmt: skip
    for compute in quantities:
        with pytest.raises(
            VariableNotRecorded, match=r"it holds delta, .* only give quantities of motion"
        ):
            compute(changes)


def test_steps_without_a_row_are_refused() -> None:
    _, changes = both()
    for compute in (analysis.speed, analysis.velocity, analysis.freeze, analysis.displacement):
        with pytest.raises(InvalidArgument, match=r"step 0 is followed by step 2; .* consecutive"):
            compute(changes.isel(step=slice(0, None, 2)))
    later = changes.isel(step=slice(3, None))
    assert analysis.speed(later).identical(analysis.speed(changes).isel(step=slice(3, None)))


def test_a_change_that_is_not_a_number_is_motion() -> None:
    _, changes = both()
    changes["delta"][-1, 0, 0] = np.nan
    rest = analysis.freeze(changes)
    assert rest.last_motion.values[0] == changes.step.values[-1]
    assert np.isnan(analysis.displacement(changes).values[-1, 0])


@pytest.mark.parametrize(
    ("missing", "recorded"),
    [
        (["grad"], "weights\\+grads"),
        (["exp_avg", "lr"], "matrix"),
        (["param_norm"], "norms"),
        (["hidden_mean"], "matrix,hidden_mean"),
        (["grad", "hidden_states", "batch"], "weights\\+grads,hidden_states,batch"),
        (["exp_avg", "param_norm"], "matrix,norms"),
    ],
    ids=str,
)
def test_what_to_record(missing, recorded, make_run, walk):
    with pytest.raises(VariableNotRecorded, match=f"; record it with variables='{recorded}'$"):
        input_checks.require_variables(make_run(walk(2, 2, 2)), *missing)


def test_missing_coordinates_have_no_advice_to_record(make_run, walk):
    run = make_run(walk(2, 2, 2))
    with pytest.raises(VariableNotRecorded, match=r"which the run does not hold$"):
        input_checks.require_variables(run, "parameter")
    with pytest.raises(VariableNotRecorded, match="because the imported file does not"):
        input_checks.require_variables(run.assign_attrs(imported={}), "hidden_mean")


@pytest.mark.parametrize(
    ("step", "suffix"),
    [
        (5, "; the nearest recorded ones are 4 and 6$"),
        (9, "; the nearest recorded one is 8$"),
        (-1, "; the nearest recorded one is 0$"),
    ],
)
def test_the_nearest_steps(step, suffix, make_run, walk):
    run = make_run(walk(5, 2, 2), steps=range(0, 10, 2))
    with pytest.raises(StepNotFound, match=f"step {step} is not in the run{suffix}"):
        input_checks.row_of_step(run, step)
    with pytest.raises(StepNotFound, match="which has no rows"):
        input_checks.row_of_step(run.isel(step=slice(0)), step)


def test_statistics_of_each_population(make_run, walk):
    dead = np.array([True, False, False, True, False, True, False])
    ds = make_run(walk(9, 7, 4), grad=walk(9, 7, 4, 2), is_dead=dead)
    norms = analysis.grad_norms(ds)
    values = norms.values.astype(np.float64)
    for chunked in (norms, norms.chunk(step=2, token=3), norms.compute()):
        got = analysis.by_population(chunked, quantiles=(0.1, 0.9)).compute()
        for name, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
            one, chosen = got.sel(population=name), values[:, members]
            np.testing.assert_allclose(one["mean"], chosen.mean(1))
            np.testing.assert_allclose(one["std"], chosen.std(1))
            np.testing.assert_array_equal(one["min"], chosen.min(1))
            np.testing.assert_array_equal(one["max"], chosen.max(1))
            np.testing.assert_allclose(one["median"], np.median(chosen, axis=1))
            expected = np.quantile(chosen, [0.1, 0.9], axis=1).T
            np.testing.assert_allclose(one["quantiles"], expected)
    assert got["mean"].attrs["units"] == "1"


def test_a_nan_spoils_its_population_and_an_empty_one_is_nan(make_run, walk):
    ds = make_run(walk(3, 4, 2), is_dead=np.array([True, True, True, True]))
    norms = analysis.displacement(ds)
    norms[1, 2] = np.nan
    got = analysis.by_population(norms)
    assert got["max"].sel(population="live").isnull().all()
    for name in ("mean", "std", "min", "max", "median"):
        assert got[name].sel(population="dead").isnull().values.tolist() == [False, True, False]


def test_mostly_dead_tokens_are_a_population_of_their_own(make_run, walk):
    count = np.array([0, 1, 3, 4, 900, -1])  # -1 means unknown
    rare = np.array([False, True, True, False, False, False])
    ds = make_run(walk(5, 6, 3), is_dead=count == 0).assign_coords(token_count=("token", count))
    ds = ds.chunk(step=2, token=4)
    reported = ds.assign_attrs(config={"data": {"mostly_dead": 3}})
    counts = analysis.regimes(reported).counts.sum("regime_name").compute()
    assert counts.population.values.tolist() == ["dead", "live", "all", "mostly_dead"]
    np.testing.assert_array_equal(counts, [[1, 5, 6, 2]] * 4)
    moved = analysis.regimes(ds).regime.values != 0
    still = analysis.freeze(reported).unchanged_fraction.sel(population="mostly_dead")
    np.testing.assert_allclose(still, 1 - moved[:, rare].mean(1))
    way = analysis.displacement(reported)
    mean = analysis.by_population(way)["mean"].sel(population="mostly_dead")
    np.testing.assert_allclose(mean, way.values[:, rare].astype(float).mean(1))
    centre = analysis.centroid(reported, "mostly_dead").centroid.values
    np.testing.assert_allclose(centre, ds.W.values[:, rare].astype(float).mean(1))
    for config in (None, {}, {"data": {}}, {"data": {"mostly_dead": None}}, "text"):
        plain = ds.assign_attrs(config=config)
        assert "mostly_dead" not in analysis.regimes(plain).population
    with pytest.raises(InvalidArgument, match="expected dead, live, all, mostly_dead"):
        analysis.centroid(reported, "undead")


def test_statistics_require_populations_and_tokens(make_run, walk):
    ds = make_run(walk(3, 4, 2))
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        analysis.by_population(analysis.displacement(ds))
    with pytest.raises(InvalidArgument, match="expected token"):
        analysis.by_population(ds.step)
    with pytest.raises(InvalidArgument, match="quantiles"):
        analysis.by_population(analysis.displacement(ds), quantiles=(2,))
