from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from growing_runs import begin, extend

from trajstore import analysis, open_run
from trajstore.analysis.exploring import plots
from trajstore.analysis.exploring.plots import prepare
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture
def ds(example_run: Path) -> xr.Dataset:
    return open_run(example_run)


def test_the_history_equals_the_analysis(ds: xr.Dataset) -> None:
    history = prepare(ds)
    data, shown = history.data, history.populations
    rest = analysis.freeze(ds).compute()
    assert data["tokens"].equals(rest[["last_motion", "moves"]])
    assert data["heatmap"].drop_attrs().identical(analysis.heatmap(ds).compute().drop_attrs())
    for name in ("unchanged_fraction", "frozen_fraction"):
        assert data["freeze"][name].equals(rest[name].sel(population=shown))
    np.testing.assert_array_equal(data["loss"]["loss"], ds["loss"])
    for name, values in (
        ("grad_norms", analysis.grad_norms(ds)),
        ("displacement", analysis.displacement(ds)),
    ):
        table = analysis.by_population(values[1:], (0.05, 0.95)).sel(population=shown)
        np.testing.assert_array_equal(data[name]["mean"], table["mean"])
        np.testing.assert_array_equal(data[name]["quantiles"], table["quantiles"])
    assert np.array_equal(data["cause"]["cause"], analysis.freeze_cause(ds))
    found = analysis.pca(ds, components=2).compute()
    np.testing.assert_allclose(history.position, found["scores"], atol=1e-6)
    np.testing.assert_allclose(history.plane["share"].sum(), 1)
    assert (history.every, history.rows, history.last_step, history.unknown) == (1, 21, 20, {})
    order = np.argsort(history.last_motion.values, kind="stable")
    assert [history.rank(at) for at in order[:3]] == [0, 1, 2]


def test_positions_of_long_runs_are_those_of_every_nth_row(
    ds: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "POSITION_BYTES", 6 * 128 * 8)
    history = prepare(ds)
    assert history.position["step"].values.tolist() == [0, 4, 8, 12, 16, 20]


def test_what_a_run_does_not_hold_is_reported(tmp_path: Path) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(12))
    ds = open_run(tmp_path / "run.zarr")
    history = prepare(ds)
    assert "cause" not in history.data
    assert list(history.unknown) == ["cause"]
    assert "exp_avg" in history.unknown["cause"]
    bare = prepare(ds.drop_vars(["grad", "loss", "is_dead"]))
    assert set(bare.unknown) == {"cause", "grad_norms", "loss"}
    assert bare.populations == ["all"]


def test_a_run_that_cannot_be_explored_is_refused(
    ds: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VariableNotRecorded, match="W"):
        prepare(ds.drop_vars("W"))
    with pytest.raises(InvalidArgument, match="at least 2 rows, got 1"):
        prepare(ds.isel(step=slice(1)))
    monkeypatch.setattr(plots, "MAP_BYTES", 1000)
    with pytest.raises(InvalidArgument, match=r"21 rows of 128 tokens.*trajstore export"):
        prepare(ds)
