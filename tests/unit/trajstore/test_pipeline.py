"""The order of encoding, writing and committing; what the files hold is tested with the writer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.encoding import Chain
from trajstore.layout import Layout, plan
from trajstore.pipeline import Pipeline


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = plan({"W": "bfloat16"}, tokens=3, hidden=2, block_rows=4, threads=1)
    for name in found.arrays:
        (tmp_path / name).mkdir()
    return found


def block(layout: Layout) -> dict[str, np.ndarray]:
    return {
        name: np.zeros((4, *array.row), array.native.bits) for name, array in layout.arrays.items()
    }


def test_the_next_block_is_encoded_while_one_is_committed(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = threading.Semaphore(0)
    both_there, seen = threading.Event(), []
    real = Chain.encode

    def encode(self: Chain, *arguments: Any) -> bytes:
        data = real(self, *arguments)
        encoded.release()
        return data

    def commit(number: int) -> None:
        if number == 0:
            seen.append([encoded.acquire(timeout=30) for _ in range(2 * len(layout.arrays))])

    def put(path: Path, parts: Any, **_: Any) -> int:
        assert both_there.wait(timeout=30)
        return len(b"".join(parts))

    monkeypatch.setattr(Chain, "encode", encode)
    monkeypatch.setattr("trajstore.pipeline.put", put)
    pipeline = Pipeline(tmp_path, layout, commit)
    done = [pipeline.submit(number, block(layout), number) for number in range(2)]
    both_there.set()
    for future in done:
        future.result()
    pipeline.close()
    assert seen == [[True] * 2 * len(layout.arrays)]


def test_a_failure_ends_it(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = []

    def full(path: Path, parts: Any, **_: Any) -> int:
        next(iter(parts))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trajstore.pipeline.put", full)
    pipeline = Pipeline(tmp_path, layout, committed.append)
    done = [pipeline.submit(number, block(layout), number) for number in range(3)]
    for future in done:
        with pytest.raises(OSError, match="No space"):
            future.result()
    pipeline.close()
    assert isinstance(pipeline.failure, OSError)
    assert not committed
