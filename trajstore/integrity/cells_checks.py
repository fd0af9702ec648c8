"""Whether the recorded cells of a run are those of its W, where it holds both."""

from __future__ import annotations

import numpy as np

from trajstore.errors import FormatError, ObjectStoreError
from trajstore.integrity.problem import Problem
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.store.storage.remote_path import Location
from trajstore.values.native_types import NATIVE_TYPES, is_nan
from trajstore.values.rounding import convert

__all__ = ["check_cells"]


def check_cells(path: Location) -> list[Problem]:
    """Hold ``cells`` against W rounded to bfloat16, to nearest even, a tile at a time.

    Parameters
    ----------
    path : Path or RemotePath
        Of a run of which every chunk can be read.
    """
    where = path / "cells" / DOCUMENT
    try:
        run = open_tiled(path)
        found = _wrong_cells(run) if {"W", "cells"} <= set(run.series) else None
    except ObjectStoreError:
        raise
    except (FormatError, OSError) as error:
        message = f"they cannot be held against W: {error}"
        return [Problem(array="cells", path=where, message=message)]
    if found is None:
        return []
    count, step, token = found
    if not count:
        return []
    message = (
        f"{count} values are not W rounded to bfloat16, the first at step {step} of token {token}; "
        "one of the two has been changed"
    )
    return [Problem(array="cells", path=where, message=message)]


def _wrong_cells(run: TiledRun) -> tuple[int, int, int]:
    """How many cells are not those of W, and step and token of the first."""
    W, cells, bfloat16 = run.series["W"], run.series["cells"], NATIVE_TYPES["bfloat16"]
    rows, count, first = np.arange(len(run.steps)), 0, (0, 0)
    for tile in W.tiles(rows, None):
        expected, _ = convert(tile.read(), W.native, bfloat16)
        held = cells.bits(tile.where)
        wrong = (held != expected) & ~(is_nan(held, bfloat16) & is_nan(expected, bfloat16))
        if wrong.any() and not count:
            row, token, _ = np.argwhere(wrong)[0]
            at, among = tile.where
            ids = run.coordinates["token"]
            first = int(run.steps[at.start + row]), int(ids[among.start + token])
        count += int(np.count_nonzero(wrong))
    return count, *first
