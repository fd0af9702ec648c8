"""What is read past zarr: native bits and values by slices, tails, and whose form is known."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from damage import divided_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajstore.codec.block_codec import BlockCodec
from trajstore.errors import FormatError
from trajstore.store.metadata.block_plan import plan
from trajstore.store.reading.array_reader import StoredArray, block_form, stored_array
from trajstore.store.reading.open_group import open_group
from trajstore.values.native_types import native_type, widen

SHAPE = (11, 300, 3)


def reader(path: Path, name: str = "W") -> StoredArray:
    array = open_group(path)[name]
    assert isinstance(array, zarr.Array)
    found = stored_array(path, name, array)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=["small", "large"])
def stored(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[StoredArray, np.ndarray]:
    """An array of several chunks a shard and several shards a block, and its native bits."""
    path, large = tmp_path_factory.mktemp("stored") / "run.zarr", request.param == "large"
    bits = divided_run(path, large=large)
    array = reader(path)
    assert array.parts == 3
    assert array.chain.token_first == large
    assert array.form.grid == ((2, 3, 1) if large else (1, 3, 1))
    return array, bits


def segment(length: int) -> st.SearchStrategy[slice]:
    """Slices forwards and without gaps, as whoever reads asks for them; also of nothing."""
    end = st.none() | st.integers(-length, length)
    return st.builds(slice, end, end)


@pytest.mark.parametrize("threads", [1, 3])
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 3).flatmap(lambda count: st.tuples(*map(segment, SHAPE[:count]))))
def test_slices_are_what_numpy_would_pick(
    stored: tuple[StoredArray, np.ndarray], threads: int, key: tuple[slice, ...]
) -> None:
    whole, bits = stored
    array = replace(whole, threads=threads)
    found, values = array.bits(key), array.values(key)
    assert found.dtype == bits.dtype
    assert found.shape == bits[key].shape
    assert found.tobytes() == bits[key].tobytes()
    assert values.dtype == np.float32
    expected = widen(bits, native_type("bfloat16"))
    assert values.tobytes() == expected[key].tobytes()


def test_many_shards_are_opened_side_by_side(stored: tuple[StoredArray, np.ndarray]) -> None:
    """Two threads wait for a shard each: a slow disk is asked for both at once."""
    array, bits = stored
    together = threading.Barrier(2, timeout=30)
    waited: set[int] = set()

    class Waiting(StoredArray):
        def opened(self, *arguments: Any) -> Any:
            if threading.get_ident() not in waited:
                waited.add(threading.get_ident())
                together.wait()
            return super().opened(*arguments)

    waiting = Waiting(
        path=array.path, name=array.name, shape=array.shape, form=array.form, threads=2
    )
    assert waiting.bits(()).tobytes() == bits.tobytes()  # of nine shards
    assert len(waited) == 2


def test_an_array_stored_otherwise_is_left_to_zarr(tmp_path: Path) -> None:
    keys = {"name": "default", "configuration": {"separator": "."}}
    layout = plan({"W": "float32"}, tokens=4, hidden=2, block_rows=4)
    codec = BlockCodec(
        array="W", chunk_shape=(2, 2), chain=layout.arrays["W"].chain, runs=((0, "5a" * 16),)
    )
    ours: dict[str, Any] = {
        "chunks": (4, 4), "serializer": codec, "compressors": None, "filters": None
    }  # fmt: skip
    for number, options in enumerate(
        (
            {"chunks": (2, 2)},
            {"chunks": (2, 2), "shards": (4, 4)},
            ours,  # but for its keys, which have slashes
            ours | {"compressors": "auto", "chunk_key_encoding": keys},
        )
    ):
        arguments: dict[str, Any] = {"shape": (4, 4), "dtype": "float32"} | options
        array = zarr.create_array(tmp_path / str(number), **arguments)
        assert block_form(array) is None
        assert stored_array(tmp_path, "W", array) is None
    known = zarr.create_array(
        tmp_path / "known", shape=(4, 4), dtype="float32", **ours | {"chunk_key_encoding": keys}
    )
    form = block_form(known)
    assert form is not None
    assert form.chain == codec.chain


def test_a_broken_block_is_named_and_closed(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    array, shard = reader(path), path / "W" / "c.1.0.0"
    data = shard.read_bytes()
    array.bits(())
    before = len(os.listdir("/proc/self/fd"))
    for broken in (data[:40] + b"x" + data[41:], data[:-50]):
        shard.write_bytes(broken)
        for read in (array.bits, array.values):
            with pytest.raises(FormatError, match=r"^W, block 1.*; the run is damaged$"):
                read((slice(5, 6),))
        array.bits((slice(1, 2),))  # the other blocks are as good as before
    assert len(os.listdir("/proc/self/fd")) == before  # no file stays open
