from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore import RunWriter, analysis, open_run, open_runs
from trajstore.errors import InvalidArgument, RunNotFound

CONFIG = {"initialization": {"sigma": 1e-5}, "optimizer": {"name": "adam"}, "data": {"name": "x"}}


def write(
    path: Path,
    *,
    tokens: int = 4,
    steps: range = range(5),
    dead: Any = (True, False, False, True),
    native: str = "bfloat16",
    variables: tuple[str, ...] = ("W", "loss"),
    config: dict[str, Any] = CONFIG,
    seed: int = 0,
) -> Path:
    rng = np.random.default_rng(seed)
    types = {"W": native, "loss": "float32"}
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=2,
        variables={name: types[name] for name in variables},
        is_dead=np.array(dead[:tokens]),
        config=config | {"training": {"seed": seed}},
        block_rows=3,
    ) as run:
        for step in steps:
            values = {
                "W": rng.integers(-4, 5, (tokens, 2)).astype("float32"),
                "loss": np.float32(rng.integers(9)),
            }
            run.append(step=step, **{name: values[name] for name in variables})
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    other = CONFIG | {"initialization": {"sigma": 1e-4}, "optimizer": {"name": "sgd"}}
    return [
        write(tmp_path / "a_seed=2.zarr", seed=2),
        write(tmp_path / "a_seed=10.zarr", seed=10, config=other, native="float32"),
    ]


def test_what_differs_lies_along_run(runs: list[Path]) -> None:
    ds = open_runs(runs[0].parent / "*.zarr")
    assert ds.run.values.tolist() == ["a_seed=2", "a_seed=10"], "numbers are in their order"
    assert ds.seed.values.tolist() == [2, 10]
    assert ds.sigma.values.tolist() == [1e-5, 1e-4]
    assert ds["optimizer.name"].values.tolist() == ["adam", "sgd"], "there are two names"
    assert ds.W.dims == ("run", "step", "token", "hidden")
    assert ds.W.chunks is not None
    assert ds.is_dead.dims == ("token",)
    assert "config" not in ds.attrs
    assert ds.attrs["committed_rows"] == 5
    for number, path in enumerate(runs):
        xr.testing.assert_equal(ds.W.isel(run=number, drop=True).reset_coords(drop=True).load(),
                                open_run(path).W.reset_coords(drop=True).load())  # fmt: skip


def test_each_run_is_as_it_is_by_itself(runs: list[Path]) -> None:
    ds = open_runs(runs)
    for number, (one, path) in enumerate(zip(analysis.each_run(ds), runs, strict=True)):
        expected = open_run(path)
        xr.testing.assert_identical(one.load(), expected.load())
        assert one.encoding["source"] == expected.encoding["source"]
        xr.testing.assert_identical(
            analysis.regimes(ds.isel(run=number)).load().reset_coords(drop=True),
            analysis.regimes(expected).load().reset_coords(drop=True),
        )
    assert ds.W.attrs.get("native_dtype") is None, "the runs have types of their own"


def test_runs_are_read_only_when_asked(runs: list[Path]) -> None:
    ds = open_runs(runs)
    first = next((runs[0] / "W").glob("c.*"))
    first.write_bytes(b"broken")
    assert ds.loss.values.shape == (2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 3}, "other and one have lengths 3 and 4 along token"),
        ({"steps": range(4)}, r"other has 4 steps from 0 to 3, one 5 steps from 0 to 4.*join="),
        ({"variables": ("W",)}, "loss is in only one"),
    ],
)
def test_runs_that_differ_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    paths = [write(tmp_path / "one.zarr"), write(tmp_path / "other.zarr", **options)]
    with pytest.raises(InvalidArgument, match=message):
        open_runs(paths)


def test_an_inner_join_keeps_common_steps_and_variables(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "one.zarr", steps=range(0, 8)),
        write(tmp_path / "other.zarr", steps=range(0, 12, 2), variables=("W",), seed=1),
    ]
    ds = open_runs(paths, join="inner")
    assert ds.step.values.tolist() == [0, 2, 4, 6]
    assert list(ds.data_vars) == ["W"]
    alone = open_run(paths[0]).sel(step=[0, 2, 4, 6])
    np.testing.assert_array_equal(ds.traj.speed()[0], analysis.speed(alone))
    paths.append(write(tmp_path / "third.zarr", steps=range(1, 9, 2)))
    with pytest.raises(InvalidArgument, match="no step in common"):
        open_runs(paths, join="inner")
    with pytest.raises(InvalidArgument, match="expected 'exact' or 'inner'"):
        open_runs(paths, join="outer")  # type: ignore[arg-type]


def test_dead_tokens_of_their_own(tmp_path: Path) -> None:
    paths = [write(tmp_path / "one.zarr"), write(tmp_path / "other.zarr", dead=(True,) * 4)]
    ds = open_runs(paths)
    assert ds.is_dead.dims == ("run", "token")
    still = ds.traj.freeze().unchanged_fraction
    for number, path in enumerate(paths):
        np.testing.assert_array_equal(
            still[number], analysis.freeze(open_run(path)).unchanged_fraction
        )
    with pytest.raises(InvalidArgument, match="different dead tokens"):
        _ = ds.traj.dead
    with pytest.raises(InvalidArgument, match="different dead tokens"):
        ds.traj.divergence()


def test_runs_of_one_name_have_their_paths(tmp_path: Path) -> None:
    same = write(tmp_path / "b" / "one.zarr"), write(tmp_path / "c" / "one.zarr")
    assert open_runs(same).run.values.tolist() == [str(path) for path in same]
    with pytest.raises(RunNotFound, match="got no runs"):
        open_runs([])
