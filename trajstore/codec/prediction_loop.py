"""Prediction of gradients over tokens, in loops that numba compiles.

The results equal those of `trajstore.codec.predicted_rows`, which calls the loops, bit for bit: the
same operations in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ITERATIONS = 2
"""Iterations of the power method, and then as many with less weight for tokens apart."""

NEAR = np.float32(1e-4)
"""Square of the distance from a direction at which a token has half of its weight."""

TRIALS = 2
"""Terms to try after the best number of terms."""

_GROUP = 16  # tokens that fit into the L1 cache


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
    spacing: np.float32,
) -> None:
    """Find the terms of each row of a chunk and the differences to their prediction.

    Parameters
    ----------
    bits : ndarray of ``native.bits``
        Memory of the chunk, 1-D.
    stride : int
        Values between rows of `bits`.
    shape : tuple of int
        Numbers of rows, tokens, positions along hidden, and terms at most.
    terms, differences : ndarray of ``native.bits``, 1-D
        Receive the terms (row, term, hidden + token) and the differences (row, token, hidden).
    spare : int
        Omitted bits of the native type.
    width : int
        Power of two, at least 8 and the positions along hidden. Padding is 0.
    every : int
        Distance of the tokens that determine the directions of a row.
    price : int
        Estimated bits of one term of these tokens.
    spacing : float32
        Relative spacing of values, below which what is left of a token has less weight.
    """
    rows, tokens, hidden, most = shape
    half = width >> 1
    quiet, low_bit, last = np.uint32(0x7FC00000), np.uint32(1), np.uint32(16)
    middle = np.uint32(0x7FFF) if spare else np.uint32(0)
    odd = low_bit if spare else np.uint32(0)
    kept = np.uint32(0xFFFF0000) if spare else np.uint32(0xFFFFFFFF)
    item = bits.dtype.type
    sign, single = item(1 << (31 - spare)), item(1)
    all_bits = item(sign | item(sign - single))
    zero, infinity = np.float32(0), np.float32(np.inf)

    samples = (tokens + every - 1) // every
    left = np.zeros(samples * width, np.float32)
    total = np.zeros(samples * width, np.float32)
    sampled = np.full(samples * width, sign, bits.dtype)  # that of padding
    scaled = np.zeros(samples * width, np.float32)
    spacings = np.zeros(samples, np.float32)
    powers = np.zeros(samples, np.float32)
    directions = np.zeros(most * width, np.float32)
    squares = np.zeros(most, np.float32)
    products = np.zeros(width, np.float32)
    summed = np.zeros(width, np.float32)
    values = np.zeros(_GROUP * width, np.float32)
    made = np.zeros(_GROUP * width, np.float32)
    factors = np.zeros(max(samples, _GROUP), np.float32)
    # A view within a loop takes longer than the loop.
    left_bits, total_bits = left.view(np.uint32), total.view(np.uint32)
    directions_bits = directions.view(np.uint32)
    values_bits, made_bits = values.view(np.uint32), made.view(np.uint32)
    factors_bits = factors.view(np.uint32)

    # Functions within the loop are inlined by numba.
    def nearest(word: Any) -> Any:
        made = np.uint32(np.uint32(word + np.uint32(middle + ((word >> last) & odd))) & kept)
        is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return quiet if is_nan else made

    def round_bits(words: Any, first: Any, size: Any) -> None:
        for at in range(size):
            words[first + np.uint64(at)] = nearest(words[first + np.uint64(at)])

    def dot(factors: Any, first: Any, others: Any, start: Any) -> Any:
        for at in range(half):
            here, there = np.uint64(at), np.uint64(at + half)
            products[here] = (
                factors[first + here] * others[start + here]
                + factors[first + there] * others[start + there]
            )
        length = half
        while length > 16 or 16 > length > 1:
            length >>= 1
            for at in range(length):
                products[np.uint64(at)] += products[np.uint64(at + length)]
        if length == 1:
            return products[0]
        p = products
        return (((p[0] + p[8]) + (p[4] + p[12])) + ((p[2] + p[10]) + (p[6] + p[14]))) + (
            ((p[1] + p[9]) + (p[5] + p[13])) + ((p[3] + p[11]) + (p[7] + p[15]))
        )

    def wide(word: Any) -> Any:
        return np.uint32(np.uint32(word) << last) if spare else np.uint32(word)

    def native(word: Any) -> Any:
        return item(word >> last) if spare else item(word)

    def ordered(value: Any) -> Any:
        return item(value ^ all_bits) if value & sign else item(value ^ sign)

    def folded(difference: Any) -> Any:
        doubled = item(difference << single)
        return item(doubled ^ all_bits) if difference & sign else doubled

    none = np.uint64(0)
    for row in range(rows):
        base = np.uint64(row * stride)
        # A row without a finite number other than 0 has no terms.
        greatest = np.uint32(0)
        for at in range(tokens * hidden):
            word = wide(bits[base + np.uint64(at)])
            greatest = max(greatest, np.uint32(word & np.uint32(0x7FFFFFFF)))
        count = 0
        if np.uint32(0) < greatest < np.uint32(0x7F800000):
            size = np.int64(0)
            for token in range(samples):
                source = base + np.uint64(token * every * hidden)
                place = np.uint64(token * width)
                for at in range(hidden):
                    word = bits[source + np.uint64(at)]
                    left_bits[place + np.uint64(at)] = wide(word)
                    sampled[place + np.uint64(at)] = ordered(word)
                spacings[token] = np.sqrt(dot(left, place, left, place)) * spacing
            total[:] = zero
            for trial in range(most + 1):
                # Estimated bits of the differences to the prediction so far.
                now = np.int64(trial * price)
                for token in range(samples):
                    place = np.uint64(token * width)
                    amount = np.uint32(0)
                    for at in range(width):
                        word = total_bits[place + np.uint64(at)]
                        predicted = ordered(native(nearest(word)))
                        change = folded(item(sampled[place + np.uint64(at)] - predicted))
                        exponent = np.float32(change).view(np.uint32) >> np.uint32(23)
                        amount += np.uint32(exponent - np.uint32(126)) if exponent else np.uint32(0)
                    now += np.int64(amount)
                if trial == 0 or now < size:
                    size, count = now, trial
                if trial == most or trial == count + TRIALS:
                    break
                # The main direction of what is left, by the power method.
                largest, main = zero, 0
                for token in range(samples):
                    place = np.uint64(token * width)
                    length = np.sqrt(dot(left, place, left, place)) + spacings[token]
                    weight = np.float32(1) / length if length > zero else zero
                    for at in range(width):
                        scaled[place + np.uint64(at)] = left[place + np.uint64(at)] * weight
                    powers[token] = dot(scaled, place, scaled, place)
                    length = np.sqrt(powers[token])
                    if not length <= largest:
                        largest, main = length, token
                        if not length < infinity:
                            break
                if not (zero < largest < infinity):
                    break
                direction = np.uint64(trial * width)
                for at in range(width):
                    value = scaled[np.uint64(main * width + at)]
                    directions[direction + np.uint64(at)] = value / largest
                for iteration in range(2 * ITERATIONS):
                    summed[:] = zero
                    for token in range(samples):
                        place = np.uint64(token * width)
                        along = dot(scaled, place, directions, direction)
                        if iteration >= ITERATIONS:
                            apart = powers[token] - along * along
                            along /= (zero if apart < zero else apart) + NEAR
                        for at in range(width):
                            summed[np.uint64(at)] += scaled[place + np.uint64(at)] * along
                    length = np.sqrt(dot(summed, none, summed, none))
                    if not length > zero:
                        break
                    for at in range(width):
                        directions[direction + np.uint64(at)] = summed[np.uint64(at)] / length
                round_bits(directions_bits, direction, width)
                squares[trial] = dot(directions, direction, directions, direction)
                for token in range(samples):
                    along = dot(left, np.uint64(token * width), directions, direction)
                    factors[np.uint64(token)] = along / squares[trial]
                round_bits(factors_bits, none, samples)
                usable = True
                for token in range(samples):
                    factor = factors[np.uint64(token)]
                    usable &= np.abs(factor) < infinity
                    place = np.uint64(token * width)
                    for at in range(width):
                        product = factor * directions[direction + np.uint64(at)]
                        total[place + np.uint64(at)] += product
                        left[place + np.uint64(at)] -= product
                if not usable:
                    break
        # Coefficients of all tokens; a term with one that is not finite is the first omitted one.
        ready = False
        while not ready:
            ready = True
            for begin in range(0, tokens, _GROUP):
                group = min(_GROUP, tokens - begin)
                source = base + np.uint64(begin * hidden)
                # Without padding, the tokens are one piece.
                pieces, together = (1, group * hidden) if hidden == width else (group, hidden)
                for piece in range(pieces):
                    place, start = np.uint64(piece * width), source + np.uint64(piece * hidden)
                    for at in range(together):
                        values_bits[place + np.uint64(at)] = wide(bits[start + np.uint64(at)])
                made[:] = zero
                for term in range(count):
                    direction = np.uint64(term * width)
                    for token in range(group):
                        along = dot(values, np.uint64(token * width), directions, direction)
                        factors[np.uint64(token)] = along / squares[term]
                    round_bits(factors_bits, none, group)
                    end = np.uint64((row * most + term) * (hidden + tokens) + hidden + begin)
                    for token in range(group):
                        factor = factors[np.uint64(token)]
                        ready &= np.abs(factor) < infinity
                        terms[end + np.uint64(token)] = native(factors_bits[np.uint64(token)])
                        place = np.uint64(token * width)
                        for at in range(width):
                            product = factor * directions[direction + np.uint64(at)]
                            made[place + np.uint64(at)] += product
                            values[place + np.uint64(at)] -= product
                    if not ready:
                        count = term
                        break
                if not ready:
                    break
                round_bits(made_bits, none, group * width)
                target = np.uint64((row * tokens + begin) * hidden)
                for piece in range(pieces):
                    place, start = np.uint64(piece * width), source + np.uint64(piece * hidden)
                    end = target + np.uint64(piece * hidden)
                    for at in range(together):
                        predicted = ordered(native(made_bits[place + np.uint64(at)]))
                        change = item(ordered(bits[start + np.uint64(at)]) - predicted)
                        differences[end + np.uint64(at)] = folded(change)
        for term in range(most):
            first = np.uint64((row * most + term) * (hidden + tokens))
            if term < count:
                for at in range(hidden):
                    word = directions_bits[np.uint64(term * width + at)]
                    terms[first + np.uint64(at)] = native(word)
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
    """Restore rows from terms and differences. Arrays are 1-D memory; strides count values."""
    rows, tokens, hidden, terms = shape
    quiet, low_bit, last = np.uint32(0x7FC00000), np.uint32(1), np.uint32(16)
    middle = np.uint32(0x7FFF) if spare else np.uint32(0)
    odd = low_bit if spare else np.uint32(0)
    kept = np.uint32(0xFFFF0000) if spare else np.uint32(0xFFFFFFFF)
    item = bits.dtype.type
    sign, single = item(1 << (31 - spare)), item(1)
    all_bits, none = item(sign | item(sign - single)), item(0)
    directions = np.empty(terms * hidden, np.float32)
    made = np.empty(_GROUP * hidden, np.float32)

    def wide(word: Any) -> Any:
        return np.uint32(np.uint32(word) << last) if spare else np.uint32(word)

    length = hidden + tokens
    for row in range(rows):
        used = 0
        for term in range(terms):
            first = np.uint64((row * terms + term) * length)
            any_bits = none
            for at in range(length):
                any_bits |= coefficients[first + np.uint64(at)]
            if any_bits:
                used = term + 1
            for at in range(hidden):
                word = np.uint32(wide(coefficients[first + np.uint64(at)]))
                directions[np.uint64(term * hidden + at)] = word.view(np.float32)
        for begin in range(0, tokens, _GROUP):
            group = min(_GROUP, tokens - begin)
            source = np.uint64(row * stride + begin * hidden)
            target = np.uint64(row * out_stride + begin * hidden)
            made[:] = np.float32(0)
            for term in range(used):
                direction = np.uint64(term * hidden)
                end = np.uint64((row * terms + term) * length + hidden + begin)
                for token in range(group):
                    weight = np.uint32(wide(coefficients[end + np.uint64(token)])).view(np.float32)
                    place = np.uint64(token * hidden)
                    for at in range(hidden):
                        product = weight * directions[direction + np.uint64(at)]
                        made[place + np.uint64(at)] += product
            for at in range(group * hidden):
                word = np.float32(made[np.uint64(at)]).view(np.uint32)
                near = np.uint32(
                    np.uint32(word + np.uint32(middle + ((word >> last) & odd))) & kept
                )
                is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                near = quiet if is_nan else near
                value = item(near >> last) if spare else item(near)
                predicted = item(value ^ all_bits) if value & sign else item(value ^ sign)
                folded = differences[source + np.uint64(at)]
                half = item(folded >> single)
                change = item(half ^ all_bits) if folded & single else half
                total = item(predicted + change)
                bits[target + np.uint64(at)] = (
                    item(total ^ sign) if total & sign else item(total ^ all_bits)
                )
