"""Measures of the rows of a block: changes between rows, norms, and values on a chosen lattice.

`measure_pairs` measures all changes in one pass, on tiles that fit in the processor's cache.
Regimes of 16-bit types are computed for all vectors at once. Other measures are computed only for
vectors whose bits changed. No function needs dask.

Rounding to a lattice equals a cast in torch. Thus float32 master weights on the lattice of bfloat16
are the values that the forward pass uses under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import Array
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import LATTICES
from trajstore.values.native_types import (
    NATIVE_TYPES,
    binade,
    cast,
    is_of_type,
    lattice_type,
    ordinal,
    ordinal_dtype,
    unsigned_view,
)
from trajstore.values.norms import (
    result_dtype,
    step_norm,
    token_norm,
    ulp_hops,
    vector_norm,
    vector_norms,
)

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
"""Measures of each token between two rows.

``moved``: any bit changed; ``step_norm``: ‖ΔW‖₂; ``ulp_…`` and ``ordinal_…``: norm of the hops, in
lattice spacings or in whole lattice points; ``regime``: index of `REGIMES`.
"""

REGIMES: tuple[str, ...] = ("unchanged", "single", "neighbor", "local", "jump")
"""In the order of their flag values, from unchanged to the longest hops."""

# A tile and its temporaries fit in the last-level cache. Smaller tiles are not faster, and threads
# would contend more for the interpreter's lock.
_TILE_ELEMENTS = 1 << 19

_LONGEST_VECTOR = 1 << 12
"""Maximum vector length for exact regimes of a 16-bit type in float32."""


def tiles(rows: int, tokens: int, hidden: int, most: int = _TILE_ELEMENTS) -> Iterator[slice]:
    """Consecutive slices of tokens. Each is a tile of at most `most` elements."""
    width = max(1, most // max(1, rows * hidden))
    for start in range(0, tokens, width):
        yield slice(start, min(start + width, tokens))


def _order(measure: str) -> float:
    return float(measure.rpartition("_")[2])


def pair_dtype(measures: Sequence[str], stored: npt.DTypeLike) -> np.dtype[Any]:
    """Structured type of the result of `measure_pairs`."""
    small = result_dtype(stored)

    def kind(measure: str) -> np.dtype[Any]:
        if measure in ("moved", "regime"):
            return np.dtype(bool if measure == "moved" else "int8")
        # Sums and maxima of integers are integers. They fit in int64 for fewer than 2^30 elements.
        return np.dtype("int64") if measure in ("ordinal_1", "ordinal_inf") else small

    return np.dtype([(measure, kind(measure)) for measure in measures])


def measure_pairs(
    block: Array, boundary: Array, measures: Sequence[str], native: str
) -> npt.NDArray[np.void]:
    """Measure the change of every row from the previous row.

    Parameters
    ----------
    block : ndarray of stored values, (row, token, hidden)
        Any memory layout.
    boundary : ndarray of stored values, (1, token, hidden)
        Last row of the previous block.
    measures : sequence of str
        Names in `MEASURES`.
    native : str
        Type of the values.

    Returns
    -------
    structured ndarray, (row, token)
        One field per measure.
    """
    rows, tokens, hidden = block.shape
    result = np.zeros((rows, tokens), pair_dtype(measures, block.dtype))
    block, boundary = _in_vectors(block), _in_vectors(boundary)
    for part in tiles(rows, tokens, hidden):
        here, out = block[:, part], result[:, part]
        _measure_tile(boundary[:, part], here[:1], measures, native, out[:1])
        _measure_tile(here[:-1], here[1:], measures, native, out[1:])
    return result


def _in_vectors(block: Array) -> Array:
    """The block, copied if its vectors are not contiguous."""
    return block if block.strides[-1] == block.itemsize else np.ascontiguousarray(block)


def _measure_tile(
    earlier: Array, later: Array, measures: Sequence[str], native: str, out: npt.NDArray[np.void]
) -> None:
    known = None
    if "regime" in measures:
        out["regime"], known = _regime(earlier, later, native)
        if "moved" in measures:
            out["moved"] = out["regime"] != REGIMES.index("unchanged")
        if all(measure in ("moved", "regime") for measure in measures):
            return
    changed = changed_vectors(earlier, later)
    if "moved" in measures and "regime" not in measures:
        out["moved"] = moved_vectors(earlier, later, changed)
        if len(measures) == 1:
            return
    if "step_norm" in measures and not (np.isfinite(earlier).all() and np.isfinite(later).all()):
        # An unchanged infinity or NaN has equal bits, but its displacement is NaN.
        changed = np.ones_like(changed)
    ulp = [measure for measure in measures if measure.startswith("ulp")]
    if ulp == ["ulp_1"] and known is not None:
        out["ulp_1"] = known
        _measure_hops(earlier, later, np.isnan(known), ulp, native, out)
        ulp = []
    if ulp:
        _measure_hops(earlier, later, changed, ulp, native, out)
    whole = [measure for measure in measures if measure.startswith("ordinal")]
    if not whole and "step_norm" not in measures:
        return
    at, earlier, later = _those(changed, earlier, later)
    if "step_norm" in measures:
        out["step_norm"][at] = step_norm(earlier, later)
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


def _measure_hops(
    earlier: Array,
    later: Array,
    chosen: npt.NDArray[np.bool_],
    measures: Sequence[str],
    native: str,
    out: npt.NDArray[np.void],
) -> None:
    """Write the norms of the hops of the chosen vectors."""
    at, earlier, later = _those(chosen, earlier, later)
    norms = vector_norms(ulp_hops(earlier, later, native), [_order(name) for name in measures])
    for name, norm in zip(measures, norms, strict=True):
        with np.errstate(over="ignore"):
            out[name][at] = norm


def _those(chosen: npt.NDArray[np.bool_], *values: Array) -> tuple[Any, ...]:
    """Index of the chosen vectors, and the vectors; not copied if all are chosen."""
    at = ... if chosen.all() else np.nonzero(chosen)
    return at, *(each[at] for each in values)


def _any(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """True for each vector with any flag set."""
    words, remainder = divmod(flags.shape[-1], 8)
    if remainder or not 0 < words < 255:
        return np.asarray(flags.any(-1))
    # Eight flags at once. With fewer than 255 words, no byte of the sum overflows.
    return np.asarray(np.einsum("...i->...", flags.view(np.uint64)) != 0)


def changed_vectors(earlier: Array, later: Array) -> npt.NDArray[np.bool_]:
    """True for each vector in which any bit differs, (row, token)."""
    before, after = unsigned_view(earlier), unsigned_view(later)
    if before.itemsize * before.shape[-1] % 8 == 0:
        # Words of 64 bits are twice as fast, if they divide a vector.
        before, after = before.view(np.uint64), after.view(np.uint64)
    return _any(before != after)


def moved_vectors(
    earlier: Array, later: Array, changed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """True for each changed vector that differs in more than the sign of a zero."""
    if _holds_negative_zero(earlier) or _holds_negative_zero(later):
        at = np.nonzero(changed)
        changed = changed.copy()
        changed[at] = moved_elements(earlier[at], later[at]).any(-1)
    return changed


def moved_elements(earlier: Array, later: Array) -> npt.NDArray[np.bool_]:
    """True for elements that differ in more than the sign of a zero."""
    before, after = unsigned_view(earlier), unsigned_view(later)
    magnitude = NATIVE_TYPES[earlier.dtype.name].sign_mask - 1
    return np.asarray((before != after) & (((before | after) & magnitude) != 0))


def _holds_negative_zero(stored: Array) -> bool:
    # As a signed integer, −0.0 is the smallest value, so one pass finds it.
    signed = np.dtype(f"i{stored.itemsize}")
    return bool(stored.view(signed).min(initial=0) == np.iinfo(signed).min)


def _regime(
    earlier: Array, later: Array, native: str
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32] | None]:
    """Index of the regime of every vector, (row, token).

    Returns
    -------
    regime : ndarray of int8
    lengths : ndarray of float32, optional
        L1 norms of the hops in spacings, if they were computed as intermediates; otherwise NaN.
    """
    lengths = None
    hidden = later.shape[-1]
    # The fast path needs a stored form that is wider than the type.
    if lattice_type(native).itemsize == later.itemsize or hidden > _LONGEST_VECTOR:
        unknown = changed_vectors(earlier, later)
        regime = np.full(unknown.shape, REGIMES.index("unchanged"), np.int8)
    else:
        regime, unknown, lengths = _regime_of_short_hops(earlier, later, native)
    at = np.nonzero(unknown)
    if at[0].size:
        hops = ulp_hops(earlier[at], later[at], native)
        regime[at] = regime_of_hops(hops)
    return regime, lengths


def regime_of_hops(
    hops: npt.NDArray[np.float64],
    neighbor: float = 1,
    jump: float | None = None,
    far: float = np.inf,
) -> npt.NDArray[np.int8]:
    """Index of the regime of vectors of hops, (…, hidden), by the thresholds of `regimes`.

    Beyond `far`, the index is one more than that of a jump.
    """
    l1, l2, linf = vector_norms(hops, (1, 2, np.inf))
    # From jump to unchanged, so that NaN, for which every comparison is false, stays a jump.
    regime = np.full(l1.shape, REGIMES.index("jump"), np.int8)
    regime[l2 > far] += 1
    regime[l2 <= (np.sqrt(hops.shape[-1]) if jump is None else jump)] = REGIMES.index("local")
    regime[linf <= neighbor] = REGIMES.index("neighbor")
    regime[l1 <= 1] = REGIMES.index("single")
    regime[l1 == 0] = REGIMES.index("unchanged")
    return regime


def _regime_of_short_hops(
    earlier: Array, later: Array, native: str
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Regimes of a 16-bit type in float32: five times as fast, with the same result.

    A hop of at most √hidden ≤ 64 spacings ends at most one binade below its start. It is a multiple
    of half a spacing, so float32 holds it, its square and the sums of both exactly. A longer hop is
    a jump regardless of the rounding of its square. The values must be of the native type.

    Returns
    -------
    regime : ndarray of int8, (row, token)
    unknown : ndarray of bool, (row, token)
        True for vectors with an infinity or NaN.
    lengths : ndarray of float32, (row, token)
        L1 norms of the hops in spacings; NaN for jumps, infinities and NaN.
    """
    # Units of the binade instead of the spacing save a pass. The scale factor is exact.
    spacing = np.float32(lattice_type(native).epsilon)
    with np.errstate(invalid="ignore", over="ignore"):
        hops = np.subtract(later, earlier)
        hops /= binade(earlier, native)
        np.abs(hops, out=hops)
        squares = np.einsum("...i,...i->...", hops, hops)
        sums = np.einsum("...i->...", hops)
        near = ~_any(hops > spacing)
    unknown = np.isnan(squares)
    near &= ~unknown
    regime = np.full(squares.shape, REGIMES.index("jump"), np.int8)
    regime[squares <= later.shape[-1] * spacing**2] = REGIMES.index("local")
    regime[near] = REGIMES.index("neighbor")
    regime[near & (sums <= spacing)] = REGIMES.index("single")
    regime[squares == 0] = REGIMES.index("unchanged")
    sums[regime == REGIMES.index("jump")] = np.nan
    lengths = sums / spacing
    return regime, unknown, lengths


def measure_rows(block: Array, reference: Array | None = None, order: float = 2) -> Array:
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
        if reference is None:
            result[:, part] = token_norm(block[:, part], order)
        else:
            result[:, part] = step_norm(reference[part], block[:, part])
    return result


def chosen_type(lattice: str, native: str) -> str:
    """Name of the type that defines a lattice.

    Parameters
    ----------
    lattice : str
        One of `trajstore.schema.LATTICES`.
    native : str
        Type in which the trainer held the values.

    Raises
    ------
    InvalidArgument
        If the lattice is unknown, or the native type is not supported.
    """
    if lattice not in LATTICES:
        expected = ", ".join(map(repr, LATTICES))
        near = did_you_mean(lattice, LATTICES)
        raise InvalidArgument(f"got lattice={lattice!r}{near}, expected one of {expected}")
    lattice_type(native)
    return native if lattice == "native" else lattice


def on_lattice(values: Array, variable: str, native: str, chosen: str) -> Array:
    """Values rounded to a lattice.

    Parameters
    ----------
    values : ndarray of stored values, any shape
    variable : str
        Name for the error message.
    native : str
        Type in which the trainer held the values.
    chosen : str
        Type that defines the lattice.

    Raises
    ------
    InvalidArgument
        If a value is not representable in the type ``native``.
    """
    if not is_of_type(values, native):
        wrong = (cast(values, native) != values) & ~np.isnan(values)
        raise InvalidArgument(
            f"the attribute native_dtype of {variable} is {native}, but "
            f"{np.count_nonzero(wrong):,} of {values.size:,} checked values are not "
            f"representable in {native}, the first is "
            f"{values[wrong][0]!s}; set the attribute to the type of the trainer (stored as "
            f"{values.dtype}), and select the lattice with lattice={native!r}"
        )
    return values if chosen == native else cast(values, chosen)


def with_lattice_attributes(result: xr.Dataset, lattice: str, **others: str) -> xr.Dataset:
    """Add the lattice and other attributes to all variables of a result.

    `Dataset.map` is not used, because it may restore previous attributes.
    """
    attributes = {**others, **lattice_attributes(lattice)}
    return result.assign(
        {name: array.assign_attrs(attributes) for name, array in result.data_vars.items()}
    )


def lattice_attributes(lattice: str) -> dict[str, str]:
    """Attributes for the lattice of a result; empty for the native lattice."""
    return {} if lattice == "native" else {"lattice": lattice}
