from __future__ import annotations

import platform
import resource
import sys

import numpy as np
import pytest

from trajstore.store.writing.ready_memory import ReadyMemory

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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory at the first write")
def test_the_next_rows_cause_no_faults() -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def of_writing(memory: bool) -> int:
        buffers = [{"W": np.empty((ROWS, ROW), np.uint32)} for _ in range(2)]
        if memory:
            thread = ReadyMemory(buffers, 0)._thread
            assert thread is not None
            thread.shutdown(wait=True)
        before = faults()
        buffers[0]["W"][:2] = 1
        return faults() - before

    without = of_writing(memory=False)
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14) or without < 100:
        pytest.skip("an older system, or one with huge pages")
    assert of_writing(memory=True) * 10 < without
