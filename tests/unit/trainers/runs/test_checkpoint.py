"""Checkpoints beside a run: which files stay, what is refused, and when a training writes one."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from damage import contents
from disk import Disk
from safetensors.torch import save_file
from small_trainings import checkpoints, same_values, small_config, stop_after

from trajstore import RunWriter
from trajstore.errors import FormatError
from trajstore.trainers import record, recorded_config
from trajstore.trainers.runs.checkpointing import Checkpointing
from trajstore.trainers.states.state import State


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_damaged_or_foreign_file_is_refused_and_not_executed(
    interrupted: Path, tmp_path: Path
) -> None:
    (file,) = interrupted.with_suffix(".ckpt").iterdir()
    data, sprung = file.read_bytes(), tmp_path / "sprung"
    junk = pickle.dumps(Trap(sprung))
    torch.save({"weights": Trap(sprung)}, tmp_path / "torch")
    save_file({"weights": torch.zeros(3)}, tmp_path / "foreign")
    header = int.from_bytes(data[:8], "little")
    flipped = [3, 40, 8 + header // 2, 8 + header + 5, (8 + header + len(data)) // 2, len(data) - 2]
    bad = {place: data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] for place in flipped}
    bad |= {f"cut to {size}": data[:size] for size in (0, 4, 100, -1)}
    bad |= {"alone": junk, "behind": data + junk}
    bad |= {name: (tmp_path / name).read_bytes() for name in ("torch", "foreign")}
    before = contents(interrupted)
    for content in bad.values():
        file.write_bytes(content)
        with pytest.raises(FormatError, match=r"the checkpoint .* is damaged"):
            record(recorded_config(interrupted), interrupted, resume=True)
    assert contents(interrupted) == before
    assert not sprung.exists()
    pickle.loads(junk)
    assert sprung.exists()  # the trap works


def test_a_run_that_begins_removes_what_is_of_no_use_to_it(interrupted: Path, text: Path) -> None:
    folder = interrupted.with_suffix(".ckpt")
    for name in (".step-00000015.safetensors.4194305.partial", "notes.txt"):  # of no process
        (folder / name).touch()
    config = small_config(["gatsby"], steps=9)
    record(config, interrupted, corpus=text, overwrite=True, stop=stop_after(3))
    assert sorted(os.listdir(folder)) == ["notes.txt", "step-00000003.safetensors"]


def test_a_checkpoint_survives_a_loss_of_power_before_an_older_one_goes(
    interrupted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, survived, unlink = Disk(monkeypatch), [], Path.unlink

    def remove(path: Path, **options: Any) -> None:
        if path.name.startswith("step-") and (newer := max(path.parent.iterdir())) != path:
            survived.append(disk.survives(newer, below=tmp_path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", remove)
    config = small_config(["gatsby"], "recording.checkpoint_every=3", steps=12)
    record(config, tmp_path / "a.zarr", corpus=text)
    assert set(survived) == {True}
    flushes = disk.flushes
    record(config, tmp_path / "b.zarr", corpus=text, fsync=False)
    assert disk.flushes == flushes
    kept = interrupted.with_suffix(".ckpt")  # which nobody has flushed; a run resumes from it
    seen: list[bool] = []
    record(
        recorded_config(interrupted), interrupted, resume=True,
        on_step=lambda _: seen.append(disk.survives(min(kept.iterdir()), below=tmp_path)),
    )  # fmt: skip
    assert seen[0]


@pytest.mark.nightly
def test_a_run_with_one_row_resumes_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    """It was killed after a checkpoint, and before its second row."""
    config = small_config(["gatsby-adam"], "recording.every=8", "recording.block_rows=1", steps=10)
    whole, stopped, killed = (tmp_path / f"{name}.zarr" for name in ("whole", "stopped", "killed"))

    def copy(recorder: Any) -> None:
        if recorder.step == 5:
            recorder.commit()  # no file of the first row is then half written
            shutil.copytree(stopped, killed)

    record(config, stopped, corpus=text, stop=stop_after(5), on_step=copy)
    shutil.copytree(stopped.with_suffix(".ckpt"), killed.with_suffix(".ckpt"))
    record(config, killed, corpus=text, resume=True)
    record(config, whole, corpus=text)
    assert same_values(whole, killed).step.values.tolist() == [0, 8, 10]


# When a training writes one, with a clock that the tests move on ------------------------------

STEPS = 1000


class Schedule:
    """A checkpointing of a training of nothing, a step a second; a checkpoint takes `cost`."""

    def __init__(self, folder: Path, *, every: int | None = None, cost: float = 0.0) -> None:
        self.path = folder / "run.zarr"
        RunWriter.create(
            self.path, token=np.arange(2), hidden=1, variables={"W": "float32"}
        ).close()
        self.now, self.cost = 0.0, cost
        self.committed_rows = 0
        self.layout = SimpleNamespace(arrays={})
        self.stops = False
        self.closed: list[tuple[bool, int]] = []  # complete, and the last checkpoint then
        self.weights: Any = {}
        recording = SimpleNamespace(checkpoint_every=every)
        config = SimpleNamespace(
            has_keyframes=False, training=SimpleNamespace(steps=STEPS), recording=recording,
            model_dump=lambda mode: {},
        )  # fmt: skip
        training: Any = SimpleNamespace(config=config, state=self.state)
        self.checkpointing = Checkpointing(
            training, self.path, sources={}, taken_from=None, stop=lambda: self.stops,
            fsync=False, clock=lambda: self.now,
        )  # fmt: skip

    def state(self, recorder: Any, scaler: Any, **others: Any) -> State:
        self.now += self.cost
        return State(step=recorder.step, rows=recorder.rows, weights=self.weights, kept={})

    def step(self, number: int, *, at_block_end: bool = False, waits: bool = True) -> list[int]:
        """Take a step, wait until its checkpoint is written, and return all checkpoints."""
        self.now += 1.0
        recorder: Any = SimpleNamespace(
            step=number, rows=number + 1, at_block_end=at_block_end, writer=self,
            committed_rows=self.committed_rows,
            close=lambda complete: self.closed.append((complete, checkpoints(self.path)[-1])),
        )  # fmt: skip
        self.checkpointing.after_step(recorder, None)
        if waits:
            self.checkpointing.wait()
        return checkpoints(self.path)


@pytest.mark.parametrize(
    ("options", "steps", "taken"),
    [
        ({}, 40, [10, 20, 30, 40]),  # every ten seconds
        ({"cost": 0.5}, 199, [10, 60, 110, 160]),  # at most a hundredth of the time
        ({"every": 5, "cost": 1e6}, 19, [7, 15]),  # at ends of blocks, whatever the time
    ],
)
def test_one_is_taken_by_time_or_by_steps_and_two_are_kept(
    options: dict[str, Any], steps: int, taken: list[int], tmp_path: Path
) -> None:
    schedule = Schedule(tmp_path, **options)
    before: list[int] = []
    for step in range(1, steps + 1):
        schedule.committed_rows = step
        before = (before + [step] * (step in taken))[-2:]
        assert schedule.step(step, at_block_end=step % 4 == 3) == before


def test_no_checkpoint_before_the_rows_of_the_last_are_committed(tmp_path: Path) -> None:
    """Rows that are committed late, or in large blocks, do not fill the disk with checkpoints."""
    schedule = Schedule(tmp_path)
    seen = [schedule.step(step) for step in range(1, 101)]
    assert seen[-1] == [10]
    schedule.committed_rows = 11
    assert schedule.step(101) == [10, 101]
    schedule.committed_rows = 101  # of the 102 rows until step 101
    for step in (120, 139):
        assert schedule.step(step) == [10, 101]
    schedule.now += 10
    schedule.committed_rows = 102
    assert schedule.step(140) == [101, 140]


def test_it_is_written_while_the_training_continues(tmp_path: Path) -> None:
    schedule, goes_on, full = Schedule(tmp_path), threading.Event(), False

    class Weights(dict[str, Any]):
        def items(self) -> Any:  # as a disk that takes its time
            assert goes_on.wait(timeout=30)
            if full:
                raise OSError(28, "No space left on device")
            return super().items()

    schedule.weights = Weights()
    schedule.committed_rows = STEPS + 1
    for step in range(1, 40):
        assert schedule.step(step, waits=False) == []
    goes_on.set()
    assert schedule.step(STEPS) == [STEPS]  # the last one is waited for
    full = True
    with pytest.raises(OSError, match="No space"):
        schedule.step(STEPS)
    schedule.checkpointing.close()


def test_the_last_step_has_one_whatever_the_time(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path)
    assert schedule.step(1) == []
    schedule.stops = True
    assert schedule.step(2, waits=False) == [2]
    assert schedule.closed == [(False, 2)]
    schedule.stops = False
    assert schedule.step(STEPS) == [2, STEPS]
