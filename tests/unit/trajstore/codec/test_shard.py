"""Shards against what zarr-python itself makes of the same metadata."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from bits_and_calls import random_bits
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.codec.block_form import BlockForm
from trajstore.codec.block_label import ANYWHERE, BlockLabel
from trajstore.codec.shard import encoded_chunks, shard_parts
from trajstore.store.metadata.array_metadata import ArrayFacts, metadata_of, recorded_attributes
from trajstore.store.metadata.block_plan import ArrayLayout, plan
from trajstore.store.metadata.object_keys import chunk_key
from trajstore.values.native_types import widen

RUNS = ((0, "5a" * 16),)
BLOCK_ROWS = 7
CASES = [
    ("W", "bfloat16", 300, 5),
    ("W", "float16", 40, 3),
    ("W", "float32", 1, 1),
    ("grad", "float64", 9, 2),
    ("logits", "bfloat16", 300, 5),
    ("loss", "float32", 3, 5),
    ("lr", "float64", 3, 5),
]

every_case = pytest.mark.parametrize(("name", "dtype", "tokens", "hidden"), CASES)


@pytest.fixture(autouse=True)
def _in_several_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the largest case is stored in three parts of two chunks each."""
    monkeypatch.setattr("trajstore.store.metadata.block_plan._LARGEST_OBJECT", 16 << 10)
    monkeypatch.setattr("trajstore.store.metadata.block_plan._CHUNK", 8 << 10)
    monkeypatch.setattr("trajstore.store.metadata.block_plan._FEWEST_TOKENS", 16)


def make(
    name: str, dtype: str, tokens: int, hidden: int
) -> tuple[ArrayLayout, np.ndarray, dict[str, Any]]:
    """Layout of an array, the bits of a block of it, and its metadata file."""
    variables = {"W": dtype} | {name: dtype}
    layout = plan(variables, tokens=tokens, hidden=hidden, block_rows=BLOCK_ROWS)
    array = layout.arrays[name]
    bits = random_bits((BLOCK_ROWS, *array.row), 5, 8 * array.native.itemsize)
    facts = ArrayFacts(
        name=name,
        shape=(BLOCK_ROWS, *array.row),
        attributes=recorded_attributes(name, array.native.name, []),
        form=array.form(RUNS),
    )
    return array, bits, metadata_of(facts)


def encoded(form: BlockForm, bits: np.ndarray, part: int) -> tuple[bytes, bytes]:
    """A shard, and its digest."""
    digests: list[bytes] = []
    chunks = encoded_chunks(form, bits)
    parts = shard_parts(form, chunks, block=0, part=part, rows=len(bits), on_digest=digests.append)
    data = b"".join(parts)
    (digest,) = digests
    return data, digest


def objects(array: ArrayLayout, bits: np.ndarray) -> dict[str, Any]:
    form, ndim = array.form(RUNS), len(array.shard)
    return {
        chunk_key(array.variable.name, 0, ndim, part): Buffer.from_bytes(
            encoded(form, bits[array.window(part)], part)[0]
        )
        for part in range(array.parts)
    }


def opened(name: str, metadata: dict[str, Any], stored: dict[str, Any]) -> zarr.Array:
    stored[f"{name}/zarr.json"] = Buffer.from_bytes(json.dumps(metadata).encode())
    return zarr.open_array(MemoryStore(stored), path=name, mode="r+")


@every_case
def test_zarr_reads_the_bits_back(name: str, dtype: str, tokens: int, hidden: int) -> None:
    array, bits, metadata = make(name, dtype, tokens, hidden)
    codecs = [codec["name"] for codec in metadata["codecs"]]
    assert codecs == ["trajstore.block"]
    for rows in (BLOCK_ROWS, 4):
        metadata["shape"][0] = rows
        read = opened(name, metadata, objects(array, bits[:rows]))[...]
        unsigned = f"u{array.native.stored.itemsize}"
        assert (read.view(unsigned) == widen(bits[:rows], array.native).view(unsigned)).all()


@every_case
def test_what_zarr_writes_differs_by_the_label_only(
    name: str, dtype: str, tokens: int, hidden: int
) -> None:
    """Zarr labels them too, by the codec, but does not know their places."""
    array, bits, metadata = make(name, dtype, tokens, hidden)
    form = array.form(RUNS)
    written: dict[str, Any] = {}
    whole = [array.parts * array.shard[1], *array.row[1:]] if len(array.shard) > 1 else []
    # As far as the shards reach: what zarr pads with is its own affair.
    padded = np.zeros([BLOCK_ROWS, *whole], array.native.bits)
    padded[tuple(map(slice, bits.shape))] = bits
    metadata["shape"] = list(padded.shape)
    opened(name, metadata, written)[...] = widen(padded, array.native)
    for part in range(array.parts):
        ours, digest = encoded(form, padded[array.window(part)], part)
        theirs = written[chunk_key(name, 0, len(array.shard), part)].to_bytes()
        index = ours[-form.index_length :]
        chunks = ours[: -form.tail_length]
        assert theirs[: len(chunks)] == chunks
        assert theirs[-form.index_length :] == index
        assert len(theirs) == len(ours)
        label = BlockLabel.unpack(theirs[-form.tail_length : -form.index_length], index[:-4])
        assert (label.block, label.part, label.rows) == (ANYWHERE, 0, BLOCK_ROWS)
        assert (label.run, label.array) == (RUNS[0][1], name)
        assert (label.settings, label.digest) == (form.settings, digest)
