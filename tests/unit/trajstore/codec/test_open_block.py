"""Selections of one block, read from its object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from one_block import BITS, FORM, written

from trajstore.codec.array_selection import ArraySelection
from trajstore.codec.open_block import LocalObject, OpenBlock, StoreObject, at_once
from trajstore.errors import FormatError


class Fetched(StoreObject):
    """Bytes that a function returns, except those of the end."""

    def __init__(self, data: bytes, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__(None, None, data)
        self.read = fetch  # type: ignore[method-assign]


def read_from(source: StoreObject, key: tuple[range, ...]) -> np.ndarray:
    selection = ArraySelection(along=key, shape=tuple(map(len, key)))
    out = np.empty(selection.lengths, FORM.chain.native.bits)
    at_once(OpenBlock.opened("it", FORM, source, (5, 1), selection)).read(out)
    return out


def read(data: bytes, key: tuple[range, ...]) -> np.ndarray:
    return read_from(StoreObject(None, None, data), key)


def test_rows_that_it_does_not_hold_are_refused() -> None:
    data = written(rows=5)
    assert (read(data, (range(5), range(6), range(2))) == BITS[:5]).all()
    for rows in (range(6), range(5, 6), range(7, 0, -3)):
        expected = f"^it is not usable: it holds 5 rows, expected at least {max(rows) + 1};"
        with pytest.raises(FormatError, match=expected):
            read(data, (rows, range(6), range(2)))


def test_chunks_that_are_not_there_or_broken_are_named() -> None:
    data = written()
    tail = FORM.read_tail(data[-FORM.tail_length :], None)
    offset, length = map(int, tail.index[3])
    broken = bytearray(data)
    broken[offset + length // 2] ^= 1
    whole = (range(8), range(6), range(2))
    expected = (
        rf": bytes {offset} to {offset + length}: a broken chunk \(the checksum does not match\);"
    )
    with pytest.raises(FormatError, match=expected):
        read(bytes(broken), whole)
    short = Fetched(data, lambda at, length: data[at : at + length - 1])
    with pytest.raises(FormatError, match="the object ends before it"):
        read_from(short, whole)


def test_a_forged_index_is_an_error() -> None:
    """Its checksums fit, as somebody has made them."""
    label = FORM.label(block=5, part=1, rows=8, digest=b"d" * 32)
    chunks = written()[: -FORM.tail_length]
    for entry in ((0, 0), ((1 << 64) - 1, (1 << 64) - 1), (1 << 63, 10), (0, 3), (7, 20)):
        data = chunks + FORM.tail([entry] * 4, label)
        with pytest.raises(FormatError, match="a broken chunk"):
            read(data, (range(8), range(6), range(2)))


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
    assert StoreObject(None, None, DATA).read(offset, 10) == b""


def test_a_missing_object_is_an_error(file: Path) -> None:
    with LocalObject(file) as local:
        for source in (local, StoreObject(None, None, DATA)):
            with pytest.raises(FileNotFoundError):
                at_once(source.sibling("lr/c.0", 4))
    file.unlink()
    with pytest.raises(FileNotFoundError):
        LocalObject(file)
