"""Shards with damaged inner chunks, and the same shards filled with NaN.

Inner chunks that match their checksums keep their values, bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from trajstore.codec.shard import encoded_chunks, shard_parts
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.chunk_checks import whole_chunks
from trajstore.integrity.problem import Problem
from trajstore.store.metadata.object_keys import block_of
from trajstore.store.metadata.repairs import FilledShard
from trajstore.values.native_types import as_bits

__all__ = ["DamagedShard", "damaged_shards", "nan_filled"]

DamagedShard = tuple[FilledShard, Problem]
"""The damage, and its first problem."""


def damaged_shards(metadata: CheckedMetadata, problems: Collection[Problem]) -> list[DamagedShard]:
    """Damaged shards, in the order of their problems.

    A shard that the system refuses to read may be sound, and is left out.
    """
    refused = {problem.path for problem in problems if problem.remedy == "none"}
    found: dict[tuple[str, int, int], list[Problem]] = defaultdict(list)
    for problem in problems:
        if problem.remedy == "cut" and problem.array is not None and problem.path not in refused:
            place = block_of(problem.path.name, len(metadata.arrays[problem.array]["shape"]))
            assert place is not None  # such problems name a shard
            found[problem.array, *place].append(problem)
    return [(_damage(metadata, *place), each[0]) for place, each in found.items()]


def _damage(metadata: CheckedMetadata, array: str, block: int, part: int) -> FilledShard:
    stored = metadata.stored(array)
    whole = whole_chunks(stored, block, part)
    first = block * stored.shard[0]
    rows = min(metadata.rows - first, stored.shard[0])
    grid, length = stored.form.grid, stored.chunk[0]
    each = math.prod(grid[1:])  # chunks that hold the same rows
    held = -(-rows // length) * each
    chunks = [number for number in range(min(held, grid[0] * each)) if number not in whole]
    start, stop = (
        (chunks[0] // each * length, min(rows, (chunks[-1] // each + 1) * length))
        if chunks
        else (0, 0)
    )
    return FilledShard(
        array=array,
        block=block,
        part=part,
        chunks=tuple(chunks),
        rows=(first + start, first + stop),
    )


def nan_filled(metadata: CheckedMetadata, damage: FilledShard) -> Iterator[bytes]:
    """Parts of the shard with NaN in its damaged inner chunks, ready to write.

    Parameters
    ----------
    metadata : CheckedMetadata
    damage : FilledShard
        Damage of an array other than `step`.
    """
    stored = metadata.stored(damage.array)
    form, native = stored.form, stored.chain.native
    nan = as_bits(np.full(1, np.nan, native.stored), native, damage.array)
    rows = min(metadata.rows - damage.block * form.shape[0], form.shape[0])
    shape = [rows]
    if stored.ndim > 1:
        left = stored.shape[1] - damage.part * form.shape[1]
        shape += [min(left, form.shape[1]), *stored.shape[2:]]
    bits = np.full(shape, nan[0], native.bits)
    windows = list(form.windows())
    for number, data in whole_chunks(stored, damage.block, damage.part).items():
        if number not in damage.chunks:
            values = np.empty(form.chunk, native.bits)
            form.decoder.decode(data, tuple(slice(0, length) for length in form.chunk), values)
            target = bits[windows[number]]
            target[...] = values[tuple(map(slice, target.shape))]
    chunks = encoded_chunks(form, bits)
    return shard_parts(form, chunks, block=damage.block, part=damage.part, rows=rows)
