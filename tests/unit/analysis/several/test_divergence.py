from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from trajstore import RunWriter, analysis, open_run, open_runs
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    rng = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("runs")
    found = [folder / f"{number}.zarr" for number in range(3)]
    for path, block_rows in zip(found, (4, 3, 7), strict=True):
        with RunWriter.create(
            path,
            token=np.arange(6),
            hidden=3,
            variables={"W": "float32"},
            is_dead=np.arange(6) < 2,
            block_rows=block_rows,
        ) as run:
            for step in range(9):
                run.append(step=step, W=rng.normal(size=(6, 3)).astype("float32"))
    return found


def test_against_its_definition_and_compare(paths: list[Path]) -> None:
    ds = open_runs(paths)
    lazy = analysis.divergence(ds)
    assert all(array.chunks is not None for array in lazy.data_vars.values())
    got = lazy.compute()
    W = ds.W.values.astype("float64")
    norms = np.sqrt(((W - W[0]) ** 2).sum(-1))
    for name, group in {"dead": slice(0, 2), "live": slice(2, 6), "all": slice(0, 6)}.items():
        part = got.sel(population=name)
        expected = np.sqrt((norms[:, :, group] ** 2).sum(-1))
        np.testing.assert_allclose(part.distance, expected, rtol=1e-13)
        np.testing.assert_allclose(part.mean_distance, norms[:, :, group].mean(-1), rtol=1e-13)
    assert not got.isel(run=0).distance.any()
    for number in (1, 2):
        compared = analysis.compare(open_run(paths[0]), open_run(paths[number]))
        distance = compared.distance.sel(variable="W")
        np.testing.assert_allclose(got.distance[number].sel(population="all"), distance, rtol=1e-13)
        assert got.first_difference[number] == compared.first_difference.sel(variable="W")


def test_two_runs_from_a_common_start(paths: list[Path]) -> None:
    one = open_run(paths[0])
    W = one.W.values.copy()
    W[4:, 0, 1] += 1
    W[6:, 3:, :] = -W[6:, 3:, :]  # −0 and 0 differ in a bit, but have distance 0
    W[7, 5, 0] = np.nan
    one = one.assign(W=one.W.where(one.token != 3, 0))
    W[6:, 3] = -0.0
    W[:6, 3] = 0
    other = one.assign(W=(one.W.dims, W)).isel(step=slice(1, 9)).chunk(step=2, token=4)
    lazy = analysis.divergence(one, other)
    assert all(array.chunks is not None for array in lazy.data_vars.values())
    got = lazy.compute()
    assert got.step.values.tolist() == list(range(1, 9))
    assert got.first_difference == 4
    assert "run" not in got.dims
    before, after = one.W.values[1:], W[1:]
    differs = before.view("u4") != after.view("u4")
    square = (before.astype("f8") - after) ** 2
    for name, group in {"dead": slice(0, 2), "live": slice(2, 6)}.items():
        part = got.sel(population=name)
        distance = np.sqrt(square[:, group].sum((1, 2)))
        np.testing.assert_allclose(part.distance, distance, rtol=1e-13)
        np.testing.assert_array_equal(part.differing, differs[:, group].mean((1, 2)))
    xr.testing.assert_identical(one.traj.divergence(other).compute(), got)


def test_what_two_runs_must_share(paths: list[Path]) -> None:
    one, two = open_run(paths[0]), open_run(paths[1])
    with pytest.raises(InvalidArgument, match="open all runs together"):
        analysis.divergence(open_runs(paths), one)
    with pytest.raises(InvalidArgument, match="token has length 6 and 4"):
        analysis.divergence(one, two.isel(token=slice(0, 4)))
    with pytest.raises(InvalidArgument, match="different dead tokens"):
        analysis.divergence(one, two.assign_coords(is_dead=~two.is_dead))
    with pytest.raises(InvalidArgument, match="no common step"):
        analysis.divergence(one.isel(step=[0]), two.isel(step=[1]))
    same = analysis.divergence(one, one).compute()
    assert same.first_difference == -1
    assert not same.distance.any()
    assert not same.differing.any()


def test_chunks_change_nothing(paths: list[Path]) -> None:
    ds = open_runs(paths)
    expected = ds.traj.divergence().compute()
    for step, token in ((2, 4), (9, 1)):
        got = ds.chunk(step=step, token=token).traj.divergence().compute()
        xr.testing.assert_identical(got, expected)


def test_without_populations_or_W(paths: list[Path]) -> None:
    ds = open_runs(paths)
    assert ds.drop_vars("is_dead").traj.divergence().population.values.tolist() == ["all"]
    with pytest.raises(VariableNotRecorded, match="W"):
        ds.drop_vars("W").traj.divergence()
