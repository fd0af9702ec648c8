"""Counts of the forms of chunks in a run of the encoding ``compact``, and of its corrections."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from trajstore.codec.block_object import at_once
from trajstore.codec.codec_chain import DIFFERENCES
from trajstore.codec.open_block import named
from trajstore.schema import variables_of
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import REMOTE_REQUESTS, RemotePath, RunPath, location
from trajstore.threads import default_threads, in_parallel

__all__ = ["stored_forms"]


def stored_forms(path: RunPath) -> dict[str, dict[str, int]]:
    """Count the chunks of each form, and the corrections, of a run.

    Every chunk of the arrays is read, and the corrections are decoded.

    Parameters
    ----------
    path : path-like or str

    Returns
    -------
    dict of str to dict
        For each array whose chunks have forms, numbers of ``chunks`` and of those that hold
        ``differences`` along step. The others are computed, or for the gradient predicted over
        tokens. For a computed array also numbers of computed ``elements`` and of ``corrected``
        ones. Empty for the encoding ``delta``.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`, or a shard is missing or broken.
    """
    group, place = open_group(path), location(path)
    arrays: dict[str, Any] = dict(group.arrays())
    found: dict[str, dict[str, int]] = {}
    for name in (name for name in variables_of(group.attrs) if name in arrays):
        stored = stored_array(place, name, arrays[name])
        if stored is None or not stored.chain.has_forms:
            continue
        blocks = -(-stored.shape[0] // stored.shard[0])
        jobs = (
            partial(_count_shard, stored, block, part)
            for block in range(blocks)
            for part in range(stored.parts)
        )
        keys = ["chunks", "differences"]
        keys += ["elements", "corrected"] * (stored.chain.kind == "computed")
        total: Counter[str] = Counter()
        threads = REMOTE_REQUESTS if isinstance(place, RemotePath) else default_threads()
        for counted in in_parallel(jobs, threads):
            total.update(counted)
        found[name] = {key: total[key] for key in keys}
    return found


def _count_shard(stored: StoredArray, block: int, part: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    with stored.opened(block, part) as shard, named(shard.name):
        rows = min(shard.tail.label.rows, stored.shape[0] - block * stored.shard[0])
        at_once(shard.object.prefetch([(at, at + n) for at, n in shard.tail.index.tolist()]))
        for number in range(len(shard.tail.index)):
            start = part * stored.shard[1] + number * stored.chunk[1]
            tokens = min(stored.chunk[1], stored.shape[1] - start)
            counted["chunks"] += 1
            data = shard.chunk(number)
            if data[:1] == DIFFERENCES:
                counted["differences"] += 1
            elif stored.chain.kind == "computed" and tokens > 0:
                window = tuple(slice(0, n) for n in (rows, tokens, *stored.chunk[2:]))
                _, bits = stored.form.decoder.stored_form(data, window)
                counted["elements"] += bits[1:].size
                counted["corrected"] += int(np.count_nonzero(bits[1:]))
    return counted
