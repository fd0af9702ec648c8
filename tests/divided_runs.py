"""Runs of W, of random bits, of which blocks are divided into objects and chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bits_and_calls import random_bits
from damage import block_plan

from trajstore import RunWriter

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
