from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from example_run import write_example_run
from watched_runs import begin, extend

from trajstore import analysis, open_run
from trajstore.analysis.exploring import run_history
from trajstore.analysis.exploring.run_history import grown, prepare
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    write_example_run(path)
    return open_run(path)


@pytest.fixture(autouse=True)
def short_min_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs that are shorter than the default."""
    monkeypatch.setattr(run_history, "MIN_UNCHANGED", 3)


def check_against_analysis(history: run_history.RunHistory, ds: xr.Dataset) -> None:
    """Everything but the positions, whose plane may be of fewer rows."""
    rest = analysis.freeze(ds, run_history.MIN_UNCHANGED).compute()
    assert np.array_equal(history.steps, ds["step"])
    assert np.array_equal(history.regime, analysis.regimes(ds)["regime"])
    assert np.array_equal(history.last_motion, rest["last_motion"])
    assert np.array_equal(history.moves, rest["moves"])
    layers = analysis.heatmap(ds).compute()
    assert history.layers.drop_attrs().identical(layers.drop_attrs())
    curves, shown = history.curves, history.populations
    for name, source in (("unchanged", "unchanged_fraction"), ("frozen", "frozen_fraction")):
        found = curves[name].isel(step=slice(1, None))
        assert np.array_equal(found, rest[source].sel(population=shown))
    np.testing.assert_array_equal(curves["loss"], ds["loss"])
    for name, values in (
        ("gradient", analysis.grad_norms(ds)),
        ("displacement", analysis.displacement(ds)),
    ):
        table = analysis.by_population(values, (0.05, 0.95)).sel(population=shown)
        found = curves[name].transpose("step", "population", "statistic")
        np.testing.assert_array_equal(found[..., 0], table["mean"])
        np.testing.assert_array_equal(found[..., 1:], table["quantiles"])


def test_what_is_held_is_what_the_analysis_finds(ds: xr.Dataset) -> None:
    history = prepare(ds)
    check_against_analysis(history, ds)
    assert np.array_equal(history.cause, analysis.freeze_cause(ds))
    found = analysis.pca(ds, components=2).compute()
    np.testing.assert_allclose(history.position, found["scores"], atol=1e-6)
    np.testing.assert_allclose(history.plane["share"].sum(), 1)
    assert (history.every, history.rows, history.unknown) == (1, 21, {})
    assert history.nbytes > history.position.nbytes == 21 * 128 * 8
    order = np.argsort(history.last_motion.values, kind="stable")
    assert [history.rank(at) for at in order[:3]] == [0, 1, 2]


@pytest.mark.parametrize("rows", [11, 12])
def test_new_rows_come_to_those_that_are_held(ds: xr.Dataset, rows: int) -> None:
    first = prepare(ds.isel(step=slice(rows)))
    history = grown(first, ds)
    check_against_analysis(history, ds)
    assert np.array_equal(history.cause, analysis.freeze_cause(ds))
    assert history.plane is first.plane
    W = ds["W"].values.astype(np.float64)
    wanted = (W - first.plane["basis_mean"].values) @ first.plane["basis"].values.T
    np.testing.assert_allclose(history.position, wanted, atol=1e-6)
    assert grown(history, ds) is history


def test_a_plane_of_less_than_half_of_the_rows_is_made_anew(ds: xr.Dataset) -> None:
    history = grown(prepare(ds.isel(step=slice(10))), ds)
    assert history.plane_rows == 21
    check_against_analysis(history, ds)


def test_rows_that_are_others_now_are_read_again(ds: xr.Dataset) -> None:
    history = prepare(ds)
    assert grown(history, ds.isel(step=slice(15))).rows == 15
    moved = ds.assign_coords(step=ds["step"] + 1)
    assert grown(history, moved).steps[0] == 1
    cut = ds.assign_attrs(runs=[*ds.attrs["runs"], [15, "another"]])
    assert grown(history, cut).runs[-1] == [15, "another"]


def test_positions_of_long_runs_are_those_of_every_nth_row(
    ds: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_history, "POSITION_BYTES", 6 * 128 * 8)
    history = prepare(ds)
    assert history.position["step"].values.tolist() == [0, 4, 8, 12, 16, 20]
    later = grown(prepare(ds.isel(step=slice(12))), ds)  # of which every second was held
    assert later.position["step"].values.tolist() == [0, 4, 8, 12, 16, 20]
    check_against_analysis(later, ds)


def test_what_a_run_does_not_hold_is_said(tmp_path: Path) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(12))
    ds = open_run(tmp_path / "run.zarr")
    history = prepare(ds)
    assert history.cause is None
    assert list(history.unknown) == ["cause"]
    assert "exp_avg" in history.unknown["cause"]
    check_against_analysis(history, ds)
    check_against_analysis(grown(prepare(ds.isel(step=slice(9))), ds), ds)
    bare = prepare(ds.drop_vars(["grad", "loss", "is_dead"]))
    assert set(bare.unknown) == {"cause", "gradient", "loss"}
    assert bare.populations == ["all"]


def test_a_run_that_cannot_be_explored_is_refused(
    ds: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VariableNotRecorded, match="W"):
        prepare(ds.drop_vars("W"))
    with pytest.raises(InvalidArgument, match="at least 2 rows, got 1"):
        prepare(ds.isel(step=slice(1)))
    monkeypatch.setattr(run_history, "MAP_BYTES", 1000)
    with pytest.raises(InvalidArgument, match=r"21 rows of 128 tokens.*trajstore export"):
        prepare(ds)
