"""Blocks: labels, indexes and selections, of an axis too, and what zarr reads by the codec."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import zarr
from bits_and_calls import random_bits
from damage import divided_run, put, recorded, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.buffer.cpu import Buffer, buffer_prototype
from zarr.storage import LocalStore, MemoryStore, StorePath, WrapperStore

from trajstore.codec.array_selection import (
    ArraySelection,
    divide_axis,
    outer_positions,
    positions,
)
from trajstore.codec.block import (
    ANYWHERE,
    LABEL,
    BlockForm,
    Tail,
    encoded_chunks,
    shard_parts,
)
from trajstore.codec.block_codec import BlockCodec
from trajstore.codec.chunk import chain, checksum
from trajstore.codec.open_block import LocalObject, OpenBlock, StoreObject, at_once
from trajstore.errors import FormatError
from trajstore.threads import readers
from trajstore.values.native_types import native_type, widen

OLD, OWN, OTHER = "1a" * 16, "2b" * 16, "3c" * 16
CHAIN = chain(native_type("bfloat16"), 3, small=True)
FORM = BlockForm(array="W", chain=CHAIN, shape=(8, 6, 2), chunk=(4, 3, 2), runs=((0, OWN),))
GRAD = replace(FORM, array="grad")
ALIEN = replace(FORM, runs=((0, OTHER),))
BITS = random_bits(FORM.shape, 3)
WHOLE = (range(8), range(6), range(2))


def written(form: BlockForm = FORM, *, block: int = 5, part: int = 1, rows: int = 8) -> bytes:
    """An object that holds the random bits of its shape; of `FORM` these are `BITS`."""
    chunks = encoded_chunks(form, random_bits(form.shape, 3))
    return b"".join(shard_parts(form, chunks, block=block, part=part, rows=rows))


def tail_of(data: bytes, form: BlockForm = FORM, place: Any = (5, 1)) -> Tail:
    return form.read_tail(data[-form.tail_length :], place)


def refused(data: bytes, message: str, form: BlockForm = FORM, place: Any = (5, 1)) -> None:
    with pytest.raises(ValueError, match=message):
        tail_of(data, form, place)


@pytest.mark.parametrize(
    ("form", "block", "part", "place", "found"),
    [
        (ALIEN, 5, 1, (5, 1), "^it is W, block 5, part 1 of run 3c3c3c3c, expected W, block 5, p"),
        (GRAD, 5, 1, (5, 1), "^it is grad, block 5, part 1 of run 2b2b2b2b, expected W"),
        (FORM, 4, 1, (5, 1), "W, block 4, part 1 .* expected W, block 5, part 1 of run 2b2b2b2b$"),
        (FORM, 5, 0, (5, 1), "W, block 5, part 0"),
        (FORM, 3, 1, None, None),  # without a place, array and run still have to fit
        (ALIEN, 5, 1, None, "of run 3c3c3c3c, expected"),
        (FORM, ANYWHERE, 0, (0, 0), None),  # a copy by another program fits in its array
        (FORM, ANYWHERE, 0, (5, 1), None),
        (ALIEN, ANYWHERE, 1, (5, 1), "some block, part 1 of run 3c3c3c3c"),
    ],
)
def test_a_block_of_another_place_is_refused(
    form: BlockForm, block: int, part: int, place: Any, found: str | None
) -> None:
    data = written(form, block=block, part=part)
    if found is None:
        assert tail_of(data, place=place).label
    else:
        refused(data, found, place=place)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (8, 12, 2)},
        {"chunk": (4, 6, 2)},
        {"chain": replace(FORM.chain, native=native_type("float16"))},
        {"chain": replace(FORM.chain, token_first=True)},
    ],
)
def test_a_block_that_was_stored_otherwise_is_refused(change: dict[str, Any]) -> None:
    other = replace(FORM, **change)
    assert other.settings != FORM.settings
    label = other.label(block=5, part=1, rows=8, digest=b"d" * 32)
    index = [(0, 10)] * int(np.prod(FORM.grid))
    refused(FORM.tail(index, label), "the metadata differs from that")


def test_a_fork_has_the_blocks_of_the_run_it_was_made_of_up_to_its_own() -> None:
    fork = replace(FORM, runs=((0, OTHER), (2, OLD), (5, OWN)))
    for run, block, fits in (
        (OTHER, 1, True),
        (OLD, 1, True),  # in another type, since it was forked
        (OTHER, 2, False),
        (OLD, 4, True),
        (OLD, 5, False),
        (OWN, 5, True),
        (OWN, 9, True),
        (OWN, 3, True),  # it was written again, since the fork was cut there
    ):
        data = written(replace(FORM, runs=((0, run),)), block=block)
        if fits:
            assert tail_of(data, fork, (block, 1)).label
        else:
            refused(data, f"expected W, block {block}, part 1 of run 2b2b2b2b", fork, (block, 1))
    assert fork.label(block=7, part=0, rows=8, digest=b"").run == OWN  # type: ignore[union-attr]


def test_a_tail_that_is_cut_or_broken_is_refused() -> None:
    form = replace(FORM, array="é" * 16)  # all 32 bytes of the name
    data, place = written(form, block=70_000, part=3), (70_000, 3)
    label = tail_of(data, form, place).label
    assert label == form.label(block=70_000, part=3, rows=8, digest=label.digest)
    tail = data[-form.tail_length :]
    for cut in (tail[1:], tail[-form.index_length :], tail[:-1], b""):
        refused(cut, r"index, the last 68 bytes of it, is broken|label", form, place)
    for bit in range(8 * len(tail)):
        broken = bytearray(tail)
        broken[bit // 8] ^= 1 << bit % 8
        refused(bytes(broken), "label" if bit < 8 * LABEL else "index", form, place)
    fields, index = b"trajblk9" + tail[8 : LABEL - 4], tail[LABEL:]
    of_another = fields + checksum(fields + index[:-4]) + index
    refused(of_another, "it has no label", form, place)


class Watched(StoreObject):
    """Keeps which bytes are wanted."""

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.wanted = ranges


def read(data: bytes | StoreObject, key: tuple[range, ...] = WHOLE) -> np.ndarray:
    source = StoreObject(None, None, data) if isinstance(data, bytes) else data
    selection = ArraySelection(along=key, shape=tuple(map(len, key)))
    out = np.empty(selection.lengths, FORM.chain.native.bits)
    at_once(OpenBlock.opened("it", FORM, source, (5, 1), selection)).read(out)
    return out


def test_rows_that_it_does_not_hold_are_refused() -> None:
    data = written(rows=5)
    assert (read(data, (range(5), range(6), range(2))) == BITS[:5]).all()
    for rows in (range(6), range(5, 6), range(7, 0, -3)):
        expected = f"^it is not usable: it holds 5 rows, expected at least {max(rows) + 1};"
        with pytest.raises(FormatError, match=expected):
            read(data, (rows, range(6), range(2)))


def test_only_the_chunks_that_hold_a_part_are_read_and_a_broken_one_is_named() -> None:
    data = bytearray(written())
    offset, length = map(int, tail_of(bytes(data)).index[3])
    data[offset + length // 2] ^= 1
    key = (range(5, 7), range(2), range(1, 2))
    source = Watched(None, None, bytes(data))
    np.testing.assert_array_equal(read(source, key), BITS[5:7, :2, 1:])
    start, size = map(int, tail_of(bytes(data)).index[2])
    assert source.wanted == [(start, start + size)]
    expected = (
        rf": bytes {offset} to {offset + length}: a broken chunk \(the checksum does not match\);"
    )
    with pytest.raises(FormatError, match=expected):
        read(bytes(data))


def test_a_forged_index_is_an_error() -> None:
    """Its checksums fit, as somebody has made them."""
    label = FORM.label(block=5, part=1, rows=8, digest=b"d" * 32)
    chunks = written()[: -FORM.tail_length]
    end = len(chunks) + FORM.tail_length
    for entry in ((0, 0), ((1 << 64) - 1,) * 2, (1 << 63, 10), (end - 5, 10), (0, 3), (7, 20)):
        expected = "the object ends before it" if entry[0] > len(chunks) else r"broken chunk \(\w"
        with pytest.raises(FormatError, match=expected):
            read(chunks + FORM.tail([entry] * 4, label))


DATA = random_bits((100_000,), 1).tobytes()


def test_a_file_is_read_in_parts_and_stays_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "W" / "c.0"
    path.parent.mkdir()
    path.write_bytes(DATA)
    with LocalObject(path) as local:
        path.unlink()
        assert local.end(7) == DATA[-7:]
        assert local.read(10, 1 << 64) == DATA[10:]
        for offset in (len(DATA), 1 << 62, (1 << 64) - 1):
            assert local.read(offset, 10) == StoreObject(None, None, DATA).read(offset, 10) == b""
        for source in (local, StoreObject(None, None, DATA)):
            with pytest.raises(FileNotFoundError):
                at_once(source.sibling("lr/c.0", 4))
    with pytest.raises(FileNotFoundError):
        LocalObject(path)
    os.mkfifo(path)  # to open it for reading would wait for a writer, forever
    writer = os.open(path, os.O_RDWR)  # so that this test ends in any case
    with pytest.raises(OSError, match=r"not a regular file: .*c\.0"):
        LocalObject(path)
    os.close(writer)


def test_a_coroutine_that_waits_needs_a_loop() -> None:
    waiting = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="needs an event loop"):
        at_once(waiting)
    waiting.close()


Change = Callable[[str, Buffer], Buffer]


class Requests(WrapperStore[Any]):
    """A store that is not local, and keeps what is asked of it.

    `change` makes what is read of the end of an object.
    """

    def __init__(
        self, store: Any, asked: list[Any] | None = None, change: Change | None = None
    ) -> None:
        super().__init__(store)
        self.asked = [] if asked is None else asked
        self.change = change

    def _with_store(self, store: Any) -> Self:
        return type(self)(store, self.asked, self.change)

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        self.asked.append((key, byte_range))
        found = await self._store.get(key, prototype, byte_range)
        if self.change is not None and isinstance(byte_range, SuffixByteRequest):
            return self.change(key, found)
        return found


@pytest.mark.parametrize(
    ("size", "requests"),
    [(15_000, []), (200_000, [RangeByteRequest(0, 30), RangeByteRequest(150_000, 150_010)])],
)
def test_small_objects_and_near_ranges_take_one_request(
    size: int, requests: list[ByteRequest], tmp_path: Path
) -> None:
    write(tmp_path / "W" / "c.0", DATA[:size])
    store = Requests(LocalStore(tmp_path))

    async def pieces() -> list[bytes]:
        opened = await StoreObject.opened(StorePath(store, "W/c.0"), buffer_prototype, 100)
        assert opened.end(100) == DATA[:size][-100:]
        await opened.prefetch([(20, 30), (150_000, 150_010), (0, 10)])
        return [opened.read(0, 10), opened.read(25, 5)]

    assert asyncio.run(pieces()) == [DATA[:10], DATA[25:30]]
    (_, first), *others = store.asked
    assert isinstance(first, SuffixByteRequest)
    assert size == 15_000 or first.suffix < size / 2
    assert [request for _, request in others] == requests


ROWS, TOKENS, _ = SHAPE = (11, 300, 3)

Stored = tuple[Path, np.ndarray]


def opened(path: Path, kind: str = "local") -> zarr.Array:
    """W of a run, by a store of that kind."""
    store = LocalStore(path / "W")
    return zarr.open_array(store if kind == "local" else Requests(store), mode="r")


every_store = pytest.mark.parametrize("kind", ["local", "ranges"])


@pytest.fixture(scope="module", params=["small", "large"])
def stored(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stored:
    """A run, and the values of W: three blocks of three objects, each of several chunks."""
    path, large = tmp_path_factory.mktemp("stored") / "run.zarr", request.param == "large"
    return path, widen(divided_run(path, large=large), native_type("bfloat16"))


@pytest.fixture
def small(tmp_path: Path) -> Stored:
    """The same in one object a block."""
    bits = random_bits((ROWS, 10, 6), 2)
    return recorded(tmp_path / "small.zarr", bits), widen(bits, native_type("bfloat16"))


def same(got: Any, expected: np.ndarray) -> None:
    """Bit for bit, NaNs included."""
    got = np.asarray(got)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


def basic(length: int) -> st.SearchStrategy[Any]:
    """Positions, and slices that zarr takes: with steps, but not backwards; also of nothing."""
    ends = st.none() | st.integers(-length, length)
    slices = st.builds(slice, ends, ends, st.none() | st.integers(1, length))
    return st.integers(-length, length - 1) | slices


def outer(length: int) -> st.SearchStrategy[Any]:
    """Also positions in any order, again and again, from the end; and masks."""
    one = st.integers(-length, length - 1)
    flat = st.lists(one, min_size=1, max_size=6).map(lambda at: np.array(at, np.intp))
    chosen = st.sets(st.integers(0, length - 1), max_size=8)
    masks = chosen.map(lambda at: np.isin(np.arange(length), list(at)))
    return basic(length) | flat | masks


POINT = st.tuples(*(st.integers(-length, length - 1) for length in SHAPE))


@every_store
@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(key=st.tuples(*map(outer, SHAPE)), points=st.lists(POINT, min_size=1, max_size=8))
def test_selections_equal_those_of_numpy(
    stored: Stored, kind: str, key: tuple[Any, ...], points: list[tuple[int, ...]]
) -> None:
    path, values = stored
    array, expected = opened(path, kind), values
    for axis in reversed(range(3)):
        expected = expected[(slice(None),) * axis + (key[axis],)]
    same(array.oindex[key], expected)
    at = tuple(np.array(points).T)
    same(array.vindex[at], values[at])
    pairs = tuple(each.reshape(1, -1) for each in at)
    same(array.vindex[pairs], values[pairs])


def test_of_a_store_only_the_objects_of_a_selection_are_requested(stored: Stored) -> None:
    path, values = stored
    array = opened(path, "ranges")
    asked: list[Any] = array.store.asked  # type: ignore[attr-defined]
    asked.clear()
    tokens = [TOKENS - 1, 0, 1]
    same(array.oindex[9, tokens], values[9, tokens])
    assert sorted(key for key, _ in asked) == ["c.2.0.0", "c.2.2.0"]
    asked.clear()
    for key in ((slice(4, 4),), (slice(None), slice(7, 7)), (2, slice(9, 5))):
        same(array[key], values[key])
    same(array.oindex[:, np.zeros(TOKENS, bool)], values[:, :0])
    assert not [key for key, byte_range in asked if byte_range is not None and key != "zarr.json"]


def test_an_object_that_is_replaced_between_two_requests_is_read_again(small: Stored) -> None:
    path, values = small
    left = 1

    def replaced(key: str, found: Buffer) -> Buffer:
        nonlocal left
        data = bytearray(found.to_bytes())
        data[-5] ^= left > 0
        left -= 1
        return Buffer.from_bytes(bytes(data))

    array = zarr.open_array(Requests(LocalStore(path / "W"), change=replaced), mode="r")
    same(array[2, :5], values[2, :5])
    assert left == -1
    left = 2
    with pytest.raises(FormatError, match="is not usable"):
        array[2, :5]


def test_an_object_that_goes_away_between_two_requests_is_missing(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", random_bits((4, 3000, 6), 2))  # too much for one request

    def removed(key: str, found: Buffer) -> Buffer:
        (path / "W" / key).unlink(missing_ok=True)
        return found

    array = zarr.open_array(Requests(LocalStore(path / "W"), change=removed), mode="r")
    with pytest.raises(FormatError, match=r"^W, block 0 .* is missing"):
        array[1]


def test_a_run_can_be_read_while_the_interpreter_ends(small: Stored) -> None:
    """Its threads take no more work then."""
    path, values = small
    readers().shutdown()
    try:
        same(opened(path)[...], values)
        same(opened(path, "ranges")[...], values)
    finally:
        readers.cache_clear()


@every_store
def test_what_is_no_block_of_its_place_is_named(small: Stored, kind: str) -> None:
    path, values = small
    shard, other = path / "W" / "c.1.0.0", path / "W" / "c.0.0.0"
    data = shard.read_bytes()
    broken = [data[:keep] for keep in (0, 3, 20, 100, -1, -50)]
    for position in range(0, len(data), 97):
        flipped = bytes([data[position] ^ 1 << position % 8])
        broken.append(data[:position] + flipped + data[position + 1 :])
    for content in (*broken, other.read_bytes()):
        shard.write_bytes(content)
        array = opened(path, kind)
        with pytest.raises(FormatError, match=r"^W, block 1 \(.*c\.1\.0\.0\) is not usable: "):
            array[5]
        same(array[1], values[1])  # the other blocks are as good as before
    shard.unlink()
    with pytest.raises(
        FormatError, match=r"^W, block 1 \(.*c\.1\.0\.0\) is missing; if the run was"
    ):
        opened(path, kind)[...]


def open_below(folder: Path) -> list[str]:
    """Files there that this process has open; what else its threads have is theirs."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was that of the list, or of another thread
            found.append(os.readlink(f"/proc/self/fd/{file}"))
    return [name for name in found if Path(name).is_relative_to(folder)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count descriptors")
def test_no_file_stays_open(small: Stored) -> None:
    folder, array = small[0].resolve(), opened(small[0])
    shard = folder / "W" / "c.1.0.0"
    with open(shard, "rb"):
        assert len(open_below(folder)) == 1
    array[:, 0]
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(FormatError):
        array[:, 0]
    until = time.monotonic() + 30
    while open_below(folder) and time.monotonic() < until:
        time.sleep(0.01)  # the error of a block does not wait for others that are being read
    assert not open_below(folder)


CODEC = BlockCodec(array="W", chunk_shape=(4, 5, 3), chain=CHAIN, runs=((0, "5a" * 16),))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "trajstore.delta"),
        ("array", ...),
        ("chunk_shape", "many"),
        ("runs", 7),
        ("kind", "secret"),
        ("token_first", 1),
        ("beyond", True),
    ],
)
def test_metadata_that_are_none_are_refused(key: str, value: Any) -> None:
    described = CODEC.to_dict()
    put(described, key if key == "name" else f"configuration.{key}", value)
    with pytest.raises(ValueError, match=r"^zarr\.json: codecs\.0"):
        BlockCodec.from_dict(described)


def made(objects: dict[str, Any], **options: Any) -> zarr.Array:
    """An empty array that zarr writes through the codec."""
    arguments: dict[str, Any] = {"shape": (8, 10, 3), "chunks": (4, 10, 3), "dtype": "float32"}
    return zarr.create_array(
        MemoryStore(objects),
        serializer=CODEC,
        compressors=None,
        filters=None,
        fill_value=float("nan"),
        **arguments | options,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "bfloat16 encodes float32, got .*loat64"),
        ({"shape": (8, 10), "chunks": (4, 10)}, "inner chunks of .*, but the array"),
        ({"chunks": (4, 8, 3)}, r"inner chunks of \(4, 5, 3\) do not divide \(4, 8, 3\)"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made({}, **options)


def test_what_zarr_writes_it_reads_and_can_change() -> None:
    values = widen(random_bits((8, 10, 3), 5), native_type("bfloat16"))
    objects: dict[str, Any] = {}
    array = made(objects)
    array[...] = values
    same(array[...], values)
    array[2, 3:5] = 1.5
    values[2, 3:5] = 1.5
    same(array[...], values)
    array.resize((6, 10, 3))
    same(array[...], values[:6])
    form = CODEC.form((4, 10, 3))
    del objects["zarr.json"]
    labels = [tail_of(data.to_bytes(), form, None).label for data in objects.values()]
    assert {(label.block, label.rows) for label in labels} == {(ANYWHERE, 4)}


def test_what_zarr_does_not_write_is_an_error() -> None:
    """Values that would be rounded; and chunks that equal the fill value, in a read."""
    array = made({})
    with pytest.raises(ValueError, match="not exactly representable in bfloat16"):
        array[0] = 0.1
    array[...] = np.float32("nan")
    with pytest.raises(FormatError, match=r"^W, block 0 .* is missing"):
        array[...]


LENGTH = 23


RANGES = st.slices(LENGTH).map(lambda item: range(*item.indices(LENGTH))).filter(len)
ARRAYS = st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=9).map(np.array)


@given(RANGES | ARRAYS, st.integers(1, LENGTH + 3))
def test_picks_bring_each_position_to_its_place(wanted: Any, part: int) -> None:
    axis = np.arange(100, 100 + LENGTH)
    out = np.zeros(len(wanted), int)
    found = divide_axis(wanted, part)
    assert sorted(found) == sorted({int(position) // part for position in wanted})
    for number, pick in found.items():
        held = axis[number * part : (number + 1) * part][pick.window]
        assert len(held) == pick.window.stop - pick.window.start > 0
        out[pick.place] = held if pick.taken is None else held[pick.taken]
        # The window is no larger than it must be.
        taken = np.arange(len(held)) if pick.taken is None else pick.taken
        assert taken.min() == 0
        assert taken.max() == len(held) - 1
        assert len(positions(pick.place)) == len(taken)
    assert (out == axis[np.asarray(wanted)]).all()
    # Rows in order are taken and put by slices.
    if getattr(wanted, "step", 1) == 1 and len(wanted) > 1 and (np.diff(wanted) == 1).all():
        assert {type(pick.place) for pick in found.values()} == {slice}
        assert {pick.taken for pick in found.values()} == {None}


@pytest.mark.parametrize(
    "key",
    [
        (np.array([0, 3]), np.array([1, 2]), slice(None)),
        (np.array([0, 3]), np.array([1, 2]), np.array([0, 0])),
        (np.array([[0], [3]]), np.array([[1, 2]]), slice(None)),
        (np.array([[0, 3]]), slice(None), 1),
        (np.array(2), slice(None), 1),
        (np.array([True] * 7), np.array([False] * 5), slice(None)),
    ],
)
def test_points_are_left_to_numpy(key: tuple[Any, ...]) -> None:
    assert outer_positions(key, (7, 5, 4)) is None
