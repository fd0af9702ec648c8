"""Shards against what zarr-python itself writes for the same metadata."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from bits_and_calls import random_bits
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.schema import ENCODINGS
from trajstore.store.block_plan import plan
from trajstore.store.new_run import new_arrays
from trajstore.store.object_keys import chunk_key
from trajstore.store.shard import chunk_windows, shard_parts
from trajstore.store.zarr_json import RunMetadata
from trajstore.values.native_types import widen

CASES = [
    ("W", "bfloat16", 300, 5),
    ("W", "float16", 40, 3),
    ("W", "float32", 1, 1),
    ("logits", "bfloat16", 300, 5),
    ("loss", "float32", 3, 5),
    ("lr", "float64", 3, 5),
]


def make(
    name: str, dtype: str, tokens: int, hidden: int, encoding: str
) -> tuple[Any, np.ndarray, RunMetadata]:
    layout = plan({name: dtype}, tokens=tokens, hidden=hidden, block_rows=7, encoding=encoding)
    array = layout.arrays[name]
    bits = random_bits((7, *array.row), 5, 8 * array.native.itemsize)
    return array, bits, RunMetadata(new_arrays(layout, {"token": np.arange(tokens)})[0], {})


def shard(bits: np.ndarray, array: Any) -> bytes:
    windows = chunk_windows(array)
    return b"".join(shard_parts(array.chain.encode(bits[w], array.chunk) for w in windows))


def opened(name: str, documents: RunMetadata, rows: int, objects: dict[str, Any]) -> zarr.Array:
    buffer = Buffer.from_bytes
    objects[f"{name}/zarr.json"] = buffer(documents.array(name, rows))
    return zarr.open_array(MemoryStore(objects), path=name, mode="r+")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("name", "dtype", "tokens", "hidden"), CASES)
def test_zarr_reads_the_bits_back(
    name: str, dtype: str, tokens: int, hidden: int, encoding: str
) -> None:
    array, bits, documents = make(name, dtype, tokens, hidden, encoding)
    for rows in (7, 4):
        buffer = Buffer.from_bytes(shard(bits[:rows], array))
        objects = {chunk_key(name, 0, len(array.shard)): buffer}
        read = opened(name, documents, rows, objects)[...]
        unsigned = f"u{array.native.stored.itemsize}"
        assert (read.view(unsigned) == widen(bits[:rows], array.native).view(unsigned)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("name", "dtype", "tokens", "hidden"), CASES)
def test_a_whole_shard_is_what_zarr_writes(
    name: str, dtype: str, tokens: int, hidden: int, encoding: str
) -> None:
    array, bits, documents = make(name, dtype, tokens, hidden, encoding)
    objects: dict[str, Any] = {}
    stored = widen(bits, array.native)
    padded = np.zeros(array.shard, array.native.stored)
    padded[tuple(slice(length) for length in stored.shape)] = stored
    document = json.loads(documents.array(name, 7))
    document["shape"] = list(array.shard)
    whole = RunMetadata.__new__(RunMetadata)
    whole._arrays, whole._series = {name: document}, (name,)
    opened(name, whole, 7, objects)[...] = padded
    theirs = objects[chunk_key(name, 0, len(array.shard))].to_bytes()
    assert shard(bits, array) == theirs
