from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis, open_run, open_runs
from trajstore.analysis.registry import answer
from trajstore.errors import InvalidArgument


@pytest.fixture
def paths(example_run: Path, tmp_path: Path) -> list[Path]:
    return [example_run, shutil.copytree(example_run, tmp_path / "two.zarr")]


@pytest.mark.parametrize("name", ["freeze", "freeze_cause", "clusters", "pca", "logit_stats"])
def test_the_results_are_those_of_each_run(name: str, paths: list[Path]) -> None:
    got = getattr(open_runs(paths).traj, name)()
    expected = getattr(analysis, name)(open_run(paths[0]))
    xr.testing.assert_identical(got.isel(run=1, drop=True).load(), expected.load())


def test_several_quantities_of_several_runs(paths: list[Path]) -> None:
    ds = open_runs(paths)
    got = answer(ds, ["speed", "freeze"])
    xr.testing.assert_equal(
        got.isel(run=0, drop=True).load(),
        analysis.compute(open_run(paths[0]), ["speed", "freeze"]).load(),
    )
    bands = answer(ds, ["speed"], by_population=True)
    assert bands["mean"].dims == ("run", "step", "population")


def test_wrong_calls_with_several_runs_are_errors(paths: list[Path]) -> None:
    one, several = open_run(paths[0]), open_runs(paths)
    with pytest.raises(InvalidArgument, match="got several runs, expected one"):
        analysis.speed(several)
    with pytest.raises(InvalidArgument, match=r"open_runs\('runs"):
        analysis.divergence(one)
    with pytest.raises(InvalidArgument, match="got one run for divergence, expected several"):
        answer(one, ["divergence"])
    with pytest.raises(InvalidArgument, match="cannot be combined"):
        answer(several, ["divergence", "speed"])
    sizes = iter((3, 4))
    with pytest.raises(InvalidArgument, match="cannot be joined"):
        several.traj.over_runs(lambda run: xr.DataArray(np.zeros(next(sizes)), dims="step"))
