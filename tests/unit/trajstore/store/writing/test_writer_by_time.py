"""Rows that are committed before their block is full, with a clock that the tests move on."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but
from crashing import BLOCK, HIDDEN, TOKENS, TYPES, check_rows, row
from disk import Writes, objects_of
from still_timer import StillTimer, commit_now

from trajstore import RunWriter, repair, verify
from trajstore.store.writing.blocks import BlockWriter


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    StillTimer.install(monkeypatch)


def create(path: Path, **options: Any) -> RunWriter:
    sizes = {"token": np.arange(TOKENS), "hidden": HIDDEN, "variables": TYPES}
    return RunWriter.create(path, block_rows=BLOCK, **sizes, **options)


def check(path: Path, rows: int) -> None:
    """Fail unless a reader sees so many rows, each whole."""
    ds = xr.open_zarr(path)
    assert ds.sizes["step"] == ds.attrs["committed_rows"] == rows
    assert ds.step.values.tolist() == list(range(rows))
    check_rows(ds)


def settle(run: RunWriter) -> None:
    """Wait for what is being written."""
    if run._blocks._last is not None:
        run._blocks._last.result()


def ask(run: RunWriter, now: float) -> float | None:
    """Have the timer ask at a moment at which nothing is being written, and wait for the commit."""
    timer = StillTimer.of(run)
    settle(run)
    timer.now = now
    seconds = timer.commit_if_due()
    settle(run)
    return seconds


def test_rows_are_seen_after_ten_seconds(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        run.append(0, **row(0))
        assert ask(run, 9.0) == 1.0
        check(run.path, 0)
        assert ask(run, 10.0) == 10.0
        check(run.path, 1)
        run.append(1, **row(1))
        run.append(2, **row(2))
        assert ask(run, 15.0) == 5.0
        check(run.path, 1)
        ask(run, 20.0)
        check(run.path, 3)
        run.append(3, **row(3))  # the block is full
        run.append(4, **row(4))
        ask(run, 20.0)
        check(run.path, 4)
        ask(run, 30.0)
        check(run.path, 5)
    check(run.path, 5)
    assert xr.open_zarr(run.path).attrs["status"] == "complete"


def test_without_new_rows_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.zarr"
    with create(path) as run:
        assert ask(run, 100.0) == 10.0
        for step in range(6):
            run.append(step, **row(step))
        ask(run, 200.0)
        check(path, 6)
        moves: list[Any] = []
        monkeypatch.setattr(os, "replace", lambda *names: moves.append(names))
        ask(run, 300.0)
        assert moves == []
        monkeypatch.undo()
    with RunWriter.resume(path) as run:
        updated = xr.open_zarr(path).attrs["updated"]
        commit_now(run)  # what was there before are no new rows
        assert xr.open_zarr(path).attrs["updated"] == updated


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_end_is_that_of_a_run_without(
    tmp_path: Path, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object by object, with a commit after every row and the last block left as it was."""
    with monkeypatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID("0" * 32))
        whole = create(tmp_path / "whole.zarr", buffers=buffers, commit_every=None)
        run = create(tmp_path / "run.zarr", buffers=buffers)
    with whole:
        for step in range(11):
            whole.append(step, **row(step))
    with run:
        for step in range(11):
            run.append(step, **row(step))
            commit_now(run)
            if step in (2, 3, 4):  # in the last row of a block, and beside it
                check(run.path, step + 1)
                found = verify(run.path)
                assert found.clean, found.problems
                assert all("in row 0" in note for note in found.notes)
    assert objects_of(run.path) == objects_of(whole.path)
    assert run.bytes_written == whole.bytes_written > 0


def test_a_reader_of_the_shorter_run_finds_its_rows(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        opened: list[xr.Dataset] = []
        for step in range(7):
            run.append(step, **row(step))
            commit_now(run)
            opened.append(xr.open_zarr(run.path))
        for rows, ds in enumerate(opened, 1):
            assert ds.sizes["step"] == rows
            check_rows(ds)


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let no object into its place until that is called."""
    gate, move = threading.Event(), os.replace

    def replace(source: Any, target: Any) -> None:
        assert gate.wait(timeout=60)
        move(source, target)

    monkeypatch.setattr(os, "replace", replace)
    return gate.set


def test_no_commit_by_time_while_a_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "run.zarr")
    let_go = hold_writes(monkeypatch)
    for step in range(6):
        run.append(step, **row(step))
    timer = StillTimer.of(run)
    timer.now = 10.0
    assert timer.commit_if_due() == 1.0, "to be asked again soon"
    assert run.committed_rows == 0
    let_go()
    commit_now(run)
    check(run.path, 6)
    run.close()


@pytest.mark.parametrize(("buffers", "rows"), [(1, 4), (2, 8)])
def test_the_recording_does_not_wait_for_it_until_the_buffer_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffers: int, rows: int
) -> None:
    """Its buffer is filled on, and is not filled anew before it is written."""
    run = create(tmp_path / "run.zarr", buffers=buffers)
    run.append(0, **row(0))
    let_go = hold_writes(monkeypatch)
    assert run._blocks._commit_unfinished()
    for step in range(1, rows):
        run.append(step, **row(step))
    assert run.seconds_waited == 0
    rest = threading.Thread(target=lambda: [run.append(at, **row(at)) for at in range(rows, 14)])
    rest.start()
    assert run.committed_rows == 0
    let_go()
    rest.join(timeout=60)
    assert run.seconds_waited > 0
    run.close()
    check(run.path, 14)
    assert verify(run.path).clean


def test_rows_that_are_being_filled_are_no_part_of_it(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        run.append(0, **row(0))
        places = run.next_rows(2)
        for place in places.values():
            place[...] = 0x7FC1 if place.itemsize == 2 else 7
        commit_now(run)
        check(run.path, 1)
        for at, step in enumerate((1, 2)):
            for name, value in row(step).items():
                places[name][at] = value.view(places[name].dtype)
        run.commit_rows([1, 2])
        commit_now(run)
        check(run.path, 3)


OBJECTS = 11  # of a commit: five shards, five metadata files, the root


@pytest.mark.parametrize("left", nightly_but(range(0, OBJECTS, 2), 0, 10))
def test_a_failure_is_raised_by_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Whichever of its writes fails, readers see the commit before, and a resume goes on."""
    run = create(tmp_path / "run.zarr")
    for step in range(5):
        run.append(step, **row(step))
    commit_now(run)
    run.append(5, **row(5))
    monkeypatch.setattr(os, "replace", Writes(left))
    assert run._blocks._commit_unfinished()
    assert run._blocks._last is not None
    with pytest.raises(OSError, match="No space"):
        run._blocks._last.result()
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        run.append(6, **row(6))
    timer = StillTimer.of(run)
    timer.now = 100.0
    assert timer.commit_if_due() == 10.0, "nothing is begun any more"
    with pytest.raises(OSError, match="No space"):
        run.close()
    check(run.path, 5)
    found = verify(run.path)
    assert found.clean, found.problems
    repair(run.path)
    check(run.path, 5)
    with RunWriter.resume(run.path) as run:
        for step in range(5, 9):
            run.append(step, **row(step))
            commit_now(run)
    check(run.path, 9)
    assert verify(run.path).clean


def test_an_error_in_the_thread_of_the_timer_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "run.zarr")
    run.append(0, **row(0))

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(BlockWriter, "encode", fail)
        assert ask(run, 10.0) == 10.0
    with pytest.raises(MemoryError, match="no room"):
        run.append(1, **row(1))
    with pytest.raises(MemoryError, match="no room"):
        run.close()
    check(run.path, 0)


def test_a_real_timer_commits_until_the_run_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with create(tmp_path / "run.zarr", commit_every=1e-3) as run:
        run.append(0, **row(0))
        while not run.committed_rows:
            pass
        check(run.path, 1)
        timer = run._blocks._timer
    assert timer is not None
    assert not timer._thread.is_alive()


def test_a_writer_that_is_dropped_is_not_held_by_its_timer(tmp_path: Path) -> None:
    import gc
    import weakref

    run = create(tmp_path / "run.zarr")
    timer, gone = StillTimer.of(run), weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    timer.now = 10.0
    assert timer.commit_if_due() is None


def test_rows_are_seen_after_a_commit(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        for step in range(BLOCK + 1):
            run.commit()
            check(run.path, step)
            run.append(step, **row(step))
        run.commit()
        run.commit()  # there is nothing new
        check(run.path, BLOCK + 1)
        assert ask(run, 9.0) == 1.0  # this was a commit as one by time
    check(run.path, BLOCK + 1)
    assert verify(run.path).clean
