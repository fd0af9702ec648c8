"""Objects of blocks: files, bytes, and keys of a zarr store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trajstore.codec.open_block import BytesObject, LocalObject, at_once

DATA = bytes(range(200)) * 1000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for array in ("W", "grad"):
        (tmp_path / array).mkdir()
        (tmp_path / array / "c.0").write_bytes(DATA if array == "W" else b"sibling")
    return tmp_path / "W" / "c.0"


def test_a_coroutine_that_waits_needs_a_loop(file: Path) -> None:
    waiting = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="needs an event loop"):
        at_once(waiting)
    waiting.close()


@pytest.mark.parametrize("offset", [len(DATA), 1 << 62, (1 << 64) - 1])
def test_reading_past_the_end_returns_no_bytes(file: Path, offset: int) -> None:
    with LocalObject(file) as local:
        assert local.read(offset, 10) == b""
        assert local.read(10, 1 << 64) == DATA[10:]
    assert BytesObject(DATA).read(offset, 10) == b""


def test_a_missing_object_is_an_error(file: Path) -> None:
    with LocalObject(file) as local:
        for source in (local, BytesObject(DATA)):
            with pytest.raises(FileNotFoundError):
                at_once(source.sibling("lr/c.0", 4))
    file.unlink()
    with pytest.raises(FileNotFoundError):
        LocalObject(file)
