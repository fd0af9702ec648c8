from __future__ import annotations

import mmap
import platform
import resource
import sys

import numpy as np
import pytest

from trajstore.store.writing.blocks import ReadyMemory

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
