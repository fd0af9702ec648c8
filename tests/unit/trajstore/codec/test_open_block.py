"""Selections of one block, read from its object."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bits_and_calls import random_bits
from one_block import BITS, FORM, written

from trajstore.codec.array_selection import ArraySelection
from trajstore.codec.block import BlockForm
from trajstore.codec.open_block import LocalObject, OpenBlock, StoreObject, at_once
from trajstore.errors import FormatError


class Fetched(StoreObject):
    """Bytes that a function returns, except those of the end."""

    def __init__(self, data: bytes, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__(None, None, data)
        self.read = fetch  # type: ignore[method-assign]


def read_from(
    source: StoreObject,
    key: tuple[range, ...],
    form: BlockForm = FORM,
    helpers: ThreadPoolExecutor | None = None,
) -> np.ndarray:
    selection = ArraySelection(along=key, shape=tuple(map(len, key)))
    out = np.empty(selection.lengths, form.chain.native.bits)
    block = at_once(OpenBlock.opened("it", form, source, (5, 1), selection))
    block.read(out, helpers=helpers)
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


MANY = replace(FORM, shape=(8, 120, 2))


def read_with(helpers: ThreadPoolExecutor, fetch: Callable[[int, int], bytes]) -> np.ndarray:
    """All of a block of 80 chunks."""
    return read_from(Fetched(written(MANY), fetch), tuple(map(range, MANY.shape)), MANY, helpers)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    return written(MANY)


def test_other_threads_help_where_there_is_much_to_decode(many: bytes) -> None:
    names: set[str] = set()
    together = threading.Barrier(3)

    def fetch(offset: int, length: int) -> bytes:
        name = threading.current_thread().name
        if name not in names:
            names.add(name)
            together.wait(10)  # for all three
        return many[offset : offset + length]

    with ThreadPoolExecutor(2) as helpers:
        np.testing.assert_array_equal(read_with(helpers, fetch), random_bits(MANY.shape, 3))
    assert len(names) == 3


def test_threads_that_are_busy_are_not_waited_for(many: bytes) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(1) as helpers:
        helpers.submit(done.wait, 10)
        got = read_with(helpers, lambda offset, length: many[offset : offset + length])
        assert not done.is_set()
        done.set()
    np.testing.assert_array_equal(got, random_bits(MANY.shape, 3))


def test_a_broken_chunk_ends_the_work_of_all_threads(many: bytes) -> None:
    """Nobody reads any more when the error is there: the file is about to be closed."""
    reading, seen = set[int](), set[int]()
    together = threading.Barrier(3)

    def fetch(offset: int, length: int) -> bytes:
        thread = threading.get_ident()
        reading.add(thread)
        if thread not in seen:
            seen.add(thread)
            together.wait(10)  # for all three
        reading.discard(thread)
        broken = offset > len(many) // 2
        return bytes(length) if broken else many[offset : offset + length]

    with ThreadPoolExecutor(2) as helpers:
        with pytest.raises(FormatError, match=r": bytes \d+ to \d+: a broken chunk"):
            read_with(helpers, fetch)
        assert not reading
    assert len(seen) == 3


def test_a_pool_that_is_busy_holds_nothing_of_what_was_read(many: bytes) -> None:
    done, held = threading.Event(), []

    def fetch(offset: int, length: int) -> bytes:
        return many[offset : offset + length]

    with ThreadPoolExecutor(1) as helpers:
        helpers.submit(done.wait, 10)
        held = [weakref.ref(fetch)]
        read_with(helpers, fetch)
        del fetch
        gc.collect()
        assert held[0]() is None
        done.set()


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
