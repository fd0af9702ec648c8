"""What a block is, and that another one in its place is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore.codec.block_form import BlockForm, Tail
from trajstore.codec.block_label import ANYWHERE, LABEL
from trajstore.codec.codec_chain import chain
from trajstore.codec.selected_parts import picks
from trajstore.values.native_types import native_type

OLD, OWN, OTHER = "1a" * 16, "2b" * 16, "3c" * 16

FORM = BlockForm(
    array="W",
    chain=chain(native_type("bfloat16"), 3, small=True),
    shape=(8, 6, 2),
    chunk=(4, 3, 2),
    runs=((0, OWN),),
)
BITS = random_bits(FORM.shape, 3)


def written(form: BlockForm = FORM, *, rows: int = 8, **place: int) -> bytes:
    """An object that holds `BITS`."""
    pieces, entries, offset = [], [], 0
    for number in np.ndindex(form.grid):
        window = tuple(
            slice(at * part, (at + 1) * part) for at, part in zip(number, form.chunk, strict=True)
        )
        pieces.append(form.chain.encode(BITS[window], form.chunk))
        entries.append((offset, len(pieces[-1])))
        offset += len(pieces[-1])
    label = form.label(**({"block": 5, "part": 1} | place), rows=rows, digest=b"d" * 32)
    return b"".join(pieces) + form.tail(entries, label)


def tail_of(data: bytes, form: BlockForm = FORM, place: Any = (5, 1)) -> Tail:
    return form.read_tail(data[-form.tail_length :], place)


def read(data: bytes, key: tuple[range, ...], form: BlockForm = FORM) -> np.ndarray:
    axes = [picks(axis, part) for axis, part in zip(key, form.chunk, strict=True)]
    out = np.empty([len(axis) for axis in key], form.chain.native.bits)
    form.read(tail_of(data, form), axes, lambda at, length: data[at : at + length], out)
    return out


def test_sizes_follow_from_the_shapes() -> None:
    assert FORM.grid == (2, 2, 1)
    assert FORM.index_length == 4 * 16 + 4
    assert FORM.tail_length == FORM.index_length + LABEL


def test_what_is_written_is_read() -> None:
    data = written(FORM)
    assert tail_of(data, FORM).index[:, 1].sum() == len(data) - FORM.tail_length
    for key in (
        (range(8), range(6), range(2)),
        (range(2, 7), range(2, 4), range(1)),
        (range(0, 8, 3), range(5, -1, -2), range(2)),
    ):
        assert (read(data, key, FORM) == BITS[np.ix_(*key)]).all()


def refused(data: bytes, message: str, form: BlockForm = FORM, place: Any = (5, 1)) -> None:
    with pytest.raises(ValueError, match=message):
        tail_of(data, form, place)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: written(replace(FORM, runs=((0, OTHER),))), "W, block 5, part 1 of run 3c3c3c3c"),
        (lambda: written(replace(FORM, array="grad")), "grad, block 5, part 1 of run 2b2b2b2b"),
        (lambda: written(block=4), "W, block 4, part 1 of run 2b2b2b2b"),
        (lambda: written(part=0), "W, block 5, part 0 of run 2b2b2b2b"),
    ],
    ids=["run", "array", "block", "part"],
)
def test_a_block_of_another_place_is_refused(make: Callable[[], bytes], found: str) -> None:
    """The message names both."""
    refused(make(), f"^it is {found}, expected W, block 5, part 1 of run 2b2b2b2b$")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (8, 12, 2)},
        {"chunk": (4, 6, 2)},
        {"chunk": (8, 3, 2)},
        {"chain": replace(FORM.chain, level=4)},
        {"chain": replace(FORM.chain, native=native_type("float16"))},
        {"chain": replace(FORM.chain, kind="plain")},
        {"chain": replace(FORM.chain, token_first=True)},
    ],
)
def test_a_block_that_was_stored_otherwise_is_refused(change: dict[str, Any]) -> None:
    other = replace(FORM, **change)
    assert other.settings != FORM.settings
    label = other.label(block=5, part=1, rows=8, digest=b"d" * 32)
    index = [(0, 10)] * int(np.prod(FORM.grid))
    refused(FORM.tail(index, label), "the metadata differs from that")


def test_the_identity_is_no_setting() -> None:
    """A fork takes blocks over as they are."""
    assert replace(FORM, runs=((0, OTHER),)).settings == FORM.settings


def test_a_fork_has_the_blocks_of_the_run_it_was_made_of_up_to_its_own() -> None:
    fork = replace(FORM, runs=((0, OTHER), (2, OLD), (5, OWN)))
    of_other, of_old, own = (replace(FORM, runs=((0, run),)) for run in (OTHER, OLD, OWN))
    for form, block, fits in (
        (of_other, 1, True),
        (of_old, 1, True),  # in another type, since it was forked
        (of_other, 2, False),
        (of_old, 4, True),
        (of_old, 5, False),
        (own, 5, True),
        (own, 9, True),
        (own, 3, True),  # it was written again, since the fork was cut there
    ):
        data = written(form, block=block)
        if fits:
            assert tail_of(data, fork, (block, 1)).label
        else:
            refused(data, f"expected W, block {block}, part 1 of run 2b2b2b2b", fork, (block, 1))
    assert fork.label(block=7, part=0, rows=8, digest=b"").run == OWN  # type: ignore[union-attr]


def test_without_a_place_array_and_run_still_have_to_fit() -> None:
    assert tail_of(written(block=3), place=None).label
    refused(written(replace(FORM, array="grad")), "it is grad", place=None)
    refused(written(replace(FORM, runs=((0, OTHER),))), "of run 3c3c3c3c, expected", place=None)


def test_a_copy_of_another_program_fits_everywhere_in_its_array() -> None:
    for place in ((0, 0), (5, 1), None):
        assert tail_of(written(block=ANYWHERE, part=0), place=place).label
    refused(written(replace(FORM, array="grad"), block=ANYWHERE), "it is grad, some block")
    other = written(replace(FORM, runs=((0, OTHER),)), block=ANYWHERE)
    refused(other, "some block, part 1 of run 3c3c3c3c")


def test_rows_that_it_does_not_hold_are_refused() -> None:
    data = written(rows=5)
    assert (read(data, (range(5), range(6), range(2))) == BITS[:5]).all()
    for rows in (range(6), range(5, 6), range(7, 0, -3)):
        with pytest.raises(
            ValueError, match=f"^it holds 5 rows, expected at least {max(rows) + 1}$"
        ):
            read(data, (rows, range(6), range(2)))


def test_a_tail_that_is_cut_or_broken_is_refused() -> None:
    tail = written()[-FORM.tail_length :]
    for cut in (tail[1:], tail[-FORM.index_length :], tail[:-1], b""):
        refused(cut, r"index, the last 68 bytes of it, is broken|label")
    for position in range(0, len(tail), 5):
        broken = bytearray(tail)
        broken[position] ^= 4
        refused(bytes(broken), "label" if position < LABEL else "index")


def test_chunks_that_are_not_there_or_broken_are_named() -> None:
    data = written()
    offset, length = map(int, tail_of(data).index[3])
    broken = bytearray(data)
    broken[offset + length // 2] ^= 1
    whole = (range(8), range(6), range(2))
    expected = (
        rf"^bytes {offset} to {offset + length}: a broken chunk \(the checksum does not match\)$"
    )
    with pytest.raises(ValueError, match=expected):
        read(bytes(broken), whole)
    form = replace(FORM)
    axes = [picks(axis, part) for axis, part in zip(whole, form.chunk, strict=True)]
    out = np.empty(FORM.shape, np.uint16)
    with pytest.raises(ValueError, match="the object ends before it"):
        form.read(tail_of(data), axes, lambda at, length: data[at : at + length - 1], out)


def test_an_index_that_lies_is_an_error_and_no_crash() -> None:
    """Its checksums fit, as somebody has made them."""
    label = FORM.label(block=5, part=1, rows=8, digest=b"d" * 32)
    chunks = written()[: -FORM.tail_length]
    for entry in ((0, 0), ((1 << 64) - 1, (1 << 64) - 1), (1 << 63, 10), (0, 3), (7, 20)):
        data = chunks + FORM.tail([entry] * 4, label)
        with pytest.raises(ValueError, match="a broken chunk"):
            read(data, (range(8), range(6), range(2)))


MANY = replace(FORM, shape=(8, 120, 2))


def read_with(helpers: ThreadPoolExecutor, fetch: Callable[[int, int], bytes]) -> np.ndarray:
    """All of a block of 80 chunks."""
    data = written(MANY)
    axes = [picks(range(whole), part) for whole, part in zip(MANY.shape, MANY.chunk, strict=True)]
    out = np.zeros(MANY.shape, np.uint16)
    MANY.read(tail_of(data, MANY), axes, fetch, out, helpers=helpers)
    return out


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr("trajstore.codec.block_form.default_threads", lambda: 3)
    monkeypatch.setattr(f"{__name__}.BITS", random_bits(MANY.shape, 3))
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
        np.testing.assert_array_equal(read_with(helpers, fetch), BITS)
    assert len(names) == 3


def test_threads_that_are_busy_are_not_waited_for(many: bytes) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(1) as helpers:
        helpers.submit(done.wait, 10)
        got = read_with(helpers, lambda offset, length: many[offset : offset + length])
        assert not done.is_set()
        done.set()
    np.testing.assert_array_equal(got, BITS)


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
        with pytest.raises(ValueError, match=r"^bytes \d+ to \d+: a broken chunk"):
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
