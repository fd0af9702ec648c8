"""Blocks: the order of encoding and writing, their memory, and commits before they are full."""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import platform
import resource
import shutil
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but
from crashing import BLOCK, check, check_rows, create, extend, row
from disk import failing_moves, held_moves, moves, objects_of
from still_timer import StillTimer, commit_now

from trajstore import RunWriter, repair, verify
from trajstore.codec.chunk import Chain
from trajstore.store.metadata.block_plan import CHUNKS_AHEAD, Layout, plan
from trajstore.store.writing.blocks import BlockWriter, ReadyMemory
from trajstore.store.writing.commit import CommitTimer

RUNS = ((0, "5a" * 16),)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = plan({"W": "bfloat16"}, tokens=3, hidden=2, block_rows=4, threads=1)
    for name in found.arrays:
        (tmp_path / name).mkdir()
    return replace(found, runs=RUNS)


def block(layout: Layout) -> dict[str, np.ndarray]:
    return {
        name: np.zeros((layout.block_rows, *array.row), array.native.bits)
        for name, array in layout.arrays.items()
    }


def with_chains(layout: Layout, kind: type[Chain]) -> Layout:
    """The layout, with the chain of each array in another class."""
    arrays = layout.arrays.items()
    chains = {name: replace(each, chain=kind(**vars(each.chain))) for name, each in arrays}
    return replace(layout, arrays=chains)


def test_the_next_block_is_encoded_while_one_is_written(tmp_path: Path, layout: Layout) -> None:
    encoded = threading.Semaphore(0)

    class Counted(Chain):
        def encode(self, *arguments: Any) -> bytes:
            data = super().encode(*arguments)
            encoded.release()
            return data

    pipeline = BlockWriter(tmp_path, with_chains(layout, Counted))
    for number in range(2):
        pipeline.encode(number, block(layout))
    rows, shards = pipeline.write(0, layout.block_rows)
    assert rows == layout.block_rows
    assert [name for name, *_ in shards] == list(layout.arrays)
    assert all(encoded.acquire(timeout=30) for _ in range(2 * len(layout.arrays)))
    pipeline.close()


def test_few_chunks_are_encoded_ahead(tmp_path: Path) -> None:
    planned = plan({"W": "bfloat16"}, tokens=128 * 40, hidden=256, block_rows=32, threads=1)
    layout = replace(planned, runs=RUNS)
    w = layout.arrays["W"]
    assert w.parts * math.prod(w.form(RUNS).grid) > 2 * CHUNKS_AHEAD
    started = threading.Semaphore(0)
    taken, most = 0, CHUNKS_AHEAD * layout.threads + 1

    class Empty(Chain):
        def encode(self, *_: Any) -> bytes:
            started.release()
            return b""

    pipeline = BlockWriter(tmp_path, with_chains(layout, Empty))
    pipeline.encode(0, block(layout))
    for _, parts in pipeline._shards(tmp_path, 0, layout.block_rows, {}):
        for _part in parts:
            taken += 1
            # Those that may be ahead, and the one that was taken, have begun; no other has.
            assert taken > 1 or all(started.acquire(timeout=30) for _ in range(most))
            assert taken > 1 or not started.acquire(blocking=False)
    pipeline.close()
    assert taken == sum(
        array.parts * (math.prod(array.form(RUNS).grid) + 1) for array in layout.arrays.values()
    )


PROCESS = """
import sys, threading
import numpy as np
from trajstore import RunWriter

def create(name, tokens=2, every=1e-3):
    return RunWriter.create(
        name, token=np.arange(tokens), hidden=64, variables={"W": "float32"}, block_rows=16,
        commit_every=every, fsync=False,
    )

def train():
    with create("run.zarr", 2048) as run:
        for step in range(16 * 6):
            run.append(step=step, W=np.full((2048, 64), step, "float32"))
            if step == 16:
                started.set()

runs = [create("late.zarr", every=1e300), create("soon.zarr")]
for run in runs:
    run.append(step=0, W=np.zeros((2, 64), "float32"))
while not run.committed_rows:
    pass
started = threading.Event()
threading.Thread(target=train).start()
started.wait()
"""


def test_a_process_waits_for_a_recording_and_for_no_run_that_is_left_open(tmp_path: Path) -> None:
    """Pools take no more work then, and the caller's thread writes behind the writing thread."""
    subprocess.run([sys.executable, "-c", PROCESS], cwd=tmp_path, check=True, timeout=120)
    for name, rows in (("late.zarr", 0), ("soon.zarr", 1)):
        ds = xr.open_zarr(tmp_path / name)
        assert (ds.sizes["step"], ds.attrs["status"]) == (rows, "recording")
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.attrs["status"] == "complete"
    assert ds.step.values.tolist() == list(range(96))
    assert (ds.step == ds.W).all()


ROWS, ROW = 8, (4 << 20) // 4  # rows of 4 MiB


def faults_of_writing(first: int, row: int, *, is_ready: bool) -> int:
    """How often the first write to two rows had to get memory, in a run that began at `first`."""
    memory = mmap.mmap(-1, 2 * ROWS * ROW * 4)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # huge pages have few faults to compare
    blocks = np.frombuffer(memory, np.uint32).reshape(2, ROWS, ROW)
    if is_ready:
        ready = ReadyMemory([{"W": block} for block in blocks], first)
        ready.reach(row)
        assert ready._thread is not None
        ready._thread.shutdown(wait=True)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    blocks[row // ROWS % 2, row % ROWS :][:2] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux 5.14 has MADV_POPULATE_WRITE",
)
@pytest.mark.parametrize(("first", "row"), [(0, 0), (0, 6), (0, 12), (11, 11), (11, 16)])
def test_the_next_rows_cause_no_faults(first: int, row: int) -> None:
    """Of a new run, and of a resumed one, whose first rows are in the second buffer."""
    faults = faults_of_writing(first, row, is_ready=True)
    assert 10 * faults < faults_of_writing(first, row, is_ready=False)


# The timer.


def test_the_timer_calls_again_after_the_returned_time() -> None:
    commits = []

    def commit() -> bool:
        commits.append(timer.now)
        return True

    timer = StillTimer(10.0, commit)
    # 14.0: it took four seconds, so the next one is in twenty. 41.0: a whole block puts it off.
    for now, by_time, expected in (
        (0.0, None, 10.0), (4.0, None, 6.0), (10.0, None, 10.0), (14.0, True, 20.0),
        (24.0, None, 10.0), (34.0, None, 10.0), (36.0, True, 10.0), (41.0, False, 10.0),
        (46.0, None, 5.0),
    ):  # fmt: skip
        timer.now = now
        if by_time is not None:
            timer.committed(by_time=by_time)
        assert timer.commit_if_due() == expected
    assert commits == [10.0, 34.0]


def test_its_thread_asks_again_until_there_is_no_writer_any_more() -> None:
    answers = iter([True, False, True, None])
    timer = CommitTimer(1e-6, lambda: next(answers))
    timer.start()
    timer._thread.join(timeout=30)
    assert not timer._thread.is_alive()
    assert list(answers) == []


def test_the_timer_can_be_stopped_by_its_own_thread() -> None:
    stopped = threading.Event()

    def commit() -> bool:
        timer.stop()
        stopped.set()
        return True

    timer = CommitTimer(1e-6, commit)
    timer.start()
    assert stopped.wait(timeout=30)
    timer.stop()


# Commits by time, with a clock that the tests move on.


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    StillTimer.install(monkeypatch)


begin = partial(create, commit_every=10.0)


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


def test_rows_are_seen_after_ten_seconds_and_nothing_is_written_without_new_ones(
    tmp_path: Path,
) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, 1)
        assert ask(run, 9.0) == 1.0
        check(run.path, 0)
        assert ask(run, 10.0) == 10.0
        check(run.path, 1)
        StillTimer.of(run).now = 15.0
        extend(run, BLOCK)
        assert ask(run, 18.0) == 7.0, "a full block puts it off"
        check(run.path, BLOCK)
        moved: list[Any] = []
        with moves(lambda *names: moved.append(names)):
            assert ask(run, 100.0) == 10.0
        assert moved == []
    check(run.path, BLOCK)
    with RunWriter.resume(run.path) as run:
        updated = xr.open_zarr(run.path).attrs["updated"]
        commit_now(run)  # what was there before are no new rows
        assert xr.open_zarr(run.path).attrs["updated"] == updated


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_end_is_that_of_a_run_without(tmp_path: Path, buffers: int) -> None:
    """Object by object, with a commit after every row and the last block left as it was."""
    run, path = begin(tmp_path / "run.zarr", buffers=buffers), tmp_path / "whole.zarr"
    shutil.copytree(run.path, path)  # of the same identity
    with RunWriter.resume(path, commit_every=None) as whole:
        extend(whole, 11)
    with run:
        for rows in range(1, 12):
            extend(run, rows)
            commit_now(run)
            if rows in (3, 4, 5):  # in the last row of a block, and beside it
                check(run.path, rows)
                found = verify(run.path)
                assert found.clean, found.problems
                assert all("in row 0" in note for note in found.notes)
    assert objects_of(run.path) == objects_of(path)
    assert run.bytes_written == whole.bytes_written > 0


@pytest.mark.parametrize(("buffers", "rows"), [(1, 4), (2, 8)])
def test_the_recording_does_not_wait_for_it_until_the_buffer_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffers: int, rows: int
) -> None:
    """Its buffer is filled on, and is not filled anew before it is written."""
    run = begin(tmp_path / "run.zarr", buffers=buffers)
    extend(run, 1)
    rest = threading.Thread(target=extend, args=(run, 14))
    with held_moves():
        assert run._blocks._commit_unfinished()
        extend(run, rows)
        assert run.seconds_waited == 0
        timer = StillTimer.of(run)
        timer.now = 10.0
        assert timer.commit_if_due() == 1.0, "to be asked again soon"
        waits, full = threading.Event(), run._blocks._full[0]
        wait = full.result
        monkeypatch.setattr(full, "result", lambda: waits.set() or wait())
        rest.start()
        assert waits.wait(timeout=60)
        assert (run.rows, run.committed_rows) == (rows, 0)
    rest.join(timeout=60)
    assert run.seconds_waited > 0
    run.close()
    check(run.path, 14)
    assert verify(run.path).clean


def test_next_rows_end_with_the_block_and_are_no_part_of_the_run_before_they_are_committed(
    tmp_path: Path,
) -> None:
    with begin(tmp_path / "run.zarr", buffers=1) as run:
        got = []
        while run.rows < 11:
            places = run.next_rows(min(3, 11 - run.rows))
            for place in places.values():
                place[...] = 0x7FC1 if place.itemsize == 2 else 7
            commit_now(run)
            check(run.path, run.rows)
            steps = np.arange(run.rows, run.rows + len(places["W"]))
            for at, step in enumerate(steps.tolist()):
                for name, value in row(step).items():
                    places[name][at] = value.view(places[name].dtype)
            run.commit_rows(steps)
            got.append(len(steps))
        assert got == [3, 1, 3, 1, 3]
    check(run.path, 11)


# Of five shards, five metadata files, and the root, in a block and in a full one.
@pytest.mark.parametrize(
    "failing", nightly_but(itertools.product((6, 8), (0, 3, 6, 10)), (6, 0), (6, 10), (8, 3))
)
def test_a_failure_is_raised_by_the_next_append(tmp_path: Path, failing: tuple[int, int]) -> None:
    """Whichever of its writes fails, readers see the commit before, and a resume goes on."""
    rows, left = failing
    run = begin(tmp_path / "run.zarr")
    extend(run, 5)
    commit_now(run)
    with failing_moves(left), pytest.raises(OSError, match="No space"):  # noqa: PT012
        extend(run, rows)
        run._blocks._commit_unfinished()
        settle(run)
    with pytest.raises(OSError, match="No space"):
        extend(run, rows + 1)
    timer = StillTimer.of(run)
    timer.now = 100.0
    assert timer.commit_if_due() == 10.0, "nothing is begun any more"
    with pytest.raises(OSError, match="No space"), run:
        pass
    check(run.path, 5)
    assert not [*run.path.rglob("*.partial")]
    found = verify(run.path)
    assert found.clean, found.problems
    repair(run.path)
    check(run.path, 5)
    with RunWriter.resume(run.path) as run:
        for stop in range(6, 10):
            extend(run, stop)
            commit_now(run)
    check(run.path, 9)
    assert verify(run.path).clean


def test_an_error_in_the_thread_of_the_timer_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path / "run.zarr")
    extend(run, 1)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(BlockWriter, "encode", fail)
        assert ask(run, 10.0) == 10.0
    with pytest.raises(MemoryError, match="no room"):
        extend(run, 2)
    with pytest.raises(MemoryError, match="no room"):
        run.close()
    check(run.path, 0)


def test_a_real_timer_commits_until_the_run_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One commit: the pause before the next is five times as long, half a minute if it is slow."""
    monkeypatch.undo()
    committed = threading.Event()
    with begin(tmp_path / "run.zarr", commit_every=1e-3) as run:
        run.on_commit = lambda *_: committed.set()
        extend(run, 1)
        assert committed.wait(timeout=60)
        timer = run._blocks._timer
    assert timer is not None
    assert not timer._thread.is_alive()
    check(run.path, 1)


def test_a_writer_that_is_dropped_is_not_held_by_its_timer(tmp_path: Path) -> None:
    run = begin(tmp_path / "run.zarr")
    timer, gone = StillTimer.of(run), weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    timer.now = 10.0
    assert timer.commit_if_due() is None


def test_rows_are_seen_after_a_commit(tmp_path: Path) -> None:
    """Also by who has opened the shorter run, whose last block has been replaced."""
    opened: list[xr.Dataset] = []
    with begin(tmp_path / "run.zarr") as run:
        for rows in range(BLOCK + 1):
            run.commit()
            check(run.path, rows)
            opened.append(xr.open_zarr(run.path))
            extend(run, rows + 1)
        run.commit()
        run.commit()  # there is nothing new
        check(run.path, BLOCK + 1)
        assert ask(run, 9.0) == 1.0  # this was a commit as one by time
        for rows, ds in enumerate(opened):
            assert ds.sizes["step"] == rows
            check_rows(ds)
    check(run.path, BLOCK + 1)
    assert verify(run.path).clean
