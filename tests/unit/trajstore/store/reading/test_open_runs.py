"""Several runs, and what tells them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from growing_runs import begin

from trajstore import RunWriter, analysis, open_run, open_runs
from trajstore.errors import InvalidArgument, RunNotFound
from trajstore.store.reading.open_run import final_loss, run_table
from trajstore.store.reading.run_attributes import SEED, differing_settings, run_labels
from trajstore.store.reading.run_info import information, run_paths

CONFIG = {"initialization": {"sigma": 1e-5}, "optimizer": {"name": "adam"}, "data": {"name": "x"}}
WIDE = {"W": "float32", "loss": "float32"}


def write(path: Path, seed: int = 0, steps: range = range(5), **options: Any) -> Path:
    """A run of small whole numbers; `options` replace those of the writer."""
    rng = np.random.default_rng(seed)
    arguments: dict[str, Any] = {
        "token": np.arange(4),
        "hidden": 2,
        "variables": {"W": "bfloat16", "loss": "float32"},
        "is_dead": [True, False, False, True],
        "config": CONFIG,
        "block_rows": 3,
    } | options
    arguments["config"] = arguments["config"] | {"training": {"seed": seed}}
    with RunWriter.create(path, **arguments) as run:
        for step in steps:
            W = rng.integers(-4, 5, (len(arguments["token"]), 2)).astype("f4")
            values = {"W": W, "loss": np.float32(rng.integers(9))}
            run.append(step, **{name: values[name] for name in arguments["variables"]})
    return path


def test_what_differs_lies_along_run_and_each_run_is_as_it_is_by_itself(tmp_path: Path) -> None:
    other = CONFIG | {"initialization": {"sigma": 1e-4}, "optimizer": {"name": "sgd"}}
    runs = [
        write(tmp_path / "a_seed=2.zarr", 2),
        write(tmp_path / "a_seed=10.zarr", 10, config=other, variables=WIDE),
    ]
    ds = open_runs(tmp_path / "*.zarr")
    assert ds.run.values.tolist() == ["a_seed=2", "a_seed=10"], "numbers are in their order"
    assert ds.seed.values.tolist() == [2, 10]
    assert ds.sigma.values.tolist() == [1e-5, 1e-4]
    assert ds["optimizer.name"].values.tolist() == ["adam", "sgd"], "there are two names"
    assert ds.W.dims == ("run", "step", "token", "hidden")
    assert ds.W.chunks is not None
    assert ds.is_dead.dims == ("token",)
    assert "config" not in ds.attrs
    assert ds.attrs["committed_rows"] == 5
    assert ds.W.attrs.get("native_dtype") is None, "the runs have types of their own"
    for number, (one, path) in enumerate(zip(analysis.each_run(ds), runs, strict=True)):
        expected = open_run(path)
        xr.testing.assert_identical(one.load(), expected.load())
        assert one.encoding["source"] == expected.encoding["source"]
        xr.testing.assert_identical(
            analysis.regimes(ds.isel(run=number)).load().reset_coords(drop=True),
            analysis.regimes(expected).load().reset_coords(drop=True),
        )
    next((runs[0] / "W").glob("c.*")).write_bytes(b"broken")
    assert ds.loss.values.shape == (2, 5), "only what is asked for is read"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"token": [0, 1, 2], "is_dead": [True] * 3},
            "other and one have lengths 3 and 4 along token",
        ),
        ({"steps": range(4)}, r"other has 4 steps from 0 to 3, one 5 steps from 0 to 4.*join="),
        ({"variables": {"W": "bfloat16"}}, "loss is in only one"),
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
        write(tmp_path / "other.zarr", 1, range(0, 12, 2), variables={"W": "bfloat16"}),
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
    paths = [write(tmp_path / "one.zarr"), write(tmp_path / "other.zarr", is_dead=[True] * 4)]
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
    with pytest.raises(RunNotFound, match=r"there is no run at .*none"):
        run_paths(tmp_path / "none*.zarr")


def made(path: Path) -> Path:
    begin(path).close()
    return path


def test_names_patterns_and_folders(tmp_path: Path) -> None:
    odd = made(tmp_path / "odd [1].zarr")
    assert run_paths([odd, odd, str(tmp_path / "*.zarr")]) == [str(odd)]
    runs = [made(tmp_path / "runs" / f"seed={seed}.zarr") for seed in (2, 10)]
    assert run_paths(tmp_path / "runs") == [str(run) for run in runs]
    assert run_paths(runs[0]) == [str(runs[0])]
    assert run_paths(tmp_path / "later.zarr") == [str(tmp_path / "later.zarr")]


def test_the_matrices_of_a_training_have_one_name(tmp_path: Path) -> None:
    matrices = {"E.weight": "un.E.weight.zarr", "W": "un.W.zarr", "V": "un.copy of V.zarr"}
    for parameter, name in matrices.items():
        begin(tmp_path / name, attributes={"recording": {"parameter": parameter}}).close()
    (tmp_path / "un.notes.zarr").mkdir()  # it is no run
    name = tmp_path / "un.zarr"
    assert run_paths(name) == [str(tmp_path / "un.E.weight.zarr"), str(tmp_path / "un.W.zarr")]
    made(name)
    assert run_paths(name) == [str(name)]


def write_trained(path: Path, losses: list[float], **optimizer: object) -> Path:
    """A run of these losses, or of none."""
    config = {"training": {"seed": len(losses)}, "optimizer": optimizer}
    types = {"W": "float32"} | ({"loss": "float32"} if losses else {})
    with RunWriter.create(path, token=[0], hidden=1, variables=types, config=config) as run:
        for step, loss in enumerate(losses):
            run.append(step, W=np.zeros((1, 1), "f4"), loss=np.float32(loss))
    return path


def test_a_line_says_what_a_run_is_and_what_differs(tmp_path: Path) -> None:
    paths = [
        write_trained(tmp_path / "a.zarr", [np.nan, 1, 2], lr=0.1),
        write_trained(tmp_path / "b.zarr", [np.nan], lr=0.1, state_dtype="float32"),
        write_trained(tmp_path / "c.zarr", [], lr=0.1),
    ]
    losses = [final_loss(path) for path in paths]
    assert losses == [2.0, None, None], "the first row has none yet"
    found = {
        path.name: information(path) | {"final_loss": loss}
        for path, loss in zip(paths, losses, strict=True)
    }
    columns, rows = run_table(found)
    assert columns == [
        "run", "status", "rows", "last step", "seed", "state_dtype", "final loss", "on disk",
    ]  # fmt: skip
    assert [row[:-1] for row in rows] == [
        ["a.zarr", "complete", "3", "2", "3", "unset", "2.0000"],
        ["b.zarr", "complete", "1", "0", "1", "float32", ""],
        ["c.zarr", "complete", "0", "", "0", "unset", ""],
    ]
    for facts, seed in zip(found.values(), (7, None, None), strict=True):
        facts["config"], facts["provenance"] = {}, {"seed": seed}
    columns, rows = run_table(found)
    assert (columns[4], [row[4] for row in rows]) == ("seed", ["7", "", ""]), "of a captured run"
    found["a.zarr"]["provenance"] = {}
    assert "seed" not in run_table(found)[0]


# Their settings.


ONE = {"config": {"training": {"seed": 1, "steps": 9}, "optimizer": {"lr": 1e-3}}}


def changed(**sections: dict[str, object]) -> dict[str, object]:
    return {"config": {**ONE["config"], **sections}}


def of_class(name: str, config: dict[str, str], **rates: object) -> dict[str, object]:
    """A run whose optimizer no configuration describes."""
    groups = [{"hyperparameters": rates}]
    return {"config": config, "optimizer": {"class": name, **groups[0], "groups": groups}}


def of_name(name: str) -> dict[str, object]:
    return {"config": {"optimizer": {"name": name}, "schedule": {"name": "linear"}}}


MANY = {"config": {"data": dict.fromkeys("abcde", 1)}}


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([ONE, changed(optimizer={"lr": 1e-3, "state_dtype": "float32"})],
         ["state_dtype=unset", "state_dtype=float32"]),
        ([ONE, ONE], ["a", "a (2)"]),  # never alike
        ([ONE, MANY], ["a", "a (2)"]),  # too much to be read
        ([of_class("Adam", {}, lr=lr, eps=1e-8) for lr in (1e-3, 1e-2)], ["lr=0.001", "lr=0.01"]),
        ([of_class("Adam", {"of": "me"}, lr=1e-3, eps=1e-8, beta1=0.9, beta2=0.9, fused=True),
          of_class("SGD", {"of": "me"}, lr=1e-2)], ["class=Adam, lr=0.001", "class=SGD, lr=0.01"]),
        ([of_name("adam"), of_name("sgd")], ["optimizer.name=adam", "optimizer.name=sgd"]),
    ],
)  # fmt: skip
def test_labels_say_what_differs(runs: list[dict[str, Any]], labels: list[str]) -> None:
    assert run_labels(runs, ["a", "a"]) == labels


def test_an_open_setting_is_as_none_and_some_can_be_left_out() -> None:
    null = changed(optimizer={"lr": 1e-3, "state_dtype": None})
    assert differing_settings([ONE, null]) == {}
    other = changed(training={"seed": 2, "steps": 9})
    assert run_labels([ONE, other], ["a", "b"], without={SEED}) == ["a", "b"]
