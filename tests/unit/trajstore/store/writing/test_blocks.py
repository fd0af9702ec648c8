"""The order of encoding and writing; what the files hold is tested with the writer."""

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

from trajstore.codec.chunk import Chain
from trajstore.store.metadata.block_plan import CHUNKS_AHEAD, Layout, plan
from trajstore.store.writing.blocks import BlockWriter, ReadyMemory

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
    subprocess.run([sys.executable, "-c", OUTLIVING, tmp_path / "run.zarr"], check=True)
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
    for row in range(first, end):
        place = buffers[row // ROWS % 2]["W"][row % ROWS]
        place[:] = row
        memory.reach(row + 1)
    memory.close()
    for row in range(first, end):  # to ask again changes nothing
        assert (buffers[row // ROWS % 2]["W"][row % ROWS] == row).all()


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
