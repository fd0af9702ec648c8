"""A checkpoint reads as it was written, or not at all."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from disk import Disk  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from small_trainings import same_values, small_config, stop_after  # noqa: E402

from trajstore.errors import FormatError, RunExists  # noqa: E402
from trajstore.trainers import record  # noqa: E402
from trajstore.trainers.recording.step_hooks import Recorder  # noqa: E402
from trajstore.trainers.runs.checkpoint import CheckpointFolder  # noqa: E402
from trajstore.trainers.runs.run_state import RunState  # noqa: E402

pytestmark = pytest.mark.torch


def checkpoint(
    step: int = 7, rows: int = 8, run: str = "2026-01-01T00:00:00+00:00", name: str = "run.zarr"
) -> RunState:
    generator = torch.Generator().manual_seed(step)
    return RunState(
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
    read = RunState.load(tmp_path / "file")
    assert (read.run, read.name) == (made.run, made.name)
    assert (read.step, read.rows) == (made.step, made.rows)
    assert (read.config, read.sources, read.state) == (made.config, made.sources, made.state)
    assert read.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert read.tensors[name].shape == tensor.shape
        assert torch.equal(bits(read.tensors[name]), bits(tensor))


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.nightly)])
def test_any_flipped_bit_is_seen_or_changes_nothing(every: int, tmp_path: Path) -> None:
    made = checkpoint()
    made.save(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    broken = tmp_path / "broken"
    harmless = 0
    for position in range(0, len(data), every):
        broken.write_bytes(
            data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        )
        try:
            read = RunState.load(broken)
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
        RunState.load(tmp_path / "file")


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
            RunState.load(tmp_path / name)
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


def test_a_checkpoint_gone_on_from_goes_when_a_newer_one_is_usable(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run.zarr")
    folder.add(checkpoint(3, 4), 4)
    again = CheckpointFolder(tmp_path / "run.zarr")
    again.clean(again.newest(checkpoint().run, 4))
    again.add(checkpoint(7, 8), 4)
    assert again.steps() == [3, 7]
    again.add(checkpoint(9, 10), 10)
    assert again.steps() == [9]


def test_a_run_with_one_row_resumes_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    """It was killed after a checkpoint, and before its second row."""
    config = small_config(["gatsby"], "recording.every=8", "recording.block_rows=1", steps=10)
    whole, stopped, killed = (tmp_path / f"{name}.zarr" for name in ("whole", "stopped", "killed"))

    def copy(recorder: Recorder) -> None:
        if recorder.step == 5:
            shutil.copytree(stopped, killed)

    record(config, stopped, corpus=text, stop=stop_after(5), on_step=copy)
    shutil.copytree(stopped.with_suffix(".ckpt"), killed.with_suffix(".ckpt"))
    record(config, killed, corpus=text, resume=True)
    record(config, whole, corpus=text)
    assert same_values(whole, killed).step.values.tolist() == [0, 8, 10]
