"""Rows that are committed before their block is full, with a clock that the tests move on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but, random_bits
from still_timer import StillTimer, commit_now

from trajstore import RunWriter, repair, verify
from trajstore.store.writing.block_writer import BlockWriter

TYPES = {"W": "bfloat16", "grad": "float16", "loss": "float32"}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    StillTimer.install(monkeypatch)


def create(path: Path, **options: Any) -> RunWriter:
    arguments: dict[str, Any] = {
        "token": np.arange(5),
        "hidden": 3,
        "variables": TYPES,
        "block_rows": 4,
    }
    return RunWriter.create(path, **(arguments | options))


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "W": random_bits((5, 3), step),
        "grad": random_bits((5, 3), step + 1000),
        "loss": np.float32(step),
    }


def check(path: Path, rows: int) -> None:
    """Fail unless a reader sees so many rows, each whole."""
    ds = xr.open_zarr(path)
    assert ds.sizes["step"] == ds.attrs["committed_rows"] == rows
    assert ds.step.values.tolist() == ds.loss.values.tolist() == list(range(rows))
    for step in range(rows):
        assert (ds.W.values[step].view("u4") == row(step)["W"].astype("u4") << 16).all()


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "zarr.json"
    }


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


def test_rows_are_seen_when_the_time_is_over(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr", commit_every=10.0) as run:
        run.append(**row(0))
        assert ask(run, 9.0) == 1.0
        check(run.path, 0)
        assert ask(run, 10.0) == 10.0
        check(run.path, 1)
        run.append(**row(1))
        run.append(**row(2))
        assert ask(run, 15.0) == 5.0
        check(run.path, 1)
        ask(run, 20.0)
        check(run.path, 3)
        run.append(**row(3))  # the block is full
        run.append(**row(4))
        ask(run, 20.0)
        check(run.path, 4)
        ask(run, 30.0)
        check(run.path, 5)
    check(run.path, 5)
    assert xr.open_zarr(run.path).attrs["status"] == "complete"


def test_ten_seconds_is_what_is_meant_without_an_option(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        run.append(**row(0))
        assert ask(run, 9.99) == pytest.approx(0.01)
        ask(run, 10.0)
        check(run.path, 1)


def test_without_new_rows_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.zarr"
    with create(path) as run:
        assert ask(run, 100.0) == 10.0
        for step in range(6):
            run.append(**row(step))
        ask(run, 200.0)
        check(path, 6)
        moves: list[Any] = []
        monkeypatch.setattr(
            "trajstore.store.storage.atomic.os.replace", lambda *names: moves.append(names)
        )
        ask(run, 300.0)
        assert moves == []
        monkeypatch.undo()
    with RunWriter.resume(path) as run:
        updated = xr.open_zarr(path).attrs["updated"]
        commit_now(run)  # what was there before are no new rows
        assert xr.open_zarr(path).attrs["updated"] == updated


def test_none_is_for_whole_blocks_only(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr", commit_every=None) as run:
        assert run._blocks._timer is None
        for step in range(6):
            run.append(**row(step))
    check(run.path, 6)
    with RunWriter.resume(run.path, commit_every=None) as run:
        assert run._blocks._timer is None


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_end_is_that_of_a_run_without(
    tmp_path: Path, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object by object, with a commit after every row and the last block left as it was."""
    monkeypatch.setattr("trajstore.store.writing.new_run.new_identity", lambda: "0" * 32)
    options: dict[str, Any] = {"buffers": buffers}
    with create(tmp_path / "whole.zarr", **options, commit_every=None) as whole:
        for step in range(11):
            whole.append(**row(step))
    with create(tmp_path / "run.zarr", **options) as run:
        for step in range(11):
            run.append(**row(step))
            commit_now(run)
            check(run.path, step + 1)
            found = verify(run.path)
            assert found.clean, found.problems
            assert all("in row 0" in note for note in found.notes)
    assert contents(run.path) == contents(whole.path)
    assert run.bytes_written == whole.bytes_written > 0


def test_a_reader_of_the_shorter_run_finds_its_rows(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        opened: list[xr.Dataset] = []
        for step in range(7):
            run.append(**row(step))
            commit_now(run)
            opened.append(xr.open_zarr(run.path))
        for rows, ds in enumerate(opened, 1):
            assert ds.loss.values.tolist() == list(range(rows))
            assert (ds.W.values[-1].view("u4") == row(rows - 1)["W"].astype("u4") << 16).all()


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let no object into its place until that is called."""
    gate, move = threading.Event(), os.replace

    def replace(source: Any, target: Any) -> None:
        assert gate.wait(timeout=60)
        move(source, target)

    monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", replace)
    return gate.set


def test_no_commit_by_time_while_a_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "run.zarr")
    let_go = hold_writes(monkeypatch)
    for step in range(6):
        run.append(**row(step))
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
    run.append(**row(0))
    let_go = hold_writes(monkeypatch)
    assert run._blocks._commit_unfinished()
    for step in range(1, rows):
        run.append(**row(step))
    assert run.seconds_waited == 0
    rest = threading.Thread(target=lambda: [run.append(**row(step)) for step in range(rows, 14)])
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
        run.append(**row(0))
        places = run.next_rows(2)
        for place in places.values():
            place[...] = 0x7FC1 if place.itemsize == 2 else 7
        commit_now(run)
        check(run.path, 1)
        for at, step in enumerate((1, 2)):
            values = row(step)
            places["W"][at], places["grad"][at] = values["W"], values["grad"]
            places["loss"][at] = values["loss"].view("u4")
        run.commit_rows([1, 2])
        commit_now(run)
        check(run.path, 3)


class Full:
    """Stands in for the move of an object into its place, which the disk has no room for."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._move = os.replace

    def __call__(self, source: Any, target: Any) -> None:
        if self._left == 0:
            raise OSError(28, "No space left on device")
        self._left -= 1
        self._move(source, target)


OBJECTS = 9  # of a commit: four shards, four metadata files, the root


@pytest.mark.parametrize("left", nightly_but(range(OBJECTS), 0, 4, 8))
def test_a_failure_is_raised_by_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Whichever of its writes fails, readers see the commit before, and a resume goes on."""
    run = create(tmp_path / "run.zarr")
    for step in range(5):
        run.append(**row(step))
    commit_now(run)
    run.append(**row(5))
    monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", Full(left))
    assert run._blocks._commit_unfinished()
    assert run._blocks._last is not None
    with pytest.raises(OSError, match="No space"):
        run._blocks._last.result()
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        run.append(**row(6))
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
            run.append(**row(step))
            commit_now(run)
    check(run.path, 9)
    assert verify(run.path).clean


def test_an_error_in_the_thread_of_the_timer_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "run.zarr")
    run.append(**row(0))

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(BlockWriter, "encode", fail)
        assert ask(run, 10.0) == 10.0
    with pytest.raises(MemoryError, match="no room"):
        run.append(**row(1))
    with pytest.raises(MemoryError, match="no room"):
        run.close()
    check(run.path, 0)


@pytest.mark.parametrize("rows", nightly_but(range(8), 3, 4))
def test_a_run_is_cut_within_a_block_and_grows_again(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "run.zarr"
    with create(path, commit_every=None) as run:
        for step in range(14):
            run.append(**row(step))
    with RunWriter.resume(path, rows=rows) as run:
        check(path, rows)
        for step in range(rows, 8):
            run.append(**row(step))
            commit_now(run)
            check(path, step + 1)
            assert verify(path).clean
    assert sorted(file.name for file in (path / "W").glob("c.*")) == ["c.0.0.0", "c.1.0.0"]


def test_a_real_timer_commits_while_the_next_step_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with create(tmp_path / "run.zarr", commit_every=1e-3) as run:
        seen = threading.Event()
        committed = run._blocks._committer.commit

        def commit(change: Any, block: Any) -> None:
            committed(change, block)
            seen.set()

        monkeypatch.setattr(run._blocks._committer, "commit", commit)
        run.append(**row(0))
        assert seen.wait(timeout=60)
        check(run.path, 1)
        assert run._blocks._timer is not None
    assert not run._blocks._timer._thread.is_alive()
    check(run.path, 1)


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
