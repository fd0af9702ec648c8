"""Loops of one's own, with checkpoints of their own, go on with the run that is there."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from crashing import killed
from damage import contents
from small_trainings import same_values
from trainings import TinyModel, take_steps

from trajstore import RunWriter, verify
from trajstore.errors import InvalidArgument, NothingToResume, RecordingError, RunExists, RunLocked
from trajstore.store.storage.lock import RunLock
from trajstore.trainers import capture, replay

RECORD = "matrix,norms,W_step_norm,W_ulp_l1"
STEPS = 12


class Loop:
    """A model, its optimizer and its batches; a copy of their state is its checkpoint."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = TinyModel(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def run(self, path: Path, first: int, last: int, **options: Any) -> None:
        options = {"block_rows": 4, "variables": RECORD, "fsync": False, **options}
        with capture(self.model, self.optimizer, path, **options):
            self.train(first, last)

    def train(self, first: int, last: int) -> None:
        take_steps(self.model, self.optimizer, last - first, seed=first)

    def checkpoint(self) -> dict[str, Any]:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(states)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])


def straight(folder: Path, **options: Any) -> Path:
    """A run of the training without a break."""
    path = folder / "straight.zarr"
    Loop().run(path, 0, STEPS, **options)
    return path


def opened(path: Path) -> xr.Dataset:
    return xr.open_zarr(path, chunks=None)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"every": 3}, ("",)),
        ({"parameter": ["embedding.weight", "mix.weight"], "tokens": [1, 4, 6],
          "variables": "weights+grads,W_ulp_l1"}, (".embedding.weight", ".mix.weight")),
    ],
)  # fmt: skip
def test_a_loop_continues_from_its_own_checkpoint(
    options: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    taken, path = 7, tmp_path / "run.zarr"
    straight(tmp_path, **options)
    first = Loop()
    first.run(path, 0, taken, **options)
    checkpoint = first.checkpoint()
    # It went on a little further, and what it recorded then is dropped.
    first.run(path, taken, taken + 2, resume=True, first_step=taken, **options)
    again = Loop()
    again.restore(checkpoint)
    again.run(path, taken, STEPS, resume=True, first_step=taken, **options)
    for name in names:
        ds = same_values(tmp_path / f"straight{name}.zarr", tmp_path / f"run{name}.zarr")
        assert ds.attrs["status"] == "complete"
        assert [entry["step"] for entry in ds.attrs["provenance"]["resumed"]] == [taken, taken]


@pytest.mark.parametrize(
    ("other", "options"), [(torch.optim.SGD, {}), (torch.optim.AdamW, {"maximize": True})]
)
def test_steps_of_another_optimizer_are_not_proven(other: Any, options: Any, path: Path) -> None:
    loop = Loop()
    loop.run(path, 0, 3)
    state = loop.checkpoint()["optimizer"]["state"]
    loop.optimizer = other(loop.model.parameters(), lr=0.01, **options)
    loop.optimizer.load_state_dict(loop.optimizer.state_dict() | {"state": state})
    loop.run(path, 3, 6, resume=True, first_step=3)
    result = replay(path)
    assert (result.clean, result.replayed) == (True, 3)


def test_the_way_from_weights_that_are_not_held_is_known_at_a_row_only(path: Path) -> None:
    options: dict[str, Any] = {"variables": "cells,W_step_norm", "every": 3}
    loop = Loop()
    loop.run(path, 0, 6, **options)
    loop.run(path, 6, 8, resume=True, first_step=6, **options)
    with pytest.raises(NothingToResume, match=r"W_step_norm: the next row needs W at step 6"):
        loop.run(path, 8, STEPS, resume=True, first_step=8, **options)
    again = Loop()
    again.train(0, 6)
    again.run(path, 6, STEPS, resume=True, first_step=6, **options)
    same_values(straight(path.parent, **options), path)
    with pytest.raises(NothingToResume, match="weights of the training differ from"):
        Loop().run(path, STEPS, STEPS, resume=True, first_step=STEPS, **options)


def enlarge(model: Any) -> None:
    model.more = torch.nn.Parameter(torch.zeros(1))


def widen(model: Any) -> None:
    model.embedding.weight.data = torch.zeros(19, 8, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The state after 5 steps, and runs: of every step, of every fourth, and of later ones."""
    loop, folder = Loop(), tmp_path_factory.mktemp("five")
    loop.run(folder / "1.zarr", 0, 5)
    checkpoint = loop.checkpoint()
    loop.run(folder / "late.zarr", 5, 6, first_step=5)
    Loop().run(folder / "4.zarr", 0, 5, every=4)
    return checkpoint, folder


@pytest.mark.parametrize(
    ("run", "options", "change", "message"),
    [
        ("1", {"first_step": 1000}, None, r"is complete and ends at step 5, but the training contin"
         r"ues after step 1000; correct first_step, load the checkpoint of step 5, or .*allow_gap"),
        ("1", {"first_step": 1000}, lambda model: model.float(), r"^embedding\.weight: .* was reco"
         r"rded with bfloat16 of shape \(17, 8\), got float32 of shape \(17, 8\)"),
        ("1", {}, widen, r"bfloat16 of shape \(17, 8\), got bfloat16 of shape \(19, 8"),
        ("1", {}, enlarge, r"parameters of the model: .* with 3 \(embedding.weight, .*got 4 "),
        ("1", {"parameter": "mix.weight"}, None, r"parameter: .* embedding\.weight, got mix\.wei"),
        ("1", {"first_step": 4}, None, "the weights of the training differ from .* at step 4"),
        ("4", {"first_step": 7, "every": 4}, None, "is complete and ends at step 5, but the"),
        ("4", {"every": 4}, lambda model: model.embedding.weight.data.add_(1), "weights .* step 5"),
        ("1", {"every": 2}, None, "every: .* recorded with 1, got 2"),
        ("1", {"logits_mode": "mean"}, None, "logits_mode: .* recorded with last, got mean"),
        ("1", {"tokens": [1, 2]}, None, "tokens: .* was recorded with 17"),
        ("1", {"variables": "matrix,W_ulp_l1"}, None, "correct W_step_norm"),
        ("1", {"variables": f"{RECORD},hidden_mean"}, None, "correct hidden_mean"),
        ("late", {"first_step": 4}, None, "has the steps 5 to 6, but the .* after step 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(
    run: str, options: Any, change: Any, message: str, five: Any
) -> None:
    checkpoint, folder = five
    before, loop = contents(folder), Loop()
    loop.restore(copy.deepcopy(checkpoint))
    if change is not None:
        change(loop.model)
    with pytest.raises((NothingToResume, InvalidArgument), match=message):
        loop.run(folder / f"{run}.zarr", 5, 5, **{"resume": True, "first_step": 5, **options})
    assert contents(folder) == before


def test_another_state_of_the_optimizer_is_noted(path: Path) -> None:
    loop = Loop()
    loop.run(path, 0, 3)
    loop.run(path, 3, 4, resume=True, first_step=3)
    loop.optimizer.state.clear()
    loop.run(path, 4, 6, resume=True, first_step=4)
    (note,) = (e["note"] for e in opened(path).attrs["notes"] if "differ from the run" in e["note"])
    assert note.startswith("exp_avg, exp_avg_sq, step_count of the optimizer differ from the run ")
    assert "at step 4" in note


@pytest.mark.parametrize(
    "options",
    [
        {"variables": "keyframes", "keyframe_every": 2},
        {"parameter": ["embedding.weight", "mix.weight"]},
    ],
)
def test_a_resume_changes_the_run_with_its_first_row(options: Any, path: Path) -> None:
    loop, folder = Loop(), path.parent
    loop.run(path, 0, 3, **options)
    checkpoint = loop.checkpoint()
    loop.run(path, 3, 5, resume=True, first_step=3, **options)
    before = contents(folder)
    loop.restore(checkpoint)
    options = {"variables": RECORD, "fsync": False, **options, "resume": True, "first_step": 3}
    with capture(loop.model, loop.optimizer, path, **options) as run:
        run.commit()
    assert contents(folder) == before
    with capture(loop.model, loop.optimizer, path, **options) as run:
        loop.train(3, 4)
        run.commit()
        for step in folder.rglob("step/zarr.json"):  # also of the keyframes
            assert opened(step.parents[1]).step.values[-1] in (2, 4)
    assert contents(folder) != before


def test_what_compact_does_not_compute_is_said_once_in_each_recording(path: Path) -> None:
    loop, notes = Loop(), list[str]()
    options: dict[str, Any] = {"parameter": ["embedding.weight", "mix.weight"]}
    options |= {"variables": "weights", "encoding": "compact", "on_note": notes.append}
    for first, last in ((0, 3), (3, 5), (5, 5)):  # the last one does not change the run
        loop.run(path, first, last, resume=first > 0, first_step=first, **options)
    assert sum("compact stores W as differences" in note for note in notes) == 2


class Death:
    """Ends the training that saves it: by an error, or with its process."""

    def __init__(self, *, kills: bool) -> None:
        self.kills = kills

    def __reduce__(self) -> Any:
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt


def train_until_death(path: Path, file: Path, told: Any, *, kills: bool = True) -> None:
    loop = Loop()
    with capture(loop.model, loop.optimizer, path, variables=RECORD, commit_every=None) as run:
        loop.train(0, 6)
        run.checkpoint(file, loop.checkpoint() | {"step": run.step})
        loop.train(6, 8)
        run.checkpoint(file, Death(kills=kills))


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_death_leaves_the_last_checkpoint_and_its_rows(
    kills: bool, tmp_path: Path, path: Path
) -> None:
    file = tmp_path / "of" / "last.pt"
    if kills:
        assert killed(train_until_death, path, file)
    else:
        with pytest.raises(KeyboardInterrupt):
            train_until_death(path, file, None, kills=False)
    assert opened(path).step.values[-1] == 8
    loop, saved, committed = Loop(), torch.load(file), []
    loop.restore(saved)

    def save(run: Any) -> None:
        run.checkpoint(file, None if run.step % 2 else run.step)
        committed.append(opened(path).step.values[-1])

    loop.run(path, saved["step"], STEPS, resume=True, first_step=saved["step"], on_step=save)
    assert (torch.load(file), committed) == (STEPS, [*range(7, STEPS + 1)])
    assert [*file.parent.iterdir()] == [file]  # nothing is left of what died
    same_values(straight(tmp_path, block_rows=32), path)


def test_a_run_without_rows_begins(tmp_path: Path) -> None:
    """A loop that always resumes starts a run, also over one that was killed before any row."""
    empty = tmp_path / "killed.zarr"
    with RunWriter.create(tmp_path / "o.zarr", token=[0, 1], hidden=2, variables={"W": "float32"}):
        shutil.copytree(tmp_path / "o.zarr", empty)  # as a kill leaves it
    Loop().run(empty, 0, STEPS, resume=True, first_step=0)
    same_values(straight(tmp_path), empty)
    notes: list[str] = []
    loop = Loop()
    loop.run(tmp_path / "late.zarr", 3, 5, resume=True, first_step=3, on_note=notes.append)
    assert "there were no rows to resume: the run begins after step 3" in notes
    (tmp_path / "other.zarr").mkdir()
    with pytest.raises(RunExists, match="is not a run"):
        loop.run(tmp_path / "other.zarr", 5, 6, resume=True, first_step=5)


@pytest.mark.parametrize(
    ("every", "options"),
    [
        pytest.param(3, {}, marks=pytest.mark.nightly),
        (1, {"encoding": "compact", "variables": "matrix"}),
    ],
)
def test_a_loop_that_keeps_one_checkpoint_goes_on_after_its_death(
    every: int, options: dict[str, Any], tmp_path: Path, path: Path
) -> None:
    unbroken, loop = straight(tmp_path, every=every, **options), Loop()
    options = {**options, "every": every, "commit_every": None}

    def at_step(run: Any) -> None:
        if run.step == 6:
            run.commit()
            run.commit()  # there is nothing new
            shutil.copytree(tmp_path / "lost.zarr", path)

    loop.run(tmp_path / "lost.zarr", 0, 10, on_step=at_step, **options)
    assert opened(path).step.values.tolist() == [*range(0, 7, every)]
    checkpoint = loop.checkpoint()
    steps = [step for step in range(0, STEPS + 1, every) if not 6 < step <= 10]
    expected = opened(unbroken).drop_vars(["W_step_norm", "W_ulp_l1"], errors="ignore")
    expected = expected.sel(step=steps).load()
    for _ in range(2):  # it may die again before its next checkpoint
        loop.restore(copy.deepcopy(checkpoint))
        loop.run(path, 10, STEPS, resume=True, first_step=10, **options)
        ds = opened(path)
        xr.testing.assert_equal(ds[list(expected)], expected)
        (gap,) = (e for e in ds.attrs["notes"] if e["note"].startswith("there are no rows"))
        first, last = (7, 10) if every == 1 else (9, 9)
        assert f"steps {first} to {last} of embedding.weight" in gap["note"]
        assert (gap["first_step"], gap["last_step"]) == (first, last)
    assert verify(path).clean
    again = Loop()
    again.train(0, 6)
    again.run(path, 6, STEPS, resume=True, first_step=6, **options)
    ds = same_values(unbroken, path)
    assert not any("there are no rows" in note["note"] for note in ds.attrs["notes"])


def test_what_does_not_fit_one_parameter_leaves_all_runs_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, loop = ["embedding.weight", "mix.weight"], Loop()
    first, second = (path.with_suffix(f".{name}.zarr") for name in names)
    two: dict[str, Any] = {"parameter": names, "variables": "weights"}
    loop.run(path, 0, 5, **two)
    before = [(run / "zarr.json").read_bytes() for run in (first, second)]
    two |= {"resume": True, "first_step": 5}

    def refused(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message) as raised:
            loop.run(path, 5, 6, **two)
        assert [(run / "zarr.json").read_bytes() for run in (first, second)] == before
        RunLock.acquire(first).release()
        del raised  # what it holds could not release the lock until here

    def refuse(*arguments: Any) -> None:
        raise RecordingError("no memory can be pinned")

    fits = loop.checkpoint()
    with torch.no_grad():
        loop.model.mix.weight += 1
    refused(NothingToResume, r"differ from .*mix\.weight\.zarr at step 5")
    loop.restore(fits)
    adam, loop.optimizer = loop.optimizer, torch.optim.SGD([loop.model.embedding.weight], lr=0.1)
    refused(RecordingError, r"mix\.weight is not in the optimizer")
    loop.optimizer = adam
    with RunLock.acquire(second):
        refused(RunLocked, "lock|writ")
    with monkeypatch.context() as patch:
        patch.setattr("trajstore.trainers.recording.parameter_rows.open_transfer", refuse)
        refused(RecordingError, "pinned")
    loop.run(path, 5, 6, **two)
    assert [opened(run).step.values[-1] for run in (first, second)] == [6, 6]


def test_a_gap_after_a_complete_recording_is_allowed_and_later_attributes_hold(path: Path) -> None:
    loop = Loop()
    loop.run(path, 0, 3, config={"steps": 3}, schedule={"name": "none"})
    loop.train(3, 6)
    later = {"config": {"steps": 8}, "schedule": {"name": "flat"}}
    loop.run(path, 6, 8, resume=True, first_step=6, allow_gap=True, **later)
    ds = opened(path)
    assert ds.step.values.tolist() == [0, 1, 2, 3, 7, 8]
    assert "there are no rows of steps 4 to 6 of embedding.weight" in ds.attrs["notes"][-1]["note"]
    assert ds.attrs["config"] == {"steps": 8}
    assert ds.attrs["optimizer"]["schedule"] == {"name": "flat"}  # no limit is known
    assert ds.attrs["optimizer"]["hyperparameters"]["lr"] == 0.01
