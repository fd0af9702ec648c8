"""When checkpoints are taken, with a clock that the tests move on; what is in them is not asked."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from trajstore import RunWriter
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.runs.checkpoint import CheckpointFolder, Checkpointing
from trajstore.trainers.runs.run_state import RunState

pytestmark = pytest.mark.torch

STEPS = 1000


def checkpoints(run: Path) -> list[int]:
    return CheckpointFolder(run).steps()


class Schedule:
    """A checkpointing of a training of nothing, a step a second; a checkpoint takes `cost`."""

    def __init__(self, folder: Path, *, every: int | None = None, cost: float = 0.0) -> None:
        self.path = folder / "run.zarr"
        RunWriter.create(
            self.path, token=np.arange(2), hidden=1, variables={"W": "float32"}
        ).close()
        self.now = 0.0
        self.cost = cost
        self.committed_rows = 0
        self.layout = SimpleNamespace(arrays={})
        self.stops = False
        training: Any = SimpleNamespace(
            config=SimpleNamespace(
                training=SimpleNamespace(steps=STEPS),
                recording=SimpleNamespace(checkpoint_every=every),
            )
        )
        self.checkpointing = Checkpointing(
            training,
            self.path,
            sources={},
            taken_from=None,
            stop=lambda: self.stops,
            fsync=False,
            clock=lambda: self.now,
        )
        self.state_class = RunState
        self.checkpointing._take = self._take  # type: ignore[method-assign]

    def _take(self, recorder: Any, scaler: Any) -> RunState:
        self.now += self.cost
        return self.state_class(
            run="", name="run.zarr", step=recorder.step, rows=recorder.rows, config={}, sources={},
            state={}, tensors={},
        )  # fmt: skip

    def step(self, number: int, *, at_block_end: bool = False, waits: bool = True) -> list[int]:
        """Take a step, wait until its checkpoint is written, and return all checkpoints."""
        self.now += 1.0
        recorder: Any = SimpleNamespace(
            step=number,
            rows=number + 1,
            at_block_end=at_block_end,
            writer=self,
            close=self.close,
            committed_rows=self.committed_rows,
        )
        self.checkpointing.after_step(recorder, None)
        if waits:
            self.checkpointing.wait()
        return checkpoints(self.path)

    def close(self, *, complete: bool) -> None:
        assert not complete


def test_without_an_option_one_is_taken_every_ten_seconds(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path)
    seen = []
    for step in range(1, 41):
        schedule.committed_rows = step
        seen.append(schedule.step(step))
    assert seen[8] == []
    assert seen[9] == seen[18] == [10]
    assert seen[19] == [10, 20]
    assert seen[29] == [20, 30]
    assert seen[39] == [30, 40]
    assert all(len(steps) <= 2 for steps in seen)


def test_checkpoints_take_at_most_a_hundredth_of_the_time(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path, cost=0.5)
    taken = []
    for step in range(1, 200):
        schedule.committed_rows = step
        taken += [last for last in schedule.step(step)[-1:] if last not in taken]
    assert taken == [10, 60, 110, 160]


def test_no_checkpoint_before_the_rows_of_the_last_are_committed(tmp_path: Path) -> None:
    """Rows that are committed late, or in large blocks, do not fill the disk with checkpoints."""
    schedule = Schedule(tmp_path)
    seen = [schedule.step(step) for step in range(1, 101)]
    assert seen[-1] == [10]
    schedule.committed_rows = 11
    assert schedule.step(101) == [10, 101]
    schedule.committed_rows = 101  # of the 102 rows until step 101
    assert schedule.step(120) == [10, 101]
    for step in range(121, 140):
        assert schedule.step(step) == [10, 101]
    schedule.committed_rows = 102
    assert schedule.step(140) == [101, 140]


def test_it_is_written_while_the_training_continues(tmp_path: Path) -> None:
    schedule, goes_on, full = Schedule(tmp_path), threading.Event(), False

    class SlowState(RunState):
        def save(self, path: Location, *, fsync: bool = True) -> int:
            assert goes_on.wait(timeout=30)
            if full:
                raise OSError(28, "No space left on device")
            return super().save(path, fsync=fsync)

    schedule.state_class = SlowState
    schedule.committed_rows = STEPS + 1
    for step in range(1, 40):
        assert schedule.step(step, waits=False) == []
    goes_on.set()
    assert schedule.step(STEPS) == [STEPS]  # the last one is waited for
    full = True
    with pytest.raises(OSError, match="No space"):
        schedule.step(STEPS)
    schedule.checkpointing.close()


def test_a_number_of_steps_does_not_depend_on_time(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path, every=5)
    schedule.now = 1e6
    seen = []
    for step in range(1, 20):
        schedule.committed_rows = step
        seen.append(schedule.step(step, at_block_end=step % 4 == 3))
    assert [step for step, there in enumerate(seen, 1) if there[-1:] == [step]] == [7, 15]


def test_the_last_step_has_one_whatever_the_time(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path)
    assert schedule.step(1) == []
    schedule.stops = True
    assert schedule.step(2) == [2]
    schedule.stops = False
    assert schedule.step(STEPS) == [2, STEPS]
