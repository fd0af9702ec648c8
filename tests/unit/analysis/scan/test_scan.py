"""Runs with changes but no W, advice on what to record, and statistics of populations."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.analysis.scan import input_checks
from trajstore.analysis.several_quantities import QUANTITIES
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

ROWS, TOKENS, HIDDEN = 14, 6, 5


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


OF_MOTION = (
    "velocity speed acceleration displacement freeze bulk_thermal coherence discontinuities "
    "crossings grad_norms"
).split()


def test_quantities_of_changes_equal_those_of_W_and_changes_give_no_positions() -> None:
    with_W, changes = both()
    changes = changes.chunk(step=4, token=4)
    found, refusals = {}, []
    for name in QUANTITIES:
        quantity = getattr(analysis, name)
        try:
            found[name] = quantity(changes), quantity(with_W)
        except VariableNotRecorded as error:
            refusals.append(str(error))
    assert set(found) == set(OF_MOTION)
    advice = "it holds delta, the changes of W, which only give quantities of motion"
    assert all(advice in refusal for refusal in refusals if "requires W" in refusal)
    assert found["velocity"][0].chunks is not None, "lazy"
    for name, quantity in {
        "previous": lambda ds: analysis.displacement(ds, since="previous"),
        "from step 9": lambda ds: analysis.displacement(ds, since=9),
        "rest": lambda ds: analysis.freeze(ds, min_unchanged=2),
        "together": lambda ds: analysis.compute(ds, ["speed", "freeze", "velocity"]),
        "summary": lambda ds: analysis.summary(ds).drop_vars("centroid_norm", errors="ignore"),
    }.items():
        found[name] = quantity(changes), quantity(with_W)
    for of_changes, expected in found.values():
        xr.testing.assert_identical(of_changes.compute(), expected.compute())
    with pytest.raises(VariableNotRecorded):
        analysis.freeze(changes, lattice="bfloat16")


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
    ("missing", "attrs", "advice"),
    [
        (["grad"], {}, r"; record it with variables='weights\+grads'$"),
        (["exp_avg", "lr"], {}, "; record it with variables='matrix'$"),
        (["hidden_mean"], {}, "; record it with variables='matrix,hidden_mean'$"),
        (["grad", "hidden_states", "batch"], {}, r"='weights\+grads,hidden_states,batch'$"),
        (["exp_avg", "param_norm"], {}, "; record it with variables='matrix,norms'$"),
        (["param_norm"], {}, "; record it with variables='norms'$"),
        (["parameter"], {}, "which the run does not hold$"),
        (["hidden_mean"], {"imported": {}}, "because the imported file does not"),
        (["lr"], {"imported": {}}, "; assign the rate of each step"),
    ],
    ids=str,
)
def test_what_to_record(missing, attrs, advice, make_run, walk):
    run = make_run(walk(2, 2, 2)).assign_attrs(attrs)
    with pytest.raises(VariableNotRecorded, match=advice):
        input_checks.require_variables(run, *missing)


@pytest.mark.parametrize(
    ("rows", "step", "advice"),
    [
        (5, 5, "; the nearest recorded ones are 4 and 6$"),
        (5, 9, "; the nearest recorded one is 8$"),
        (5, -1, "; the nearest recorded one is 0$"),
        (0, 5, "which has no rows"),
    ],
)
def test_the_nearest_steps(rows, step, advice, make_run, walk):
    run = make_run(walk(5, 2, 2), steps=range(0, 10, 2)).isel(step=slice(rows))
    with pytest.raises(StepNotFound, match=f"step {step} is not in the run.*{advice}"):
        input_checks.row_of_step(run, step)


def test_statistics_of_each_population(make_run, walk):
    dead = np.array([True, False, False, True, False, True, False])
    norms = analysis.displacement(make_run(walk(9, 7, 4), is_dead=dead)).compute()
    norms[1, 0] = np.nan  # it spoils its populations
    values = norms.values.astype(np.float64)
    for chunked in (norms, norms.chunk(step=2, token=3)):
        got = analysis.by_population(chunked, quantiles=(0.1, 0.9)).compute()
        for name, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
            one, chosen = got.sel(population=name), values[:, members]
            for fact in ("mean", "std", "min", "max", "median"):
                np.testing.assert_allclose(one[fact], getattr(np, fact)(chosen, axis=1))
            expected = np.quantile(chosen, [0.1, 0.9], axis=1).T
            np.testing.assert_allclose(one["quantiles"], expected)
    assert got["mean"].attrs["units"] == "1"
    alone = analysis.by_population(norms.isel(token=dead))
    assert alone.sel(population="live").isnull().all().to_array().all()


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
    norms = analysis.displacement(make_run(walk(3, 4, 2)))
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        analysis.by_population(norms)
    with pytest.raises(InvalidArgument, match="expected token"):
        analysis.by_population(norms.step)
    with pytest.raises(InvalidArgument, match="quantiles"):
        analysis.by_population(norms, quantiles=(2,))
