"""A run that was extended is trained again as it was: segment by segment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from small_trainings import same_values, small_config, stop_after  # noqa: E402

from trajstore import RunWriter, verify  # noqa: E402
from trajstore.errors import NothingToResume  # noqa: E402
from trajstore.store.metadata.metadata_form import checkpoint_folder  # noqa: E402
from trajstore.trainers import fork, record, recorded_config  # noqa: E402

pytestmark = pytest.mark.torch


CONFIG = small_config(["gatsby"], steps=5)


def extend(path: Path, steps: int, **options: Any) -> None:
    record(recorded_config(path).with_values([f"training.steps={steps}"]), path, resume=True,
           **options)  # fmt: skip


def without_checkpoints(path: Path) -> Path:
    shutil.rmtree(checkpoint_folder(path))
    return path


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """5 steps, extended to 8, and to 12: without a checkpoint."""
    path = tmp_path_factory.mktemp("extended") / "run.zarr"
    record(CONFIG, path, corpus=text)
    extend(path, 8)
    extend(path, 12)
    return without_checkpoints(path)


def listed(path: Path) -> list[tuple[int, int]]:
    """Begin of each segment, and the steps that its configuration has."""
    segments = xr.open_zarr(path).attrs["segments"]
    return [(entry["step"], entry["config"]["training"]["steps"]) for entry in segments]


def same_until(one: Path, other: Path, step: int) -> None:
    a, b = (xr.open_zarr(path).sel(step=slice(None, step)).load() for path in (one, other))
    assert a.step.values[-1] == step
    for name in a.variables:
        if a[name].dtype.kind in "fi":
            assert a[name].values.tobytes() == b[name].values.tobytes(), name


def test_the_configuration_of_each_segment_is_recorded(extended: Path) -> None:
    assert listed(extended) == [(0, 5), (5, 8), (8, 12)]
    assert recorded_config(extended).training.steps == 12
    assert [recorded_config(extended, after=step).training.steps for step in (0, 4, 5, 8)] == [
        5, 5, 8, 12,
    ]  # fmt: skip
    assert verify(extended).clean


def test_a_resume_with_the_same_steps_begins_no_segment(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    record(CONFIG, path, corpus=text, stop=stop_after(2))
    changed = recorded_config(path).with_values(["recording.memory='64MiB'"])
    record(changed, path, resume=True)
    assert "segments" not in xr.open_zarr(path).attrs


@pytest.mark.parametrize(("at", "steps"), [(3, 5), (8, 12)])
def test_a_fork_repeats_every_segment_until_there(
    at: int, steps: int, extended: Path, text: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    other = fork(extended, tmp_path / "other.zarr", at=at, settings=["optimizer.lr=3e-3"],
                 corpus=text, on_note=notes.append)  # fmt: skip
    same_until(extended, other, at)
    assert xr.open_zarr(other).step.values[-1] == steps
    before = [entry for entry in listed(extended) if entry[0] < at]
    assert listed(other) == [*before, (at, steps)]
    assert xr.open_zarr(other).attrs["provenance"]["fork"]["settings"] == {"optimizer.lr": 3e-3}
    assert any("for as many, give training.steps=12" in note for note in notes) == (at < 8)
    assert verify(other).clean


def test_a_run_that_is_cut_keeps_only_what_holds(
    extended: Path, text: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(extended, tmp_path / "run.zarr"))
    RunWriter.resume(path, rows=7).close("interrupted")
    extend(path, 9, corpus=text)
    assert listed(path) == [(0, 5), (5, 8), (6, 9)]
    same_until(extended, path, 6)


def test_an_extension_that_was_not_recorded_is_refused(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    record(CONFIG, path, corpus=text)
    config = recorded_config(path).with_values(["training.steps=8"]).model_dump(mode="json")
    RunWriter.resume(path, attributes={"config": config}).close("complete")
    without_checkpoints(path)
    with pytest.raises(NothingToResume, match="at step 2 W and lr differ, because the learning"):
        fork(path, tmp_path / "other.zarr", at=4, corpus=text)
    assert not (tmp_path / "other.zarr").exists()


@pytest.mark.nightly
def test_a_difference_in_an_early_segment_is_recorded_from_there_on(
    extended: Path, text: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(extended, tmp_path / "run.zarr"))
    ds = xr.open_zarr(path).load()
    names = [str(name) for name in ds.data_vars]
    RunWriter.resume(path, rows=4).close("interrupted")
    with RunWriter.resume(path) as run:
        for row in range(4, 13):
            values = {name: ds[name].values[row].copy() for name in names}
            values["logits"][7] *= 2
            run.append(row, **values)
    notes: list[str] = []
    other = fork(path, tmp_path / "other.zarr", at=10, corpus=text, on_note=notes.append)
    assert any("differs from the recorded one from step 4 on" in note for note in notes)
    same_values(extended, other)
    assert xr.open_zarr(other).attrs["provenance"]["fork"]["proven_until"] == 3


def test_threads_are_recorded_and_used_again(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    own = torch.get_num_threads()
    used: list[int] = []
    count: Any = lambda *_: used.append(torch.get_num_threads())  # noqa: E731
    record(CONFIG, path, corpus=text, threads=own + 1, on_step=count)
    extend(path, 6, on_step=count)
    extend(path, 7, threads=own + 2, on_step=count)
    assert used == [own + 1] * 6 + [own + 2]
    assert torch.get_num_threads() == own
    provenance = xr.open_zarr(path).attrs["provenance"]
    assert provenance["threads"] == own + 1
    assert [entry.get("threads") for entry in provenance["resumed"]] == [None, own + 2]
    used.clear()
    extend(without_checkpoints(path), 8, corpus=text, on_retrain=count, on_step=count)
    assert used == [own + 1] * 6 + [own + 2] * 2
