"""Gradients as differences to a prediction over tokens, computed for each row.

In one step the gradients of all tokens outside the batch are sums of the same few hidden states.
Each row of a chunk is predicted as Σ cⱼ·dⱼ: directions dⱼ along hidden, and a coefficient cⱼ for
each token. Both are stored in the native type. The prediction is computed in float32, term by term,
and rounded to the native type. The difference to it is also stored, between integers in the order
of the values, with folded signs.

The encoder also sums in a fixed order: the same rows give the same bytes on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.delta import scratch
from trajstore.codec.prediction_loop import ITERATIONS, NEAR, TRIALS
from trajstore.threads import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.native_types import (
    NativeType,
    cast,
    kept_subnormals,
    narrow,
    result_bits,
    widen,
)

Array = npt.NDArray[Any]

MOST_TERMS = 8  # of a row
_BITS = {2: 11, 4: 28}  # approximate bits of a stored coefficient, by bytes of a value
_SAMPLE = 72  # approximate number of tokens that determine the directions of a row
_WORK = 4  # numbers that NumPy processes in the time of one value of the encoding

_ENCODING = CompiledLoop("trajstore.codec.prediction_loop", "terms_and_differences")
_DECODING = CompiledLoop("trajstore.codec.prediction_loop", "decoded_rows")


@kept_subnormals()
def coefficients_and_differences(bits: Array, native: NativeType) -> tuple[Array, Array] | None:
    """Coefficients of a chunk, and the differences to their prediction, in scratch memory.

    Parameters
    ----------
    bits : ndarray of ``native.bits``, (row, token, hidden)
    native : NativeType

    Returns
    -------
    coefficients : ndarray of ``native.bits``, (row, term, hidden + token)
        Directions, then a coefficient for each token; 0 in rows with fewer terms.
    differences : ndarray of ``native.bits``, (row, token, hidden)
    or None
        If no prediction reduces the size of any row.
    """
    rows, tokens, hidden = bits.shape
    coefficients = scratch.array("terms", (rows, MOST_TERMS, hidden + tokens), native.bits)
    coefficients.fill(0)
    differences = scratch.array("values", bits.shape, native.bits)
    every = max(1, tokens // _SAMPLE)
    # A sampled token stands for `every` tokens, which share the direction.
    price = _BITS[native.itemsize] * (-(-tokens // every) + hidden // every)
    if not _is_compiled(_ENCODING, native, _WORK * bits.size, bits) or not _ENCODING.run(
        memory_of(bits),
        bits.strides[0] // bits.itemsize,
        (*bits.shape, MOST_TERMS),
        coefficients.reshape(-1),
        differences.reshape(-1),
        native.spare_bits,
        max(8, 1 << (hidden - 1).bit_length()),
        every,
        price,
        np.float32(native.epsilon / 2),
    ):
        for row in range(rows):
            with np.errstate(all="ignore"):
                _find_terms(widen(bits[row], native), native, coefficients[row], every, price)
            predicted = _ordered(_prediction(coefficients[row], native, hidden), native)
            differences[row] = _folded(_ordered(bits[row], native) - predicted)
    used = np.flatnonzero(coefficients.any(axis=(0, 2)))
    return (coefficients[:, : used[-1] + 1], differences) if used.size else None


@kept_subnormals()
def decode_rows(coefficients: Array, differences: Array, native: NativeType, bits: Array) -> None:
    """Restore the bits of rows; the inverse of `coefficients_and_differences`.

    Parameters
    ----------
    coefficients : ndarray, (row, term, hidden + token)
        Coefficients of the selected tokens and positions along hidden.
    differences : ndarray, (row, token, hidden)
        Differences of the same selection.
    native : NativeType
    bits : ndarray of ``native.bits``, (row, token, hidden)
        Receives the rows.
    """
    if _is_compiled(_DECODING, native, bits.size, differences, bits) and _DECODING.run(
        np.ascontiguousarray(coefficients).reshape(-1),
        memory_of(differences),
        differences.strides[0] // differences.itemsize,
        memory_of(bits),
        bits.strides[0] // bits.itemsize,
        (*bits.shape, coefficients.shape[1]),
        native.spare_bits,
    ):
        return
    for row, folded in enumerate(differences):  # one row stays in the cache
        predicted = _ordered(_prediction(coefficients[row], native, folded.shape[1]), native)
        predicted += _unfolded(folded)
        bits[row] = _unordered(predicted, native)


def _is_compiled(loop: CompiledLoop, native: NativeType, work: int, *arrays: Array) -> bool:
    """True if a compiled loop supports the type and the arrays, and is worth a try."""
    known = native.is_cut_off and native.stored == np.float32
    return known and loop.is_worth(work) and all(map(rows_in_one_piece, arrays))


def _prediction(coefficients: Array, native: NativeType, hidden: int) -> Array:
    """Predicted bits of a row, (token, hidden).

    Parameters
    ----------
    coefficients : ndarray, (term, hidden + token)
    native : NativeType
    hidden : int
    """
    terms = widen(coefficients, native)
    total = np.zeros((terms.shape[1] - hidden, hidden), terms.dtype)
    with np.errstate(all="ignore"):
        for term in terms:
            if term.any():
                total += term[hidden:, None] * term[:hidden]
    return result_bits(total, native)


def _find_terms(values: Array, native: NativeType, terms: Array, every: int, price: int) -> None:
    """Find directions and coefficients of a row, and write their bits to `terms`.

    Each token of the distance `every` belongs to the sample that determines the directions.
    """
    hidden = values.shape[1]
    if not (np.isfinite(values).all() and values.any()):
        return
    left = values
    for term, direction in zip(terms, _directions(values[::every], native, price), strict=False):
        factor = _factors(left, direction, native)
        if not np.isfinite(factor).all():
            break
        left = left - factor[:, None] * direction
        term[:hidden] = narrow(direction, native)
        term[hidden:] = narrow(factor, native)


def _directions(sample: Array, native: NativeType, price: int) -> list[Array]:
    """Directions of a row that minimize its estimated size.

    The next direction is that of what is left of all tokens, each with the same weight. A token
    of which less than the spacing of its values is left has less weight.
    """
    ordered = _ordered(narrow(sample, native), native)
    left, total = sample, np.zeros_like(sample)
    spacing = _lengths(sample) * np.float32(native.epsilon / 2)
    size = _estimated_size(ordered, total, native)
    directions: list[Array] = []
    best = 0
    while len(directions) < min(MOST_TERMS, best + TRIALS):
        weights = _lengths(left) + spacing
        weights = np.divide(1, weights, out=np.zeros_like(weights), where=weights > 0)
        main = _main_direction(left * weights[:, None])
        if main is None:
            break
        direction = cast(main, native.name)
        factor = _factors(left, direction, native)
        if not np.isfinite(factor).all():
            break
        product = factor[:, None] * direction
        total = total + product
        left = left - product
        directions.append(direction)
        now = _estimated_size(ordered, total, native) + len(directions) * price
        if now < size:
            size, best = now, len(directions)
    return directions[:best]


def _factors(values: Array, direction: Array, native: NativeType) -> Array:
    """Coefficient of each row of values along a direction."""
    return cast(_sums(values * direction) / _sums(direction * direction), native.name)


def _main_direction(rows: Array) -> Array | None:
    """Direction that many rows share, of unit length; None if there is none.

    First the main direction by the power method. Then rows have the less weight the further they
    are from it, so that it does not follow a few of them.
    """
    squares = _sums(rows * rows)
    lengths = np.sqrt(squares)
    largest = int(lengths.argmax())
    if not 0 < lengths[largest] < np.inf:
        return None
    direction = rows[largest] / lengths[largest]
    for iteration in range(2 * ITERATIONS):
        along = _sums(rows * direction)
        if iteration >= ITERATIONS:
            along /= np.maximum(squares - along * along, 0) + NEAR
        products = rows * along[:, None]
        products[0] += 0  # so that no sum is -0
        summed = np.add.accumulate(products)[-1]
        length = _lengths(summed)
        if not length > 0:
            break
        direction = summed / length
    return np.asarray(direction)


def _lengths(rows: Array) -> Array:
    return np.asarray(np.sqrt(_sums(rows * rows)))


def _sums(products: Array) -> Array:
    """Sums along the last axis: the second half is added to the first until one value is left.

    The order of `numpy.sum` differs between machines.
    """
    length = products.shape[-1]
    width = max(8, 1 << (length - 1).bit_length())
    if width > length:
        padding = [(0, 0)] * (products.ndim - 1) + [(0, width - length)]
        products = np.pad(products, padding)
    while width > 1:
        width //= 2
        products = products[..., :width] + products[..., width:]
    return np.asarray(products[..., 0])


def _estimated_size(ordered: Array, predicted: Array, native: NativeType) -> int:
    """Estimated bits of the differences to a prediction: bits up to the highest set one."""
    folded = _folded(ordered - _ordered(result_bits(predicted, native), native))
    exponents = folded.astype(np.float32).view(np.uint32) >> np.uint32(23)
    return int(np.add.reduce(exponents, axis=None, dtype=np.int64)) - 126 * int(
        np.count_nonzero(exponents)
    )


def _ordered(bits: Array, native: NativeType) -> Array:
    """Unsigned integers in the order of the values."""
    sign = bits.dtype.type(native.sign_mask)
    return np.where(bits & sign, ~bits, bits | sign)


def _unordered(ordered: Array, native: NativeType) -> Array:
    sign = ordered.dtype.type(native.sign_mask)
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def _folded(difference: Array) -> Array:
    """Zigzag of a difference modulo 2^width."""
    signed = difference.view(f"i{difference.itemsize}")
    highest = 8 * difference.itemsize - 1
    return ((signed << 1) ^ (signed >> highest)).view(difference.dtype)


def _unfolded(folded: Array) -> Array:
    low_bit = folded.dtype.type(1)
    return np.asarray((folded >> low_bit) ^ (~(folded & low_bit) + low_bit))
