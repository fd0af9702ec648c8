"""A checkpoint reads as it was written, or not at all; and when a training writes one."""

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

torch = pytest.importorskip("torch")
from disk import Disk  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from small_trainings import same_values, small_config, stop_after  # noqa: E402

from trajstore import RunWriter  # noqa: E402
from trajstore.errors import FormatError, RunExists  # noqa: E402
from trajstore.store.storage.remote_path import Location  # noqa: E402
from trajstore.trainers import record  # noqa: E402
from trajstore.trainers.recording.capture import Recorder  # noqa: E402
from trajstore.trainers.runs.checkpointing import Checkpointing  # noqa: E402
from trajstore.trainers.states.checkpoints import CheckpointFolder, load_state  # noqa: E402
from trajstore.trainers.states.state import State  # noqa: E402

pytestmark = pytest.mark.torch


def checkpoint(
    step: int = 7, rows: int = 8, run: str = "2026-01-01T00:00:00+00:00", name: str = "run.zarr"
) -> State:
    generator = torch.Generator().manual_seed(step)
    return State(
        run=run,
        name=name,
        step=step,
        rows=rows,
        config={"training": {"steps": 9}},
        sources={"corpus": "/texts/übung.txt"},
        state={"random": [1, 2.5, None], "rate": 0.1, "odd": float("-inf")},
        tensors={
            "weights": torch.randn(5, 3, generator=generator).bfloat16(),
            "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float16),
            "count": torch.tensor(3.0),
            "generator": generator.get_state(),
            "empty": torch.empty(0, 4),
        },
    )


def bits(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


def test_it_reads_as_it_was_written(tmp_path: Path) -> None:
    made = checkpoint()
    size = made.save(tmp_path / "file")
    assert size == (tmp_path / "file").stat().st_size
    read = load_state(tmp_path / "file")
    assert (read.run, read.name) == (made.run, made.name)
    assert (read.step, read.rows) == (made.step, made.rows)
    assert (read.config, read.sources, read.state) == (made.config, made.sources, made.state)
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert read.tensors[name].shape == tensor.shape
        assert torch.equal(bits(read.tensors[name]), bits(tensor))


def test_any_flipped_bit_is_seen_or_changes_nothing(tmp_path: Path) -> None:
    made = checkpoint()
    made.save(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    broken = tmp_path / "broken"
    harmless = 0
    for position in range(0, len(data), 11):
        broken.write_bytes(
            data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        )
        try:
            read = load_state(broken)
        except FormatError:
            continue
        harmless += 1
        assert (read.step, read.rows, read.state) == (made.step, made.rows, made.state)
        for name, tensor in made.tensors.items():
            assert torch.equal(bits(read.tensors[name]), bits(tensor))
    assert harmless < 20  # such as one space for another in the header's padding


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    checkpoint().save(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data[:size])
    with pytest.raises(FormatError, match=r"the checkpoint .* is damaged"):
        load_state(tmp_path / "file")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_what_is_pickled_or_foreign_is_not_executed(tmp_path: Path) -> None:
    checkpoint().save(tmp_path / "file")
    sprung = tmp_path / "sprung"
    junk = pickle.dumps(Trap(sprung))
    torch.save({"weights": Trap(sprung)}, tmp_path / "torch")
    save_file({"weights": torch.zeros(3)}, tmp_path / "foreign")
    contents = {
        "alone": junk,
        "behind": (tmp_path / "file").read_bytes() + junk,
        "torch": (tmp_path / "torch").read_bytes(),
        "foreign": (tmp_path / "foreign").read_bytes(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=r"the checkpoint .* is damaged"):
            load_state(tmp_path / name)
    assert not sprung.exists()
    pickle.loads(junk)
    assert sprung.exists()  # the trap works


def test_only_the_newest_committed_checkpoint_stays(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run.zarr")
    for step, committed, left in (
        (3, 0, [3]),
        (7, 4, [3, 7]),
        (11, 4, [3, 7, 11]),
        (15, 12, [11, 15]),
        (19, 20, [19]),
    ):
        folder.add(checkpoint(step, step + 1), committed)
        assert folder.steps() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ckpt"]


def test_the_newest_that_is_not_past_the_rows_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path / "run.zarr")
    run = checkpoint().run
    assert folder.newest(run, 100) is None
    for step in (3, 7, 11):
        folder.add(checkpoint(step, step + 1), 0)
    for rows, step in ((3, None), (4, 3), (11, 7), (12, 11), (99, 11)):
        found = folder.newest(run, rows)
        assert (found.step if found else None) == step
    assert folder.newest("another run", 99) is None
    monkeypatch.setattr(folder, "steps", lambda: [3, 7, 15])  # a recording removes 15 meanwhile
    found = folder.newest(run, 99)
    assert found is not None
    assert found.step == 7


def test_a_run_that_begins_removes_what_is_of_no_use_to_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run.zarr")
    folder.clean(None)  # there is no folder yet
    for step in (3, 7, 11):
        folder.add(checkpoint(step, step + 1), 0)
    dead = folder.path / f".step-00000015.safetensors.{_dead_process()}.partial"
    dead.touch()
    (folder.path / "notes.txt").touch()
    taken = folder.newest(checkpoint().run, 8)
    CheckpointFolder(tmp_path / "run.zarr").clean(taken)
    assert sorted(os.listdir(folder.path)) == ["notes.txt", "step-00000007.safetensors"]
    CheckpointFolder(tmp_path / "run.zarr").clean(None)
    assert os.listdir(folder.path) == ["notes.txt"]


@pytest.mark.parametrize(("one", "other"), [("run.zarr", "run"), ("run", "run.zarr")])
def test_two_runs_that_are_named_alike_leave_each_others_alone(
    tmp_path: Path, one: str, other: str
) -> None:
    (tmp_path / one).mkdir()
    (tmp_path / other).mkdir()
    first, second = (CheckpointFolder(tmp_path / name) for name in (one, other))
    assert first.path == second.path, "both names make the same folder"
    first.clean(None)
    first.add(checkpoint(3, 4, name=one), 4)
    with pytest.raises(RunExists, match=f"run.ckpt has checkpoints of {one}, and"):
        second.check()
    first.check()
    second.clean(None)
    second.add(checkpoint(7, 8, name=other), 8)
    with pytest.raises(RunExists, match=f"has checkpoints of {one}"):
        second.add(checkpoint(3, 4, name=other), 8)
    for folder, name, step in ((first, one, 3), (second, other, 7)):
        found = folder.newest(checkpoint().run, 99)
        assert found is not None
        assert (found.name, found.step) == (name, step)
    (tmp_path / one).rmdir()  # those of a run that has gone are nobody's
    CheckpointFolder(tmp_path / other).clean(second.newest(checkpoint().run, 99))
    assert second.steps() == [7]


def test_a_run_that_was_renamed_has_its_checkpoints(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run.zarr")
    folder.add(checkpoint(3, 4), 4)
    folder.path.rename(tmp_path / "other.ckpt")
    (tmp_path / "run.zarr").mkdir()  # another one has been made since
    renamed = CheckpointFolder(tmp_path / "other.zarr")
    found = renamed.newest(checkpoint().run, 4)
    assert found is not None
    assert found.step == 3
    renamed.check()
    renamed.clean(None)
    assert renamed.steps() == []


def test_a_checkpoint_survives_a_loss_of_power_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    survived = []
    folder = CheckpointFolder(tmp_path / "run.zarr")
    unlink = Path.unlink

    def remove(path: Path, **options: Any) -> None:
        survived.append(disk.survives(folder.path, below=tmp_path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", remove)
    folder.add(checkpoint(3, 4), 4)
    folder.add(checkpoint(7, 8), 8)
    assert survived == [True]
    flushes = disk.flushes
    other = CheckpointFolder(tmp_path / "other.zarr", fsync=False)
    other.add(checkpoint(3, 4), 4)
    other.keep(checkpoint(3, 4))
    assert disk.flushes == flushes
    CheckpointFolder(tmp_path / "other.zarr").keep(checkpoint(3, 4))  # a run is resumed from it
    assert disk.survives(other.path, below=tmp_path)


def _dead_process() -> int:
    child = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(child, 0)
    return child


def test_a_run_with_one_row_resumes_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    """It was killed after a checkpoint, and before its second row."""
    config = small_config(["gatsby-adam"], "recording.every=8", "recording.block_rows=1", steps=10)
    whole, stopped, killed = (tmp_path / f"{name}.zarr" for name in ("whole", "stopped", "killed"))

    def copy(recorder: Recorder) -> None:
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
        self.now = 0.0
        self.cost = cost
        self.committed_rows = 0
        self.layout = SimpleNamespace(arrays={})
        self.stops = False
        training: Any = SimpleNamespace(
            config=SimpleNamespace(
                has_keyframes=False,
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
        self.state_class = State
        self.checkpointing._take = self._take  # type: ignore[method-assign]

    def _take(self, recorder: Any, scaler: Any) -> State:
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
        return CheckpointFolder(self.path).steps()

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

    class SlowState(State):
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
