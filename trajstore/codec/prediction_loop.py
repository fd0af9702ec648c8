"""Prediction of gradients over tokens, in loops that numba compiles.

The results equal those of `trajstore.codec.predicted_rows`, bit for bit: the same operations in the
same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.compiled_loop import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.native_types import NativeType

__all__ = ["decoded_rows", "run_decoding_loop", "run_encoding_loop", "terms_and_differences"]

Array = npt.NDArray[Any]

_ENCODING = CompiledLoop("trajstore.codec.prediction_loop", "terms_and_differences")
_DECODING = CompiledLoop("trajstore.codec.prediction_loop", "decoded_rows")

_WORK = 4  # numbers that NumPy processes in the time of one value of the encoding

_TYPES = {"bfloat16": 16, "float32": 0}
"""Types whose bits are the highest of a float32, with the number of omitted bits."""


def run_encoding_loop(
    bits: Array,
    native: NativeType,
    terms: Array,
    differences: Array,
    *,
    every: int,
    price: int,
    trials: int,
    iterations: int,
    near: np.float32,
) -> bool:
    """Find the terms of each row of a chunk and the differences to their prediction.

    Parameters
    ----------
    bits : ndarray of ``native.bits``, (row, token, hidden)
    native : NativeType
    terms : ndarray of ``native.bits``, (row, term, hidden + token), all 0
        Receives the terms.
    differences : ndarray of ``native.bits``, (row, token, hidden)
        Receives the differences.
    every : int
        Distance of the tokens that determine the directions of a row.
    price : int
        Estimated bits of one term of these tokens.
    trials : int
        Terms to try after the best number of terms.
    iterations : int
        Iterations of the power method, and then as many with less weight for tokens apart.
    near : float32
        Square of the distance from a direction at which a token has half of its weight.

    Returns
    -------
    bool
        False if no loop is available. Then nothing was changed.
    """
    if native.name not in _TYPES or not _ENCODING.is_worth(_WORK * bits.size):
        return False
    if not rows_in_one_piece(bits):
        return False
    rows, tokens, hidden = bits.shape
    shape = (rows, tokens, hidden, terms.shape[1])
    width = max(8, 1 << (hidden - 1).bit_length())
    return _ENCODING.run(
        memory_of(bits),
        bits.strides[0] // bits.itemsize,
        shape,
        terms.reshape(-1),
        differences.reshape(-1),
        native.spare_bits,
        width,
        every,
        price,
        trials,
        iterations,
        np.float32(native.epsilon / 2),
        near,
    )


def run_decoding_loop(
    coefficients: Array, differences: Array, native: NativeType, bits: Array
) -> bool:
    """Restore rows from terms and differences, if a compiled loop is available.

    Parameters
    ----------
    coefficients : ndarray, (row, term, hidden + token)
    differences, bits : ndarray of ``native.bits``, (row, token, hidden)
    native : NativeType

    Returns
    -------
    bool
        False if no loop is available. Then nothing was changed.
    """
    if native.name not in _TYPES or not _DECODING.is_worth(differences.size):
        return False
    if not rows_in_one_piece(differences) or not rows_in_one_piece(bits):
        return False
    return _DECODING.run(
        np.ascontiguousarray(coefficients).reshape(-1),
        memory_of(differences),
        differences.strides[0] // differences.itemsize,
        memory_of(bits),
        bits.strides[0] // bits.itemsize,
        (*differences.shape, coefficients.shape[1]),
        native.spare_bits,
    )


def terms_and_differences(
    bits: Array,
    stride: int,
    shape: tuple[int, int, int, int],
    terms: Array,
    differences: Array,
    spare: int,
    width: int,
    every: int,
    price: int,
    trials: int,
    iterations: int,
    spacing: np.float32,
    near: np.float32,
) -> None:
    """The loop of `run_encoding_loop`. Arrays are 1-D memory.

    Parameters
    ----------
    stride : int
        Values between rows of `bits`.
    shape : tuple of int
        Numbers of rows, tokens, positions along hidden, and terms at most.
    spare : int
        Omitted bits of the native type.
    width : int
        Power of two, at least 8 and the positions along hidden. Padding is 0.
    every, price, trials, iterations, near
        See `run_encoding_loop`.
    spacing : float32
        Relative spacing of values, below which what is left of a token has less weight.
    """
    rows, tokens, hidden, most = shape
    quiet, one, last = np.uint32(0x7FC00000), np.uint32(1), np.uint32(16)
    shift = np.uint32(spare)
    half = np.uint32(0x7FFF) if spare else np.uint32(0)
    odd = one if spare else np.uint32(0)
    kept = np.uint32(0xFFFF0000) if spare else np.uint32(0xFFFFFFFF)
    item = bits.dtype.type
    sign, single = item(1 << (31 - spare)), item(1)
    highest = item(31 - spare)
    zero, infinity = np.float32(0), np.float32(np.inf)

    # Functions within the loop are inlined by numba.
    def rounded(values: Any, size: Any) -> None:
        wide = values.view(np.uint32)
        for at in range(size):
            word = wide[at]
            nearest = np.uint32(np.uint32(word + np.uint32(half + ((word >> last) & odd))) & kept)
            is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            wide[at] = quiet if is_nan else nearest

    def halved(products: Any) -> Any:
        length = width >> 1
        while length > 4:
            for at in range(length):
                products[at] += products[np.uint64(at + length)]
            length >>= 1
        one, other = products[0] + products[4], products[1] + products[5]
        return (one + (products[2] + products[6])) + (other + (products[3] + products[7]))

    def ordered(value: Any) -> Any:
        return item(value ^ item(sign | item(item(0) - item(value >> highest))))

    samples = (tokens + every - 1) // every
    left = np.zeros((samples, width), np.float32)
    total = np.zeros((samples, width), np.float32)
    sampled = np.zeros((samples, width), bits.dtype)
    scaled = np.zeros((samples, width), np.float32)
    spacings = np.zeros(samples, np.float32)
    powers = np.zeros(samples, np.float32)
    directions = np.zeros((most, width), np.float32)
    squares = np.zeros(most, np.float32)
    products = np.zeros(width, np.float32)
    summed = np.zeros(width, np.float32)
    value = np.zeros(width, np.float32)
    made = np.zeros(width, np.float32)
    factor = np.zeros(1, np.float32)
    for row in range(rows):
        base = np.uint64(row * stride)
        # A row without a finite number other than 0 has no terms.
        found = np.uint32(0)
        finite: Any = True
        for at in range(tokens * hidden):
            word = np.uint32(bits[base + np.uint64(at)]) << shift
            magnitude = np.uint32(word & np.uint32(0x7FFFFFFF))
            found |= magnitude
            finite &= magnitude < np.uint32(0x7F800000)
        count = 0
        if finite and found:
            size = np.int64(0)
            for token in range(samples):
                source = base + np.uint64(token * every * hidden)
                wide = left[token].view(np.uint32)
                for at in range(hidden):
                    word = bits[source + np.uint64(at)]
                    wide[at] = np.uint32(word) << shift
                    sampled[token, at] = ordered(word)
                    total[token, at] = zero
                for at in range(width):
                    if at >= hidden:
                        left[token, at] = zero
                    products[at] = left[token, at] * left[token, at]
                spacings[token] = np.sqrt(halved(products)) * spacing
            for trial in range(most + 1):
                # Estimated bits of the differences to the prediction so far.
                now = np.int64(trial * price)
                for token in range(samples):
                    made[:] = total[token]
                    rounded(made, hidden)
                    wide = made.view(np.uint32)
                    amount = np.uint32(0)
                    for at in range(hidden):
                        change = item(sampled[token, at] - ordered(item(wide[at] >> shift)))
                        doubled = item(change << single)
                        folded = item(doubled ^ item(item(0) - item(change >> highest)))
                        value[at] = np.float32(folded)
                    wide = value.view(np.uint32)
                    for at in range(hidden):
                        exponent = wide[at] >> np.uint32(23)
                        amount += np.uint32(exponent - np.uint32(126)) if exponent else np.uint32(0)
                    now += np.int64(amount)
                if trial == 0 or now < size:
                    size, count = now, trial
                if trial == most or trial == count + trials:
                    break
                # The main direction of what is left, by the power method.
                largest, place = zero, 0
                for token in range(samples):
                    for at in range(width):
                        products[at] = left[token, at] * left[token, at]
                    length = np.sqrt(halved(products)) + spacings[token]
                    weight = np.float32(1) / length if length > zero else zero
                    for at in range(width):
                        scaled[token, at] = left[token, at] * weight
                        products[at] = scaled[token, at] * scaled[token, at]
                    powers[token] = halved(products)
                    length = np.sqrt(powers[token])
                    if not length <= largest:
                        largest, place = length, token
                        if not length < infinity:
                            break
                if not (zero < largest < infinity):
                    break
                direction = directions[trial]
                for at in range(width):
                    direction[at] = scaled[place, at] / largest
                for iteration in range(2 * iterations):
                    for at in range(width):
                        summed[at] = zero
                    for token in range(samples):
                        for at in range(width):
                            products[at] = scaled[token, at] * direction[at]
                        along = halved(products)
                        if iteration >= iterations:
                            apart = powers[token] - along * along
                            along /= (zero if apart < zero else apart) + near
                        for at in range(width):
                            summed[at] += scaled[token, at] * along
                    for at in range(width):
                        products[at] = summed[at] * summed[at]
                    length = np.sqrt(halved(products))
                    if not length > zero:
                        break
                    for at in range(width):
                        direction[at] = summed[at] / length
                rounded(direction, width)
                for at in range(width):
                    products[at] = direction[at] * direction[at]
                squares[trial] = halved(products)
                usable = True
                for token in range(samples):
                    for at in range(width):
                        products[at] = left[token, at] * direction[at]
                    factor[0] = halved(products) / squares[trial]
                    rounded(factor, 1)
                    usable &= np.abs(factor[0]) < infinity
                    for at in range(width):
                        product = factor[0] * direction[at]
                        total[token, at] += product
                        left[token, at] -= product
                if not usable:
                    break
        # Coefficients of all tokens; a term with one that is not finite is the first omitted one.
        ready = False
        while not ready:
            ready = True
            for token in range(tokens):
                source = base + np.uint64(token * hidden)
                target = np.uint64((row * tokens + token) * hidden)
                wide = value.view(np.uint32)
                for at in range(hidden):
                    wide[at] = np.uint32(bits[source + np.uint64(at)]) << shift
                    made[at] = zero
                for term in range(count):
                    direction = directions[term]
                    for at in range(width):
                        products[at] = value[at] * direction[at]
                    factor[0] = halved(products) / squares[term]
                    rounded(factor, 1)
                    if not np.abs(factor[0]) < infinity:
                        ready, count = False, term
                        break
                    end = np.uint64((row * most + term) * (hidden + tokens) + hidden + token)
                    terms[end] = item(factor.view(np.uint32)[0] >> shift)
                    for at in range(width):
                        product = factor[0] * direction[at]
                        made[at] += product
                        value[at] -= product
                if not ready:
                    break
                rounded(made, hidden)
                wide = made.view(np.uint32)
                for at in range(hidden):
                    word = ordered(bits[source + np.uint64(at)])
                    change = item(word - ordered(item(wide[at] >> shift)))
                    doubled = item(change << single)
                    differences[target + np.uint64(at)] = doubled ^ item(
                        item(0) - item(change >> highest)
                    )
        for term in range(most):
            first = np.uint64((row * most + term) * (hidden + tokens))
            if term < count:
                wide = directions[term].view(np.uint32)
                for at in range(hidden):
                    terms[first + np.uint64(at)] = item(wide[at] >> shift)
            else:
                for at in range(hidden + tokens):
                    terms[first + np.uint64(at)] = item(0)


def decoded_rows(
    coefficients: Array,
    differences: Array,
    stride: int,
    bits: Array,
    out_stride: int,
    shape: tuple[int, int, int, int],
    spare: int,
) -> None:
    """The loop of `run_decoding_loop`. Arrays are 1-D memory; strides are values between rows."""
    rows, tokens, hidden, terms = shape
    quiet, one, last = np.uint32(0x7FC00000), np.uint32(1), np.uint32(16)
    shift = np.uint32(spare)
    half = np.uint32(0x7FFF) if spare else np.uint32(0)
    odd = one if spare else np.uint32(0)
    kept = np.uint32(0xFFFF0000) if spare else np.uint32(0xFFFFFFFF)
    item = bits.dtype.type
    sign, single = item(1 << (31 - spare)), item(1)
    highest, none = item(31 - spare), item(0)
    directions = np.empty((terms, hidden), np.float32)
    factor = np.empty(1, np.float32)
    made = np.empty(hidden, np.float32)
    length = hidden + tokens
    for row in range(rows):
        used = 0
        for term in range(terms):
            first = np.uint64((row * terms + term) * length)
            wide = directions[term].view(np.uint32)
            held = none
            for at in range(length):
                held |= coefficients[first + np.uint64(at)]
            if held:
                used = term + 1
            for at in range(hidden):
                wide[at] = np.uint32(coefficients[first + np.uint64(at)]) << shift
        for token in range(tokens):
            source = np.uint64(row * stride + token * hidden)
            target = np.uint64(row * out_stride + token * hidden)
            for at in range(hidden):
                made[at] = np.float32(0)
            for term in range(used):
                place = np.uint64((row * terms + term) * length + hidden + token)
                factor.view(np.uint32)[0] = np.uint32(coefficients[place]) << shift
                weight = factor[0]
                for at in range(hidden):
                    made[at] += weight * directions[term, at]
            wide = made.view(np.uint32)
            for at in range(hidden):
                word = wide[at]
                nearest = np.uint32(
                    np.uint32(word + np.uint32(half + ((word >> last) & odd))) & kept
                )
                is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                value = item((quiet if is_nan else nearest) >> shift)
                predicted = item(value ^ item(sign | item(none - item(value >> highest))))
                folded = differences[source + np.uint64(at)]
                change = item(item(folded >> single) ^ item(none - item(folded & single)))
                total = item(predicted + change)
                bits[target + np.uint64(at)] = total ^ item(
                    sign | item(item(total >> highest) - single)
                )
