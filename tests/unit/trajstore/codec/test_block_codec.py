"""What zarr reads and writes through the codec, from whatever store, against NumPy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import zarr
from bits_and_calls import random_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_block import divided_run, recorded
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.buffer.cpu import Buffer
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from trajstore.codec.block import ANYWHERE, LABEL, BlockLabel
from trajstore.codec.block_codec import BlockCodec
from trajstore.codec.chunk import chain
from trajstore.errors import FormatError
from trajstore.values.native_types import native_type, widen

ROWS, TOKENS, HIDDEN = 11, 300, 3

Stored = tuple[Path, np.ndarray]


class Requests(WrapperStore[Any]):
    """A store that is not local, and keeps what is asked of it."""

    def __init__(self, store: Any, asked: list[tuple[str, ByteRequest | None]]) -> None:
        super().__init__(store)
        self.asked = asked

    def _with_store(self, store: Any) -> Self:
        return type(self)(store, self.asked)

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        self.asked.append((key, byte_range))
        return await self._store.get(key, prototype, byte_range)


def opened(path: Path, kind: str) -> zarr.Array:
    """W of a run, by a store of that kind."""
    stores: dict[str, Any] = {
        "local": lambda: LocalStore(path / "W"),
        "ranges": lambda: Requests(LocalStore(path / "W"), []),
    }
    return zarr.open_array(stores[kind](), mode="r")


every_store = pytest.mark.parametrize("kind", ["local", "ranges"])


@pytest.fixture(scope="module", params=["small", "large"])
def stored(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stored:
    """A run, and the values of W: three blocks of three objects, each of several chunks."""
    path, large = tmp_path_factory.mktemp("stored") / "run.zarr", request.param == "large"
    bits = divided_run(path, large=large)
    array = zarr.open_array(path / "W")
    (codec,) = array.metadata.codecs
    assert array.cdata_shape == (3, 3, 1)
    assert codec.chain.token_first == large
    assert codec.form(array.chunks).grid == ((2, 3, 1) if large else (1, 3, 1))
    return path, widen(bits, native_type("bfloat16"))


class Replaced(Requests):
    """A store in which an object is replaced after its end has been read, so many times."""

    times = 1

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        found = await super().get(key, prototype, byte_range)
        if self.times and isinstance(byte_range, SuffixByteRequest):
            self.times -= 1
            data = bytearray(found.to_bytes())
            data[-5] ^= 1
            return Buffer.from_bytes(bytes(data))
        return found


def test_an_object_that_is_replaced_between_two_requests_is_read_again(stored: Stored) -> None:
    path, values = stored
    array = zarr.open_array(Replaced(LocalStore(path / "W"), []), mode="r")
    store: Any = array.store
    assert array[2, :5].tobytes() == values[2, :5].tobytes()
    assert store.times == 0
    store.times = 2
    with pytest.raises(FormatError, match="is not usable"):
        array[2, :5]


def flat(length: int) -> st.SearchStrategy[np.ndarray]:
    """Positions along an axis: in any order, again and again, from the end."""
    one = st.integers(-length, length - 1)
    return st.lists(one, min_size=1, max_size=6).map(lambda at: np.array(at, np.intp))


def mask(length: int) -> st.SearchStrategy[np.ndarray]:
    def of(positions: set[int]) -> np.ndarray:
        found = np.zeros(length, bool)
        found[list(positions)] = True
        return found

    return st.sets(st.integers(0, length - 1), max_size=8).map(of)


def forwards(length: int) -> st.SearchStrategy[slice]:
    """Slices that zarr takes: with steps, but not backwards; also of nothing."""
    ends = st.none() | st.integers(-length, length)
    return st.builds(slice, ends, ends, st.none() | st.integers(1, length))


def basic(length: int) -> st.SearchStrategy[Any]:
    return st.integers(-length, length - 1) | forwards(length)


def outer(length: int) -> st.SearchStrategy[Any]:
    return basic(length) | flat(length) | mask(length)


SHAPE = (ROWS, TOKENS, HIDDEN)
many = settings(
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def same(got: Any, expected: np.ndarray) -> None:
    """Bit for bit, NaNs included."""
    got = np.asarray(got)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


@every_store
@many
@given(st.tuples(*map(outer, SHAPE)))
def test_each_axis_by_itself(stored: Stored, kind: str, key: tuple[Any, ...]) -> None:
    path, values = stored
    expected = values
    for axis in reversed(range(3)):
        expected = expected[(slice(None),) * axis + (key[axis],)]
    same(opened(path, kind).oindex[key], expected)


@every_store
@many
@given(st.lists(st.tuples(*(st.integers(-n, n - 1) for n in SHAPE)), min_size=1, max_size=8))
def test_points_equal_those_of_numpy(
    stored: Stored, kind: str, points: list[tuple[int, ...]]
) -> None:
    path, values = stored
    key = tuple(np.array(points).T)
    array = opened(path, kind)
    same(array.vindex[key], values[key])
    pairs = tuple(positions.reshape(1, -1) for positions in key)
    same(array.vindex[pairs], values[pairs])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_process_has_threads_of_its_own(stored: Stored) -> None:
    path, values = stored
    array = opened(path, "local")
    same(array[...], values)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # not to wait for threads that are not there
        try:
            os._exit(array[3:].tobytes() != values[3:].tobytes())
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_run_can_be_read_while_the_interpreter_ends(stored: Stored) -> None:
    path, values = stored
    script = """
import atexit, sys
import numpy, zarr
array = zarr.open_array(sys.argv[1], mode="r")
atexit.register(lambda: print(array[...].tobytes().hex()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, path / "W"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert bytes.fromhex(done.stdout) == values.tobytes()


def test_of_a_file_only_the_chunks_that_hold_a_part_are_read(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = stored
    array = opened(path, "local")
    form = array.metadata.codecs[0].form(array.chunks)
    read: list[int] = []
    real = os.pread

    def pread(file: int, length: int, offset: int) -> bytes:
        read.append(length)
        return real(file, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    tokens = [TOKENS - 1, 0]
    same(array.oindex[9, tokens], values[9, tokens])
    assert read.count(form.tail_length) == 2
    assert len(read) == 4


def watched(stored: Stored) -> tuple[zarr.Array, np.ndarray, list[Any]]:
    """W by a store that is not local, its values, and what is asked of the store from now on."""
    path, values = stored
    array = opened(path, "ranges")
    asked: list[Any] = array.store.asked  # type: ignore[attr-defined]
    asked.clear()
    return array, values, asked


def test_of_another_store_only_ranges_are_requested(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.codec.open_block._SMALL", 0)
    array, values, asked = watched(stored)
    form = array.metadata.codecs[0].form(array.chunks)
    tokens = [TOKENS - 1, 0, 1]
    same(array.oindex[9, tokens], values[9, tokens])
    tails = [item for item in asked if item[1] == SuffixByteRequest(form.tail_length)]
    assert sorted(key for key, _ in tails) == ["c.2.0.0", "c.2.2.0"]
    ranges = [item for item in asked if isinstance(item[1], RangeByteRequest)]
    assert sorted(key for key, _ in ranges) == ["c.2.0.0", "c.2.2.0"]
    assert len(asked) == 4
    for key, asked_for in ranges:
        size = (stored[0] / "W" / key).stat().st_size
        assert 0 < asked_for.end - asked_for.start < (size - form.tail_length) / 2
    asked.clear()
    same(array[4:8], values[4:8])
    assert len(asked) == 6  # chunks that lie side by side come together
    asked.clear()
    monkeypatch.setattr("trajstore.codec.open_block._GAP", 0)
    tokens = [0, array.chunks[1] - 1]  # first and last chunk of an object
    same(array.oindex[1, tokens], values[1, tokens])
    assert len(asked) == 3


def test_a_small_object_is_read_by_one_request(stored: Stored) -> None:
    array, values, asked = watched(stored)
    same(array[4:8], values[4:8])
    keys = [key for key, _ in asked]
    assert sorted(keys) == sorted(set(keys))


def test_an_empty_selection_reads_nothing(stored: Stored) -> None:
    array, values, asked = watched(stored)
    for key in ((slice(4, 4),), (slice(None), slice(7, 7)), (2, slice(9, 5))):
        same(array[key], values[key])
    same(array.oindex[:, np.zeros(TOKENS, bool)], values[:, :0])
    assert not [key for key, byte_range in asked if byte_range is not None and key != "zarr.json"]


@pytest.fixture
def small(tmp_path: Path) -> Stored:
    bits = random_bits((ROWS, 10, 6), 2)
    return recorded(tmp_path / "small.zarr", bits), widen(bits, native_type("bfloat16"))


@every_store
def test_a_flipped_bit_a_cut_or_a_missing_object_is_named(small: Stored, kind: str) -> None:
    path, values = small
    shard = path / "W" / "c.1.0.0"
    data = shard.read_bytes()
    broken = [data[:keep] for keep in (0, 3, 20, 100, -1, -50)]
    for position in range(0, len(data), 31 if kind == "local" else 97):
        flipped = bytes([data[position] ^ 1 << position % 8])
        broken.append(data[:position] + flipped + data[position + 1 :])
    for content in broken:
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


def test_a_pipe_in_place_of_an_object_is_an_error(small: Stored) -> None:
    """To open one for reading would wait for a writer, forever."""
    shard = small[0] / "W" / "c.1.0.0"
    shard.unlink()
    os.mkfifo(shard)
    writer = os.open(shard, os.O_RDWR)  # so that this test ends in any case
    try:
        with pytest.raises(OSError, match=r"not a regular file: .*c\.1\.0\.0"):
            opened(small[0], "local")[5]
    finally:
        os.close(writer)


class Removed(Requests):
    """A store in which an object goes away after its end has been read."""

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        content = await super().get(key, prototype, byte_range)
        if isinstance(byte_range, SuffixByteRequest):
            (self._store.root / key).unlink(missing_ok=True)
        return content


def test_an_object_that_goes_away_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open file stays; of a store that is not local, ranges are read after the end."""
    bits = random_bits((4, 3000, 6), 2)  # too much for one request
    path = recorded(tmp_path / "run.zarr", bits)
    shard = path / "W" / "c.0.0.0"
    copy, real = shard.read_bytes(), os.pread

    def pread(*arguments: int) -> bytes:
        content = real(*arguments)
        shard.unlink(missing_ok=True)
        return content

    array = opened(path, "local")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        same(array[1], widen(bits[1], native_type("bfloat16")))
    assert not shard.exists()
    shard.write_bytes(copy)
    store: Any = Removed(LocalStore(path / "W"), [])
    with pytest.raises(FormatError, match=r"^W, block 0 .* is missing"):
        zarr.open_array(store, mode="r")[1]


@every_store
def test_another_block_in_its_place_is_refused(small: Stored, kind: str) -> None:
    path, _ = small
    first, second = path / "W" / "c.0.0.0", path / "W" / "c.1.0.0"
    second.write_bytes(first.read_bytes())
    run = zarr.open_group(path).attrs["runs"][0][1][:8]
    expected = rf"it is W, block 0, part 0 of run {run}, expected W, block 1, part 0 of run {run}"
    with pytest.raises(FormatError, match=expected):
        opened(path, kind)[4]


def open_below(folder: Path) -> list[str]:
    """Files there that this process has open; what else its threads have is theirs."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was that of the list, or of another thread
            found.append(os.readlink(f"/proc/self/fd/{file}"))
    return [name for name in found if Path(name).is_relative_to(folder)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count descriptors")
def test_no_file_stays_open(small: Stored) -> None:
    path, _ = small
    array = opened(path, "local")
    with open(path / "W" / "c.1.0.0", "rb"):
        assert len(open_below(path.resolve())) == 1
    for _ in range(5):
        array[:, 0]
    shard = path / "W" / "c.1.0.0"
    shard.write_bytes(shard.read_bytes()[:-50])
    for _ in range(5):
        with pytest.raises(FormatError):
            array[:, 0]
    until = time.monotonic() + 30
    while open_below(path.resolve()) and time.monotonic() < until:
        time.sleep(0.01)  # the error of a block does not wait for others that are being read
    assert not open_below(path.resolve())


CHAIN = chain(native_type("bfloat16"), 3, small=True)
CODEC = BlockCodec(array="W", chunk_shape=(4, 5, 3), chain=CHAIN, runs=((0, "5a" * 16),))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "trajstore.delta"},
        {"array": None},
        {"chunk_shape": "many"},
        {"runs": 7},
        {"kind": "secret"},
        {"token_first": 1},
        {"beyond": True},
    ],
)
def test_metadata_that_are_none_are_refused(change: dict[str, Any]) -> None:
    """A setting of None stands for one that is missing."""
    described = CODEC.to_dict()
    for key, value in change.items():
        place = described if key == "name" else described["configuration"]
        place[key] = value
        if value is None:
            del place[key]
    with pytest.raises(ValueError, match=r"^zarr\.json: codecs\.0"):
        BlockCodec.from_dict(described)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "bfloat16 encodes float32, got .*loat64"),
        ({"shape": (8, 10), "chunks": (4, 10)}, "inner chunks of .*, but the array"),
        ({"chunks": (4, 8, 3)}, r"inner chunks of \(4, 5, 3\) do not divide \(4, 8, 3\)"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shape": (8, 10, 3), "chunks": (4, 10, 3), "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        zarr.create_array(
            MemoryStore(), serializer=CODEC, compressors=None, filters=None, **arguments | options
        )


def made(objects: dict[str, Any], **options: Any) -> zarr.Array:
    """An empty array that zarr writes through the codec."""
    return zarr.create_array(
        MemoryStore(objects),
        shape=(8, 10, 3),
        chunks=(4, 10, 3),
        dtype="float32",
        serializer=CODEC,
        compressors=None,
        filters=None,
        fill_value=float("nan"),
        **options,
    )


def test_what_zarr_writes_it_reads_and_can_change() -> None:
    values = widen(random_bits((8, 10, 3), 5), native_type("bfloat16"))
    objects: dict[str, Any] = {}
    array = made(objects)
    array[...] = values
    same(array[...], values)
    array[2, 3:5] = 1.5
    changed = values.copy()
    changed[2, 3:5] = 1.5
    same(array[...], changed)
    array.resize((6, 10, 3))
    same(array[...], changed[:6])
    labels = {
        key: BlockLabel.unpack(
            data.to_bytes()[-CODEC.form((4, 10, 3)).tail_length :][:LABEL],
            data.to_bytes()[-CODEC.form((4, 10, 3)).index_length : -4],
        )
        for key, data in objects.items()
        if key != "zarr.json"
    }
    assert {(label.block, label.rows) for label in labels.values()} == {(ANYWHERE, 4)}


def test_what_zarr_does_not_write_is_an_error() -> None:
    """Values that would be rounded; and chunks that equal the fill value, in a read."""
    array = made({})
    with pytest.raises(ValueError, match="not exactly representable in bfloat16"):
        array[0] = 0.1
    array[...] = np.float32("nan")
    with pytest.raises(FormatError, match=r"^W, block 0 .* is missing"):
        array[...]
