from __future__ import annotations

import os
import pickle
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

from trajstore import FormatError, RunWriter, open_run
from trajstore.bits import native_type, widen
from trajstore.encoding import ENCODINGS
from trajstore.stored import StoredArray, stored_array

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
            patch.setattr("trajstore.layout._SMALL_ROW", 0)
            patch.setattr("trajstore.stored._LEAST_WORK", 0)
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
        os._exit(array[3:].tobytes() != values[3:].tobytes())
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

    monkeypatch.setattr("trajstore.stored.os.pread", pread)
    tokens = [TOKENS - 1, 0]
    assert array[9, tokens].tobytes() == values[9, tokens].tobytes()
    chunks = {0, (TOKENS - 1) // array.chunk[1]}
    assert len([length for length in read if length != array.index_length]) == len(chunks)


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
