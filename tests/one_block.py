"""Random bits: one block of them as an object, and a run of blocks in many parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bits_and_calls import random_bits
from damage import block_plan

from trajstore import RunWriter
from trajstore.codec.block import BlockForm, encoded_chunks, shard_parts
from trajstore.codec.chunk import chain
from trajstore.values.native_types import native_type

OWN = "2b" * 16

FORM = BlockForm(
    array="W",
    chain=chain(native_type("bfloat16"), 3, small=True),
    shape=(8, 6, 2),
    chunk=(4, 3, 2),
    runs=((0, OWN),),
)
BITS = random_bits(FORM.shape, 3)


def written(form: BlockForm = FORM, *, rows: int = 8, **place: int) -> bytes:
    """An object that holds the random bits of its shape; of `FORM` these are `BITS`."""
    chunks, at = encoded_chunks(form, random_bits(form.shape, 3)), {"block": 5, "part": 1} | place
    return b"".join(shard_parts(form, chunks, **at, rows=rows))


PARTS = {
    "_LARGEST_OBJECT": 5 << 10,
    "_CHUNK": 2 << 10,
    "_CHUNK_OF_HISTORIES": 1 << 10,
    "_FEWEST_TOKENS": 8,
    "_ROWS_OF_A_SNAPSHOT": (2,),
}


def divided_run(path: Path, *, large: bool) -> np.ndarray:
    """A run of W in three blocks of three objects, each of several chunks; its bits.

    If `large`, it is stored as large rows are: in two chunks along step, and token by token.
    """
    bits = random_bits((11, 300, 3), 21)
    with block_plan(**PARTS | {"_SMALL_ROW": 0} if large else PARTS):
        recorded(path, bits)
    return bits


def recorded(path: Path, bits: np.ndarray) -> Path:
    """A run of these bits, in blocks of 4 rows."""
    with RunWriter.create(
        path,
        token=np.arange(bits.shape[1]),
        hidden=bits.shape[2],
        variables={"W": "bfloat16"},
        block_rows=4,
    ) as run:
        for row in range(len(bits)):
            run.append(step=row, W=bits[row])
    return path
