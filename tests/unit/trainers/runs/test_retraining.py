"""A run without a checkpoint is gone on with by training its steps again, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from altered_runs import rewrite
from damage import contents
from small_trainings import Straight, same_values, small_config, stop_after

from trajstore import RunWriter, verify
from trajstore.errors import NothingToResume, RunLocked
from trajstore.store.storage.remote_path import checkpoint_folder
from trajstore.trainers import (
    RunConfig,
    fork,
    record,
    recorded_config,
)
from trajstore.trainers.runs.walk import recording_options
from trajstore.trainers.texts import load_corpus


def config_of(*assignments: str) -> RunConfig:
    return small_config(["gatsby"], *assignments, steps=9)


def test_what_is_proven_is_locked_and_then_kept_as_a_checkpoint(
    interrupted: Path, text: Path, straight: Straight
) -> None:
    """A checkpoint of another run is none of this run."""
    another = {"created": "2020-01-01T00:00:00+00:00"}
    RunWriter.resume(interrupted, attributes=another).close("interrupted")
    seen = []

    def look(step: int, last: int) -> None:
        if not seen:
            with pytest.raises(RunLocked):
                RunWriter.resume(interrupted)
        seen.append((step, last))

    def stop() -> bool:
        raise RuntimeError("killed")

    notes: list[str] = []
    with pytest.raises(RuntimeError, match="killed"):
        record(
            recorded_config(interrupted), interrupted, corpus=text, resume=True, stop=stop,
            on_retrain=look, on_note=notes.append,
        )  # fmt: skip
    assert "its 5 steps are trained again" in notes.pop(0)
    assert seen == [(step, 5) for step in range(1, 6)]
    assert [file.name for file in checkpoint_folder(interrupted).iterdir()] == [
        "step-00000005.safetensors"
    ]
    record(recorded_config(interrupted), interrupted, resume=True, on_note=notes.append)
    assert notes == []
    assert xr.open_zarr(interrupted).attrs["provenance"]["resumed"][0]["step"] == 5
    same_values(straight(config_of()), interrupted)


def test_a_row_that_differs_is_named_and_the_run_stays(
    lost: Path, text: Path, tmp_path: Path
) -> None:
    other = lost.rename(tmp_path / "other.zarr")
    rewrite(other, "logits", (3, 7))
    provenance = xr.open_zarr(other).attrs["provenance"] | {"processor": "z80"}
    RunWriter.resume(other, attributes={"provenance": provenance}).close("interrupted")
    before = contents(other)
    with pytest.raises(
        NothingToResume, match=r"at step 3 logits differs .*was z80 and is now"
    ) as error:
        record(recorded_config(other), other, corpus=text, resume=True)
    assert str(error.value).count(". ") == 0
    assert contents(other) == before
    assert not checkpoint_folder(other).exists()
    assert not list(tmp_path.glob(".*"))


def other_config(*changes: str) -> dict[str, Any]:
    return {"config": config_of("training.products=native", *changes).model_dump(mode="json")}


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"imported": {"from": "x.h5"}}, "was imported"),
        ({"provenance": {"what_if": {"run": "x.zarr"}}}, "was computed by `trajstore what-if`"),
        ({"config": {}}, "was not recorded by"),
        (other_config("training.seed=7"), r"at step 0 W differs .*are unchanged"),
        (other_config("training.steps=40"), "W and lr differ, because the learning rate"),
    ],
)
def test_a_run_that_this_training_did_not_make_cannot_resume(
    lost: Path, text: Path, attributes: dict[str, Any], sentence: str
) -> None:
    RunWriter.resume(lost, attributes=attributes).close("interrupted")
    before = contents(lost)
    with pytest.raises(NothingToResume, match=sentence):
        record(recorded_config(lost), lost, corpus=text, resume=True)
    assert contents(lost) == before


def test_a_run_that_is_not_there_or_has_no_step_begins(
    stopped: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    for rows in (None, 0, 1):  # the row of step 0 is that of the start
        if rows is not None:
            RunWriter.resume(without_checkpoints(path), rows=rows).close("interrupted")
        record(config_of(), path, corpus=text, resume=True, stop=stop_after(2))
        same_values(stopped, path, until=2)


def extend(path: Path, steps: int, *settings: str, **options: Any) -> None:
    longer = recorded_config(path).with_values([f"training.steps={steps}", *settings])
    record(longer, path, resume=True, **options)


def without_checkpoints(path: Path) -> Path:
    shutil.rmtree(checkpoint_folder(path))
    return path


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """3 steps, extended to 5, and to 7: without a checkpoint."""
    path = tmp_path_factory.mktemp("extended") / "run.zarr"
    record(small_config(["gatsby"], steps=3), path, corpus=text)
    extend(path, 5)
    extend(path, 7)
    return without_checkpoints(path)


def listed(path: Path) -> list[tuple[int, int]]:
    """Begin of each segment, and the steps that its configuration has."""
    segments = xr.open_zarr(path).attrs["segments"]
    return [(entry["step"], entry["config"]["training"]["steps"]) for entry in segments]


def test_the_configuration_of_each_segment_is_recorded_and_cut_with_the_run(
    extended: Path, text: Path, tmp_path: Path
) -> None:
    assert listed(extended) == [(0, 3), (3, 5), (5, 7)]
    assert recorded_config(extended).training.steps == 7
    of_steps = [recorded_config(extended, after=step).training.steps for step in (0, 2, 3, 5)]
    assert of_steps == [3, 3, 5, 7]
    assert verify(extended).clean
    path = Path(shutil.copytree(extended, tmp_path / "run.zarr"))
    RunWriter.resume(path, rows=5).close("interrupted")
    extend(path, 6, corpus=text)
    assert listed(path) == [(0, 3), (3, 5), (4, 6)]
    same_values(extended, path, until=4)


def test_a_fork_repeats_every_segment_until_there(
    extended: Path, text: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    other = fork(extended, tmp_path / "other.zarr", at=4, settings=["optimizer.lr=3e-3"],
                 corpus=text, on_note=notes.append)  # fmt: skip
    same_values(extended, other, until=4)
    assert xr.open_zarr(other).step.values[-1] == 5
    assert listed(other) == [(0, 3), (3, 5), (4, 5)]
    assert any("for as many, give training.steps=7" in note for note in notes)
    assert verify(other).clean


def test_where_training_again_differs_the_fork_has_what_was_trained(
    extended: Path, text: Path, tmp_path: Path
) -> None:
    """A recorded value of an early segment is changed, as if another machine had made it."""
    path = Path(shutil.copytree(extended, tmp_path / "run.zarr"))
    rewrite(path, "loss", (2,))
    notes: list[str] = []
    other = fork(path, tmp_path / "other.zarr", at=6, corpus=text, on_note=notes.append)
    same_values(extended, other)
    assert "differs from the recorded one from step 2 on: at step 2 loss" in notes[1]
    entry = xr.open_zarr(other).attrs["provenance"]["fork"]
    assert (entry["step"], entry["proven_until"], entry["settings"]) == (6, 1, {})
    assert verify(other).clean


def test_threads_are_recorded_and_used_again(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    own = torch.get_num_threads()
    used: list[int] = []
    count: Any = lambda *_: used.append(torch.get_num_threads())  # noqa: E731
    config = small_config(["gatsby-adam", f"training.threads={own + 1}"], steps=1)
    record(config, path, corpus=text, on_step=count)
    extend(path, 2, on_step=count)
    extend(path, 3, f"training.threads={own + 2}", on_step=count)
    assert used == [own + 1] * 2 + [own + 2]
    assert torch.get_num_threads() == own
    provenance = xr.open_zarr(path).attrs["provenance"]
    assert provenance["threads"] == own + 1
    assert [entry.get("threads") for entry in provenance["resumed"]] == [None, own + 2]
    used.clear()
    extend(without_checkpoints(path), 4, corpus=text, on_retrain=count, on_step=count)
    assert used == [own + 1] * 2 + [own + 2] * 2


def test_rows_are_committed_as_often_as_the_configuration_says(text: Path) -> None:
    for every, seconds in ((2.5, 2.5), (0, None)):
        config = small_config(["gatsby"], f"recording.commit_every={every}", steps=3)
        assert recording_options(config, load_corpus(config, corpus=text)).commit_every == seconds
