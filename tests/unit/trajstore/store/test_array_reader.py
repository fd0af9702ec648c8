from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from bits_and_calls import random_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from trajstore import FormatError, RunWriter, open_run
from trajstore.schema import ENCODINGS
from trajstore.store.array_reader import StoredArray, stored_array
from trajstore.values.native_types import native_type, widen

ROWS, TOKENS, HIDDEN = 11, 300, 3


@pytest.fixture(scope="module", params=[*ENCODINGS, "large", "large, in threads"])
def stored(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[StoredArray, np.ndarray]]:
    """An array of several chunks a shard and several shards, and its values."""
    bits = random_bits((ROWS, TOKENS, HIDDEN), 21)
    path = tmp_path_factory.mktemp("stored") / "run.zarr"
    large, threads = request.param.startswith("large"), 3 if "threads" in request.param else 1
    with pytest.MonkeyPatch.context() as patch:
        if large:  # stored as large rows are, in two chunks along step
            patch.setattr("trajstore.store.block_plan._SMALL_ROW", 0)
        with RunWriter.create(
            path,
            token=np.arange(TOKENS),
            hidden=HIDDEN,
            variables={"W": "bfloat16"},
            block_rows=10 if large else 4,
            encoding="delta" if large else request.param,
        ) as run:
            for row in range(ROWS):
                run.append(step=row, W=bits[row])
        array = stored_array(path, "W", zarr.open_group(path, mode="r")["W"])
        assert array is not None
        assert array.chain.token_first == large
        assert array.shard[0] == array.chunk[0] * (1 + large)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trajstore.store.array_reader._LEAST_WORK", 0 if threads > 1 else 8 << 20)
        yield replace(array, threads=threads), widen(bits, native_type("bfloat16"))


def test_plain_zarr_reads_the_same(stored: tuple[StoredArray, np.ndarray]) -> None:
    array, values = stored
    theirs = zarr.open_group(array.path, mode="r")["W"][...]
    assert theirs.tobytes() == values.tobytes()


def index(length: int) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.integers(-length, length - 1),
        st.slices(length),
        st.lists(st.integers(-length, length - 1), min_size=1, max_size=5),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(index(ROWS), index(TOKENS), index(HIDDEN)))
def test_every_selection_is_what_numpy_would_pick(
    stored: tuple[StoredArray, np.ndarray], key: tuple[Any, ...]
) -> None:
    array, values = stored
    expected = values
    for axis in reversed(range(3)):
        item = np.asarray(key[axis]) if isinstance(key[axis], list) else key[axis]
        expected = expected[(slice(None),) * axis + (item,)]
    got = array[key]
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def test_an_index_out_of_range_is_an_error(stored: tuple[StoredArray, np.ndarray]) -> None:
    array, _ = stored
    for key in (ROWS, (0, -TOKENS - 1), (0, 0, 0, 0)):
        with pytest.raises(IndexError):
            array[key]


def test_it_travels_to_other_processes(stored: tuple[StoredArray, np.ndarray]) -> None:
    array, values = stored
    assert pickle.loads(pickle.dumps(array))[3].tobytes() == values[3].tobytes()


def test_a_child_process_has_threads_of_its_own(stored: tuple[StoredArray, np.ndarray]) -> None:
    array, values = stored
    assert array[...].tobytes() == values.tobytes()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # not to wait for threads that are not there
        try:
            os._exit(array[3:].tobytes() != values[3:].tobytes())
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_chunks_that_hold_a_part_are_read(
    stored: tuple[StoredArray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    array, values = stored
    read: list[int] = []
    real = os.pread

    def pread(file: int, length: int, offset: int) -> bytes:
        read.append(length)
        return real(file, length, offset)

    monkeypatch.setattr("trajstore.store.array_reader.os.pread", pread)
    tokens = [TOKENS - 1, 0]
    assert array[9, tokens].tobytes() == values[9, tokens].tobytes()
    chunks = {0, (TOKENS - 1) // array.chunk[1]}
    assert len([length for length in read if length != array.index_length]) == len(chunks)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, np.ndarray]:
    """A run whose chunks hold several blocks of Blosc, with values that change little."""
    monkeypatch.setattr("trajstore.store.block_plan._SMALL_ROW", 0)
    steps = np.random.default_rng(3).integers(-2, 3, (8, 2_000, 64))
    bits = (0x3F80 + steps.cumsum(axis=0)).astype(np.uint16)
    path = tmp_path / "large.zarr"
    with RunWriter.create(
        path,
        token=np.arange(2_000),
        hidden=64,
        variables={"W": "bfloat16", "grad": "bfloat16"},
        block_rows=8,
    ) as run:
        for row in range(len(bits)):
            run.append(step=row, W=bits[row], grad=bits[row])
    return path, bits


@pytest.mark.parametrize("name", ["W", "grad"])
def test_only_what_is_needed_is_decompressed(
    large: tuple[Path, np.ndarray], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bits = large
    array = stored_array(path, name, zarr.open_group(path, mode="r")[name])
    assert array is not None
    decompressed: list[int] = []
    real = blosc.decompress

    def decompress(frame: memoryview, out: np.ndarray) -> Any:
        decompressed.append(out.nbytes)
        return real(frame, out)

    monkeypatch.setattr("trajstore.codec.chunk_decoder.blosc.decompress", decompress)
    keys: dict[str, tuple[Any, ...]] = {
        "token": (slice(None), slice(700, 703)),
        "step": (slice(2, 3), slice(700, 703)),
    }
    for what, key in keys.items():
        decompressed.clear()
        assert (array.bits(key) == bits[key]).all()
        chunk = int(np.prod(array.chunk)) * 2
        # Of W the tokens' own blocks, of the others the rows so far; the other way it is all.
        if name == "W" or what == "step":
            assert 0 < sum(decompressed) <= 0.6 * chunk
        else:
            assert sum(decompressed) == chunk


def test_large_selections_are_read_in_threads(
    large: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bits = large
    array = stored_array(path, "grad", zarr.open_group(path, mode="r")["grad"])
    assert array is not None
    names: set[str] = set()
    real = StoredArray._read_share

    def spy(self: StoredArray, *arguments: Any) -> None:
        names.add(threading.current_thread().name)
        real(self, *arguments)

    monkeypatch.setattr(StoredArray, "_read_share", spy)
    expected = widen(bits, native_type("bfloat16")).tobytes()
    monkeypatch.setattr("trajstore.store.array_reader._LEAST_WORK", 8 << 20)
    assert replace(array, threads=2)[...].tobytes() == expected
    assert names == {threading.current_thread().name}  # 2 MiB
    names.clear()
    monkeypatch.setattr("trajstore.store.array_reader._LEAST_WORK", 1 << 20)
    assert replace(array, threads=2)[...].tobytes() == expected
    assert names
    assert all(name.startswith("trajstore-reader") for name in names)


def test_a_run_can_be_read_while_the_interpreter_ends(large: tuple[Path, np.ndarray]) -> None:
    script = """
import atexit, sys
import trajstore, trajstore.store.array_reader
trajstore.store.array_reader._LEAST_WORK = 0
ds = trajstore.open_run(sys.argv[1], chunks=None)
atexit.register(lambda: print(float(ds.W.values[0].max())))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(large[0])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    values = widen(large[1], native_type("bfloat16"))
    assert float(done.stdout) == values[0].max()


def test_dask_reads_only_what_a_selection_needs(
    small_run: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = StoredArray.__getitem__

    def spy(self: StoredArray, key: Any) -> np.ndarray:
        values = real(self, key)
        if values.size:
            seen.append(values.shape)
        return values

    monkeypatch.setattr(StoredArray, "__getitem__", spy)
    ds = open_run(small_run[0])
    assert ds.W[:, 3].values.shape == (11, 6)
    assert sorted(seen) == [(3, 6), (4, 6), (4, 6)]


def test_an_array_stored_otherwise_is_left_to_zarr(tmp_path: Path) -> None:
    for number, options in enumerate(
        ({"chunks": (2, 2)}, {"chunks": (2, 2), "shards": (4, 4)}, {"shape": (4,), "chunks": (2,)})
    ):
        arguments: dict[str, Any] = {"shape": (4, 4), "dtype": "float32"} | options
        array = zarr.create_array(tmp_path / str(number), **arguments)
        assert stored_array(tmp_path, "W", array) is None


def shard_of(path: Path, block: int) -> Path:
    return path / "W" / f"c.{block}.0.0"


def test_every_flipped_bit_is_found_and_named(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    shard = shard_of(path, 1)
    data = shard.read_bytes()
    for position in range(0, len(data), 23):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        shard.write_bytes(broken)
        with pytest.raises(FormatError, match=r"^W, block 1"):
            open_run(path).W.isel(step=5).load()
        open_run(path).W.isel(step=1).load()  # the other blocks are as good as before


@pytest.mark.parametrize("keep", [0, 3, 20, 100])
def test_a_truncated_shard_is_named(small_run: tuple[Path, Any], keep: int) -> None:
    shard = shard_of(small_run[0], 2)
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(FormatError, match=r"^W, block 2"):
        open_run(small_run[0]).W.load()


def test_no_file_stays_open(small_run: tuple[Path, Any]) -> None:
    array, shard = open_run(small_run[0], chunks=None).W, shard_of(small_run[0], 1)
    assert array[:, 0].values.size
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert array[:, 0].values.size
    shard.write_bytes(shard.read_bytes()[:-50])
    for _ in range(5):
        with pytest.raises(FormatError):
            array[:, 0].values  # noqa: B018
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_shard_is_an_error_and_not_nan(small_run: tuple[Path, Any]) -> None:
    shard_of(small_run[0], 0).unlink()
    with pytest.raises(FormatError, match=r"^W, block 0: .* is missing"):
        open_run(small_run[0]).W.load()


def test_native_bits_come_as_they_were_written(
    small_run: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, bits = small_run
    for name, array in zarr.open_group(path, mode="r").arrays():
        if name in bits:
            stored = stored_array(path, name, array)
            assert stored is not None
            where = (slice(3, 9), slice(1, 10))[: array.ndim]
            expected = bits[name][where]
            if stored.chain.native.itemsize > expected.itemsize:  # portable holds float32
                native = native_type(array.attrs["native_dtype"])
                expected = widen(expected, native).view(f"u{native.stored.itemsize}")
            assert stored.bits(where).dtype == expected.dtype
            assert (stored.bits(where) == expected).all()
