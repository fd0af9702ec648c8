"""Objects of blocks: files, bytes, and keys of a zarr store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from zarr.buffer import default_buffer_prototype
from zarr.storage import LocalStore, StorePath

from trajstore.codec.block_object import BytesObject, LocalObject, StoreObject, at_once

DATA = bytes(range(200)) * 1000
RANGES = [(3, 10), (150_000, 150_010), (8, 40)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for array in ("W", "grad"):
        (tmp_path / array).mkdir()
        (tmp_path / array / "c.0").write_bytes(DATA if array == "W" else b"sibling")
    return tmp_path / "W" / "c.0"


async def read(kind: str, file: Path) -> tuple[bytes, list[bytes], bytes]:
    """End of an object, three ranges of it, and the end of another one."""
    if kind == "local":
        with LocalObject(file) as local:
            await local.prefetch(RANGES)
            parts = [local.read(start, stop - start) for start, stop in RANGES]
            return local.end(9), parts, (await local.sibling("grad/c.0", 4)).end(4)
    place = StorePath(LocalStore(file.parents[1]), "W/c.0")
    found = await StoreObject.opened(place, default_buffer_prototype(), 9)
    await found.prefetch(RANGES)
    parts = [found.read(start, stop - start) for start, stop in RANGES]
    return found.end(9), parts, (await found.sibling("grad/c.0", 4)).end(4)


def test_all_sources_read_the_same_bytes(file: Path) -> None:
    expected = DATA[-9:], [DATA[start:stop] for start, stop in RANGES], b"ling"
    assert at_once(read("local", file)) == expected
    assert asyncio.run(read("store", file)) == expected
    assert BytesObject(DATA).end(9) == expected[0]
    assert [BytesObject(DATA).read(at, stop - at) for at, stop in RANGES] == expected[1]


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
