"""`log=`: numbers of committed rows for a tracker, against the recorded run."""

from __future__ import annotations

import contextvars
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from small_trainings import TEXT, small_config, tiny_gpt2, trainer_of
from trainings import (
    VOCAB,
    TinyModel,
    take_steps,
    tiny_run,
    trained,
)

from trajstore import (
    analysis,
    export,
    import_file,
    open_run,
    verify,
)
from trajstore.errors import InvalidArgument, RecordingError
from trajstore.schema import MODEL
from trajstore.store.reading.run_info import information
from trajstore.trainers import TrajectoryCallback, capture, plan, record

RUN: contextvars.ContextVar[str] = contextvars.ContextVar("RUN")
DEAD = np.arange(VOCAB) >= 13


def train(path: Path, log: Any, steps: int = 9, dtype: Any = torch.bfloat16, **more: Any) -> None:
    model = TinyModel(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"is_dead": DEAD, "block_rows": 4, "log": log, "log_every": 2, "fsync": False} | more
    for count in [steps] if "every" not in more else [6, steps - 6]:  # resumes inside a block
        with capture(model, optimizer, path, **options) as recorder:
            take_steps(model, optimizer, count, seed=options.get("first_step", 0))
        options |= {"resume": True, "first_step": recorder.step, "is_dead": None}


def test_the_numbers_are_those_of_the_run_and_come_from_another_thread(tmp_path: Path) -> None:
    path, numbers, threads = tmp_path / "run.zarr", [], set()

    RUN.set("mine")  # where trackio keeps its run

    def log(given: dict[str, float]) -> None:
        assert RUN.get() == "mine"
        numbers.append({name.removeprefix("trajstore/"): each for name, each in given.items()})
        threads.add(threading.get_ident())

    train(path, log)
    assert threading.get_ident() not in threads
    ds = open_run(path, chunks=None)
    assert [each["step"] for each in numbers] == [2, 4, 6, 8]
    assert [each["rows"] for each in numbers] == [3, 5, 7, 9]
    norms = np.linalg.norm(ds.grad.values.astype("f8"), axis=-1)
    for each in numbers:
        row = each["step"]
        same = (ds.W.values[row] == ds.W.values[row - 1]).all(-1)
        assert each["loss"] == ds.loss.values[row]
        for name, mask in (("dead", DEAD), ("live", ~DEAD)):
            assert each[f"unchanged_{name}"] == same[mask].mean()
            np.testing.assert_allclose(each[f"grad_norm_{name}"], norms[row, mask].mean())
    assert numbers[-1]["bytes_on_disk"] > numbers[0]["bytes_on_disk"] > 0


def test_an_error_of_the_tracker_ends_the_log_and_not_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def log(numbers: dict[str, float]) -> None:
        calls.append(numbers)
        raise OSError("the tracker is gone")

    train(tmp_path / "run.zarr", log)
    assert len(calls) == 1
    assert "log= failed" in caplog.text
    assert "the tracker is gone" in caplog.text
    assert open_run(tmp_path / "run.zarr").sizes["step"] == 10
    with pytest.raises(InvalidArgument, match="expected a Callable or None"):
        train(tmp_path / "other.zarr", "wandb")


def test_a_trainer_logs_by_itself(tmp_path: Path) -> None:
    options = {"log": True, "log_every": 3, "block_rows": 2}
    callback = TrajectoryCallback(tmp_path / "run.zarr", **options)
    trainer = trainer_of(tiny_gpt2(), tmp_path, callback)
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "trajstore/loss" in entry]
    assert logged["trajstore/step"] == logged["step"] == 3
    assert trainer.state.global_step == 4
    assert logged["trajstore/loss"] == float(open_run(tmp_path / "run.zarr").loss[3])
    callback = TrajectoryCallback(tmp_path / "other.zarr", **options)
    unknown = trainer_of(tiny_gpt2(), tmp_path, callback)
    with pytest.raises(RecordingError, match=r"pass a callable, such as log=trainer\.log"):
        unknown._inner_training_loop(3, args=unknown.args)  # as a subclass that has its own `train`


def test_rows_after_each_multiple_are_passed_once_also_after_a_resume(tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []
    train(tmp_path / "run.zarr", logged.append, 20, every=3, log_every=4)
    assert [each["trajstore/step"] for each in logged] == [6, 9, 12, 18, 20]  # the last has a row
    assert "trajstore/unchanged_dead" in logged[0]
    assert len({tuple(each) for each in logged}) == 1  # the run knows its labels


COUNTS = np.arange(VOCAB) % 5
ODD = np.arange(VOCAB) % 2 == 1
GIVEN: dict[str, Any] = {"rare": "0 < token_count <= 1", "first": [0, 1, 2], "odd": ODD}
EXPECTED = {"is_rare": COUNTS == 1, "is_first": np.arange(VOCAB) < 3, "is_odd": ODD}


SMALL: dict[str, Any] = {"variables": "W,loss", "token_count": COUNTS}
run_of = partial(tiny_run, count=5, clip=0, **SMALL)


def test_tokens_that_never_occur_are_dead(tmp_path: Path) -> None:
    assert (open_run(run_of(tmp_path / "a.zarr")).is_dead.values == (COUNTS == 0)).all()
    given = open_run(run_of(tmp_path / "b.zarr", token_count=None, is_dead=COUNTS > 2))
    assert "token_count" not in given.coords
    ds = open_run(run_of(tmp_path / "c.zarr", tokens="dead"))
    assert ds.token.values.tolist() == np.flatnonzero(COUNTS == 0).tolist()


def test_what_is_recorded_goes_to_files_and_back(tmp_path: Path) -> None:
    tokens = [1, 3, 6, 16]
    path = run_of(tmp_path / "run.zarr", populations=GIVEN, tokens=tokens,
                  variables="W,hyperparameters,norms")  # fmt: skip
    copied = export(path, tmp_path / "copy.zarr", format="run", tokens=[3, 6], steps="::2").path
    plain = export(path, tmp_path / "plain.zarr", format="zarr").path
    part = export(path, tmp_path / "part.safetensors", variables="W,loss")
    back = [
        import_file(export(path, tmp_path / name, format=form), tmp_path / f"{form}.zarr").path
        for name, form in (("run.safetensors", "safetensors"), ("run.h5", "hdf5"))
    ]
    ds = open_run(path, chunks=None)
    for other in (path, copied, plain, *back):
        again, every = xr.open_zarr(other, chunks=None), 2 if other == copied else 1
        for name in (*MODEL, "hyperparameters"):
            xr.testing.assert_equal(again[name], ds[name][::every])
        assert again.parameter.values.tolist() == ["embedding.weight", "mix.weight", "mix.bias"]
        for name, mask in EXPECTED.items() if other in (path, copied, back[0]) else ():
            assert again[name].dtype == bool
            np.testing.assert_array_equal(again.coords[name], mask[again.token])
        assert other == plain or not verify(other).problems
    assert not set(EXPECTED) & set(xr.open_zarr(back[1]).coords)
    assert "parameter" not in open_run(import_file(part, tmp_path / "few.zarr").path)
    names = analysis.centroid(open_run(path)).population.values.tolist()
    assert sorted(names) == ["all", "dead", "first", "live", "odd", "rare"]
    for name in ("is_rare", "parameter"):
        (path / name / "c.0").write_bytes(b"damaged")
    damaged = [problem.array for problem in verify(path).problems if problem.array]
    assert sorted(damaged) == ["is_rare", "parameter"]


def test_a_run_that_continues_keeps_them(tiny: Any, optimizer: Any, path: Path) -> None:
    trained(tiny, optimizer, path, populations=GIVEN, **SMALL)
    on: dict[str, Any] = SMALL | {"resume": True}
    for first, given in ((3, None), (6, GIVEN)):
        trained(tiny, optimizer, path, populations=given, first_step=first, **on)
        np.testing.assert_array_equal(open_run(path).is_rare, EXPECTED["is_rare"])
    for given in ({"rare": GIVEN["rare"]}, {**GIVEN, "odd": [4]}):
        with pytest.raises(InvalidArgument, match=r"populations: is_.* was recorded with"):
            trained(tiny, optimizer, path, populations=given, first_step=9, **on)


def test_populations_of_a_configuration_stay_with_its_runs(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("65\n66\n")
    (tmp_path / "text.txt").write_bytes(TEXT)
    given = ["rare=0 < token_count < 3", f"capitals={tmp_path / 'ids.txt'}"]
    config = small_config(["gatsby"], 'recording.variables=["weights"]', steps=8)
    config = config.with_values([f"recording.populations={given}"])
    text = tmp_path / "text.txt"
    path = record(config, tmp_path / "run.zarr", corpus=text)
    ds = open_run(path, chunks=None)
    assert ds.token.values[ds.is_capitals.values].tolist() == [65, 66]
    count = ds.token_count.values
    np.testing.assert_array_equal(ds.is_rare, (count > 0) & (count < 3))
    assert ds.attrs["config"]["recording"]["populations"] == given
    assert plan(config).files == sum(file.is_file() for file in path.rglob("*"))
    with pytest.raises(InvalidArgument, match="expected NAME=EXPRESSION or NAME=FILE"):
        plan(config.with_values(['recording.populations=["rare"]']))


def test_a_population_is_refused_or_noted_at_the_start(tmp_path: Path) -> None:
    told: list[str] = []
    given = {"none": "token_count < 0", "capitals": [3]}
    with pytest.raises(InvalidArgument, match="got the population 'token_count <', expected an "):
        run_of(tmp_path / "run.zarr", populations={"rare": "token_count <"})
    assert not (tmp_path / "run.zarr").exists()
    path = run_of(tmp_path / "run.zarr", populations=given, tokens=[3], on_note=told.append)
    assert told == ["the population none has no token"]
    assert information(path)["populations"] == {"capitals": 1, "none": 0}
