"""A folder that goes away while it is written to or read; and a clock that goes back."""

from __future__ import annotations

import itertools
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from crashing import create, row

from trajstore import RunWriter, open_run, repair, strict_json, verify
from trajstore.errors import RunNotFound
from trajstore.store.storage.remote_path import location


def append(run: RunWriter, rows: int) -> None:
    for step in range(run.rows, run.rows + rows):
        run.append(step, **row(step))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    with create(tmp_path / "run.zarr") as run:
        append(run, 10)
    return tmp_path / "run.zarr"


def test_a_recording_whose_folder_goes_fails_and_does_not_make_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    run = create(folder / "run.zarr")
    append(run, 5)
    folder.rename(tmp_path / "elsewhere")  # deleting it would race with the writer's files

    def go_on() -> None:
        append(run, 40)
        run.close()

    with pytest.raises(OSError, match="was moved, removed or replaced") as failure:
        go_on()
    assert str(folder) in str(failure.value)
    assert not folder.exists()


def test_a_writer_leaves_another_run_at_its_path_alone(tmp_path: Path) -> None:
    path = tmp_path / "experiment" / "run.zarr"
    run = create(path)
    append(run, 3)
    path.parent.rename(tmp_path / "experiment-1")
    with create(path) as other:
        append(other, 2)

    with pytest.raises(RunNotFound, match="was moved, removed or replaced"):
        run.close()
    assert verify(path).clean
    assert open_run(path).sizes["step"] == 2


def opened(place: Any) -> list[xr.Dataset]:
    """Of arrays without and with zarr."""
    return [
        open_run(place),
        open_run(place, chunks=None),
        xr.open_dataset(place, engine="trajstore", chunks={}),
        *([xr.open_zarr(place)] if isinstance(place, Path) else []),
    ]


def check_vanished(before: list[xr.Dataset]) -> None:
    for ds, name in itertools.product(before, ("W", "loss")):
        with pytest.raises(RunNotFound, match=r"run\.zarr was moved, removed or replaced since"):
            ds[name].compute()


# Removed; or replaced by one with fewer blocks, in smaller shards, or alike.
@pytest.mark.parametrize("rows", [None, 0, 2, 10])
def test_what_is_read_of_a_run_that_has_gone_or_was_replaced_says_so(
    rows: int | None, whole: Path
) -> None:
    before = opened(whole)
    if rows is None:
        shutil.rmtree(whole)
    else:
        with create(whole, overwrite=True, block_rows=2 if rows == 2 else 4) as run:
            append(run, rows)
    check_vanished(before)
    if rows is not None:
        assert {ds.loss.compute().size for ds in opened(whole)} == {rows}


def test_a_run_in_an_object_store_that_has_gone_or_was_replaced() -> None:
    pytest.importorskip("obstore")
    address: Any = location("memory://vanished/run.zarr")
    with create(address) as run:
        append(run, 5)
    before = opened(str(address))
    with create(address, overwrite=True) as run:
        append(run, 5)
    check_vanished(before)
    address.remove_below()
    check_vanished(before)


@pytest.mark.parametrize("look", [verify, repair])
def test_a_vanished_run_is_not_reported_as_damaged(look: Any, whole: Path) -> None:
    def go(*progress: int) -> None:
        shutil.rmtree(whole, ignore_errors=True)

    with pytest.raises(RunNotFound, match="disappeared during the check"):
        look(whole, threads=1, on_progress=go)
    assert not whole.exists()


def test_a_clock_that_goes_back_hours_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        hour = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            cls.hour += 1
            return datetime(2030, 1, 1, tzinfo=UTC) - timedelta(hours=5 * cls.hour)

    monkeypatch.setattr(strict_json, "datetime", Clock)
    path = tmp_path / "run.zarr"
    with create(path, commit_every=0.001) as run:
        append(run, 6)
    with RunWriter.resume(path, rows=6) as run:
        append(run, 4)
    assert Clock.hour > 2
    assert open_run(path).sizes["step"] == 10
    assert verify(path).clean
    assert repair(path, dry_run=True).actions == ()
