"""Blocks: the order of encoding and writing, their memory, and commits before they are full."""

from __future__ import annotations

import math
import mmap
import platform
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but
from crashing import BLOCK, HIDDEN, TOKENS, TYPES, check_rows, row
from disk import Writes, held_moves, identity, moves, objects_of
from still_timer import StillTimer, commit_now

from trajstore import RunWriter, repair, verify
from trajstore.codec.chunk import Chain
from trajstore.defaults import check_commit_every
from trajstore.errors import InvalidArgument
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
    arrays = {
        name: replace(array, chain=kind(**vars(array.chain)))
        for name, array in layout.arrays.items()
    }
    return replace(layout, arrays=arrays)


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


def test_few_chunks_are_encoded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan({"W": "bfloat16"}, tokens=128 * 40, hidden=256, block_rows=32, threads=1)
    layout = replace(planned, runs=RUNS)
    w = layout.arrays["W"]
    assert w.parts * math.prod(w.form(RUNS).grid) > 2 * CHUNKS_AHEAD
    started = threading.Semaphore(0)
    taken, most = [], CHUNKS_AHEAD * layout.threads + 1

    class Empty(Chain):
        def encode(self, *_: Any) -> bytes:
            started.release()
            return b""

    def put_all(objects: Any, **_: Any) -> int:
        for path, parts in objects:
            for _part in parts:
                taken.append(path)
                # Those that may be ahead, and the one that was taken, have begun; no other has.
                assert len(taken) > 1 or all(started.acquire(timeout=30) for _ in range(most))
                assert len(taken) > 1 or not started.acquire(blocking=False)
        return 1

    monkeypatch.setattr("trajstore.store.writing.blocks.put_all", put_all)
    pipeline = BlockWriter(tmp_path, with_chains(layout, Empty))
    pipeline.encode(0, block(layout))
    pipeline.write(0, layout.block_rows)
    pipeline.close()
    assert len(taken) == sum(
        array.parts * (math.prod(array.form(RUNS).grid) + 1) for array in layout.arrays.values()
    )


OUTLIVING = """
import sys, threading
import numpy as np
from trajstore import RunWriter

def train():
    with RunWriter.create(
        sys.argv[1], token=np.arange(4096), hidden=64,
        variables={"W": "float32", "grad": "float32"}, block_rows=16,
        commit_every=1e-3,
    ) as run:
        for step in range(16 * 6):
            values = np.full((4096, 64), step, "float32")
            run.append(step=step, W=values, grad=-values)
            if step == 16:
                started.set()

started = threading.Event()
threading.Thread(target=train).start()
started.wait()
"""


def test_a_recording_outlives_the_main_thread(tmp_path: Path) -> None:
    """Pools take no more work then, and the caller's thread writes behind the writing thread."""
    command = [sys.executable, "-c", OUTLIVING, tmp_path / "run.zarr"]
    subprocess.run(command, check=True, timeout=120)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.attrs["status"] == "complete"
    assert ds.step.values.tolist() == list(range(96))
    for name, sign in (("W", 1), ("grad", -1)):
        assert (ds[name] == sign * ds.step).all(["token", "hidden"]).values.all()


ROWS, ROW = 8, (4 << 20) // 4  # rows of 4 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory at the first write")
@pytest.mark.parametrize("first", [0, 11])  # of a new run, and of a resumed one
def test_rows_have_their_memory_before_they_are_written(first: int) -> None:
    buffers = [{"W": np.empty((ROWS, ROW), np.uint32)} for _ in range(2)]
    memory = ReadyMemory(buffers, first)
    end = (first // ROWS + 2) * ROWS
    for number in range(first, end):
        place = buffers[number // ROWS % 2]["W"][number % ROWS]
        place[:] = number
        memory.reach(number + 1)
    memory.close()
    for number in range(first, end):  # to ask again changes nothing
        assert (buffers[number // ROWS % 2]["W"][number % ROWS] == number).all()


def faults_of_writing(*, is_ready: bool) -> int:
    """Return how often the first write to two rows had to get memory from the system."""
    memory = mmap.mmap(-1, 2 * ROWS * ROW * 4)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # huge pages have few faults to compare
    blocks = np.frombuffer(memory, np.uint32).reshape(2, ROWS, ROW)
    if is_ready:
        thread = ReadyMemory([{"W": block} for block in blocks], 0)._thread
        assert thread is not None
        thread.shutdown(wait=True)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    blocks[0, :2] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux 5.14 has MADV_POPULATE_WRITE",
)
def test_the_next_rows_cause_no_faults() -> None:
    assert 10 * faults_of_writing(is_ready=True) < faults_of_writing(is_ready=False)


# The timer.


def test_the_timer_calls_again_after_the_returned_time() -> None:
    commits = []

    def commit() -> bool:
        commits.append(timer.now)
        return True

    timer = StillTimer(10.0, commit)
    for now, expected in ((0.0, 10.0), (4.0, 6.0), (10.0, 10.0)):
        timer.now = now
        assert timer.commit_if_due() == expected
    assert commits == [10.0]
    timer.now = 14.0
    timer.committed(by_time=True)  # it took four seconds: so the next one is in twenty
    timer.now = 24.0
    assert timer.commit_if_due() == 10.0
    timer.now = 34.0
    assert timer.commit_if_due() == 10.0
    assert commits == [10.0, 34.0]
    timer.now = 36.0
    timer.committed(by_time=True)
    timer.now = 41.0
    timer.committed(by_time=False)  # a whole block puts it off
    timer.now = 46.0
    assert timer.commit_if_due() == 5.0
    assert commits == [10.0, 34.0]


def test_its_thread_ends_when_there_is_no_writer_any_more() -> None:
    timer = CommitTimer(1e-6, lambda: None)
    timer.start()
    timer._thread.join(timeout=30)
    assert not timer._thread.is_alive()


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


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf])
def test_a_wrong_commit_interval_is_an_error(wrong: float) -> None:
    with pytest.raises(InvalidArgument, match=r"commit_every: got .*, expected seconds above 0"):
        check_commit_every(wrong)
    check_commit_every(1e300)
    check_commit_every(None)


NOT_CLOSED = """
import numpy as np
from trajstore import RunWriter

runs = []
for every in ("1e300", "1e-3"):
    run = RunWriter.create(
        every, token=[0, 1], hidden=1, variables={"W": "float32"}, commit_every=float(every)
    )
    run.append(step=0, W=np.zeros((2, 1), "float32"))
    runs.append(run)
while not run.committed_rows:
    pass
"""


def test_runs_that_are_not_closed_keep_no_process_alive(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOT_CLOSED]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    for every, rows in (("1e300", 0), ("1e-3", 1)):
        ds = xr.open_zarr(tmp_path / every)
        assert ds.sizes["step"] == rows
        assert ds.attrs["status"] == "recording"


# Commits by time, with a clock that the tests move on.


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


def test_without_new_rows_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with create(path) as run:
        assert ask(run, 100.0) == 10.0
        for step in range(6):
            run.append(step, **row(step))
        ask(run, 200.0)
        check(path, 6)
        moved: list[Any] = []
        with moves(lambda *names: moved.append(names)):
            ask(run, 300.0)
        assert moved == []
    with RunWriter.resume(path) as run:
        updated = xr.open_zarr(path).attrs["updated"]
        commit_now(run)  # what was there before are no new rows
        assert xr.open_zarr(path).attrs["updated"] == updated


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_end_is_that_of_a_run_without(tmp_path: Path, buffers: int) -> None:
    """Object by object, with a commit after every row and the last block left as it was."""
    with identity():
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


def test_no_commit_by_time_while_a_block_is_written(tmp_path: Path) -> None:
    run = create(tmp_path / "run.zarr")
    with held_moves():
        for step in range(6):
            run.append(step, **row(step))
        timer = StillTimer.of(run)
        timer.now = 10.0
        assert timer.commit_if_due() == 1.0, "to be asked again soon"
        assert run.committed_rows == 0
    commit_now(run)
    check(run.path, 6)
    run.close()


@pytest.mark.parametrize(("buffers", "rows"), [(1, 4), (2, 8)])
def test_the_recording_does_not_wait_for_it_until_the_buffer_is_needed(
    tmp_path: Path, buffers: int, rows: int
) -> None:
    """Its buffer is filled on, and is not filled anew before it is written."""
    run = create(tmp_path / "run.zarr", buffers=buffers)
    run.append(0, **row(0))
    rest = threading.Thread(target=lambda: [run.append(at, **row(at)) for at in range(rows, 14)])
    with held_moves():
        assert run._blocks._commit_unfinished()
        for step in range(1, rows):
            run.append(step, **row(step))
        assert run.seconds_waited == 0
        rest.start()
        assert run.committed_rows == 0
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
def test_a_failure_is_raised_by_the_next_append(tmp_path: Path, left: int) -> None:
    """Whichever of its writes fails, readers see the commit before, and a resume goes on."""
    run = create(tmp_path / "run.zarr")
    for step in range(5):
        run.append(step, **row(step))
    commit_now(run)
    run.append(5, **row(5))
    with moves(Writes(left)):
        assert run._blocks._commit_unfinished()
        assert run._blocks._last is not None
        with pytest.raises(OSError, match="No space"):
            run._blocks._last.result()
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
        for step in range(3):
            committed = threading.Event()
            run.on_commit = lambda *_, committed=committed: committed.set()
            run.append(step, **row(step))
            assert committed.wait(timeout=30)
        check(run.path, 3)
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
    """Also by who has opened the shorter run, whose last block has been replaced."""
    opened: list[xr.Dataset] = []
    with create(tmp_path / "run.zarr") as run:
        for step in range(BLOCK + 1):
            run.commit()
            check(run.path, step)
            opened.append(xr.open_zarr(run.path))
            run.append(step, **row(step))
        run.commit()
        run.commit()  # there is nothing new
        check(run.path, BLOCK + 1)
        assert ask(run, 9.0) == 1.0  # this was a commit as one by time
        for rows, ds in enumerate(opened):
            assert ds.sizes["step"] == rows
            check_rows(ds)
    check(run.path, BLOCK + 1)
    assert verify(run.path).clean
