"""One pass over a block of rows for everything that is asked about the way between rows.

The block is walked in tiles that stay in the processor's cache; the bits of each tile are compared
once, and only the vectors that moved are measured. NumPy only, no dask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.lattice import ordinal, ordinal_dtype, unsigned_view
from trajstore.summaries import (
    result_dtype,
    step_norm,
    token_norm,
    ulp_hops,
    vector_norm,
    vector_norms,
)

__all__ = ["MEASURES", "REGIMES", "measure_pairs", "measure_rows", "pair_dtype", "tiles"]

Array = npt.NDArray[Any]

MEASURES = (
    "moved",
    "step_norm",
    "ulp_1",
    "ulp_2",
    "ulp_inf",
    "ordinal_1",
    "ordinal_2",
    "ordinal_inf",
    "regime",
)
"""What can be measured of each token between two rows.

``moved``: any bit changed; ``step_norm``: ‖ΔW‖₂; ``ulp_…`` and ``ordinal_…``: norm of the hops, in
lattice spacings or in whole lattice points; ``regime``: index of `REGIMES`.
"""

REGIMES = ("frozen", "single", "neighbour", "local", "jump")
"""In the order of their flag values, from rest to the longest hops."""

# A tile and its float64 temporaries fit into the second-level cache of one core.
_TILE_ELEMENTS = 1 << 16


def tiles(rows: int, tokens: int, hidden: int) -> Iterator[slice]:
    """Consecutive slices of tokens, each of which is a tile."""
    width = max(1, _TILE_ELEMENTS // max(1, rows * hidden))
    for start in range(0, tokens, width):
        yield slice(start, min(start + width, tokens))


def _order(measure: str) -> float:
    return float(measure.rpartition("_")[2])


def pair_dtype(measures: Sequence[str], stored: npt.DTypeLike) -> np.dtype[Any]:
    """Structured type of what `measure_pairs` returns."""
    small = result_dtype(stored)

    def kind(measure: str) -> np.dtype[Any]:
        if measure in ("moved", "regime"):
            return np.dtype(bool if measure == "moved" else "int8")
        # Sums and maxima of whole numbers are whole; they fit, for a token moves from one value
        # to another in each of fewer than 2^30 elements.
        return np.dtype("int64") if measure in ("ordinal_1", "ordinal_inf") else small

    return np.dtype([(measure, kind(measure)) for measure in measures])


def measure_pairs(
    block: Array, boundary: Array, measures: Sequence[str], native: str
) -> npt.NDArray[np.void]:
    """Measure every row against the one before it.

    Parameters
    ----------
    block : ndarray of stored values, (row, token, hidden)
        Of any memory layout.
    boundary : ndarray of stored values, (1, token, hidden)
        Last row of the block before.
    measures : sequence of str
        Of `MEASURES`.
    native : str
        Type of the values.

    Returns
    -------
    structured ndarray, (row, token)
        One field per measure.
    """
    rows, tokens, hidden = block.shape
    result = np.zeros((rows, tokens), pair_dtype(measures, block.dtype))
    for part in tiles(rows + 1, tokens, hidden):
        tile = np.empty((rows + 1, part.stop - part.start, hidden), block.dtype)
        tile[:1] = boundary[:, part]
        tile[1:] = block[:, part]
        _measure_tile(tile, measures, native, result[:, part])
    return result


def _measure_tile(
    tile: Array, measures: Sequence[str], native: str, out: npt.NDArray[np.void]
) -> None:
    bits = unsigned_view(tile)
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    # Twice as fast in words of 64 bits, where a vector is a whole number of them.
    words = bits.view(np.uint64) if bits.itemsize * bits.shape[-1] % 8 == 0 else bits
    changed = (words[1:] != words[:-1]).any(-1)
    # As a signed integer −0.0 is the least of all, so one pass finds it.
    signed = bits.view(f"i{bits.itemsize}")
    if "moved" in measures and signed.min(initial=0) > np.iinfo(signed.dtype).min:
        out["moved"] = changed
        if len(measures) == 1:
            return
    if "step_norm" in measures and not np.isfinite(tile).all():
        # Where an infinity or NaN stays, no bit changes, and yet the length of its way is NaN.
        changed = np.ones_like(changed)
    at = np.nonzero(changed)
    earlier, later = tile[:-1][at], tile[1:][at]
    if "moved" in measures:
        before, after = unsigned_view(earlier), unsigned_view(later)
        # −0.0 and +0.0 are the same point.
        out["moved"][at] = ((before != after) & (((before | after) & ~sign) != 0)).any(-1)
    if "step_norm" in measures:
        out["step_norm"][at] = step_norm(earlier, later)
    ulp = [measure for measure in measures if measure.startswith("ulp")]
    if ulp or "regime" in measures:
        wanted = ("ulp_1", "ulp_2", "ulp_inf") if "regime" in measures else tuple(ulp)
        hops = ulp_hops(earlier, later, native)
        found = vector_norms(hops, [_order(name) for name in wanted])
        norms = dict(zip(wanted, found, strict=True))
        for name in ulp:
            with np.errstate(over="ignore"):
                out[name][at] = norms[name]
        if "regime" in measures:
            l1, l2, linf = found
            out["regime"][at] = _regime(l1, l2, linf, tile.shape[-1])
    whole = [measure for measure in measures if measure.startswith("ordinal")]
    if whole:
        wide = ordinal_dtype(native)
        points = np.abs(ordinal(later, native).astype(wide) - ordinal(earlier, native))
        for measure in whole:
            if measure == "ordinal_1":
                out[measure][at] = points.sum(-1, dtype=np.int64)
            elif measure == "ordinal_inf":
                out[measure][at] = points.max(-1)
            else:
                out[measure][at] = vector_norm(points, 2)


def _regime(l1: Array, l2: Array, linf: Array, hidden: int) -> npt.NDArray[np.int8]:
    # From the wildest to the calmest, so that NaN, which no comparison holds of, is a jump.
    regime = np.full(l1.shape, REGIMES.index("jump"), np.int8)
    regime[l2 <= np.sqrt(hidden)] = REGIMES.index("local")
    regime[linf <= 1] = REGIMES.index("neighbour")
    regime[l1 <= 1] = REGIMES.index("single")
    regime[l1 == 0] = REGIMES.index("frozen")
    return regime


def measure_rows(block: Array, reference: Array | None, order: float = 2) -> Array:
    """Norm of every vector, or of its difference from a reference row.

    Parameters
    ----------
    block : ndarray of stored values, (row, token, hidden)
    reference : ndarray, (token, hidden), optional
    order : {1, 2, inf}

    Returns
    -------
    ndarray of float32, (row, token)
    """
    rows, tokens, hidden = block.shape
    result = np.empty((rows, tokens), result_dtype(block.dtype))
    for part in tiles(rows, tokens, hidden):
        tile = np.ascontiguousarray(block[:, part])
        if reference is None:
            result[:, part] = token_norm(tile, order)
        else:
            result[:, part] = step_norm(np.ascontiguousarray(reference[part]), tile)
    return result
