"""Forms of chunks in a run of the encoding `compact`, and its corrections, counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trajstore.codec.chunk import DIFFERENCES
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_group import open_group


def stored_forms(path: Path) -> dict[str, dict[str, int]]:
    """Numbers of ``chunks`` and of those that hold ``differences``, of each array with forms.

    For a computed array also numbers of computed ``elements`` and of ``corrected`` ones.
    """
    arrays = ((name, stored_array(path, name, array)) for name, array in open_group(path).arrays())
    return {
        name: _counted(stored)
        for name, stored in arrays
        if stored is not None and stored.chain.has_forms
    }


def _counted(stored: StoredArray) -> dict[str, int]:
    computed = stored.chain.kind == "computed"
    found = dict.fromkeys(["chunks", "differences", *["elements", "corrected"] * computed], 0)
    for block in range(-(-stored.shape[0] // stored.shard[0])):
        for part in range(stored.parts):
            with stored.opened(block, part) as shard:
                pieces = [shard.chunk(number) for number in range(len(shard.tail.index))]
            rows = min(shard.tail.label.rows, stored.shape[0] - block * stored.shard[0])
            for number, piece in enumerate(pieces):
                found["chunks"] += 1
                found["differences"] += piece[:1] == DIFFERENCES
                first = part * stored.shard[1] + number * stored.chunk[1]
                tokens = min(stored.chunk[1], stored.shape[1] - first)
                if computed and piece[:1] != DIFFERENCES and tokens > 0:
                    window = tuple(slice(0, n) for n in (rows, tokens, *stored.chunk[2:]))
                    _, bits = stored.form.decoder.stored_form(piece, window)
                    found["elements"] += bits[1:].size
                    found["corrected"] += int(np.count_nonzero(bits[1:]))
    return found
