"""Differences along the steps; what a decoder refuses and needs.

What it makes of chunks is tested with their arrays.
"""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bits_and_calls import random_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numcodecs import blosc

from trajstore.codec.chunk import LENGTH, OWN_FORM, Decoder, chain, checksum, cut_frame
from trajstore.codec.delta import fold, unfold
from trajstore.values.native_types import narrow, native_type

FORMAT = Path(__file__).parents[4] / "docs" / "reference" / "format.md"

EXAMPLE = np.array([[0x3F80, 0xBF80], [0x3F81, 0xBF80], [0x3F7F, 0x3F80]], np.uint16)
GOLDEN = "00 7f ff 80 02 00 00 00 03 00 ff ff"


def folded(bits: np.ndarray) -> np.ndarray:
    out = np.empty_like(bits)
    fold(bits, out)
    return out


def unfolded(bits: np.ndarray, start: int = 0) -> np.ndarray:
    """Rows from `start` on, of the bits of the stored values."""
    native = native_type({2: "bfloat16", 4: "float32", 8: "float64"}[bits.itemsize])
    out = np.empty(bits[start:].shape, f"u{native.stored.itemsize}")
    unfold(bits, native, out, start)
    return narrow(out.view(native.stored), native)


def reference(bits: np.ndarray) -> np.ndarray:
    """The definition, with Python's integers."""
    width = 8 * bits.itemsize
    out = np.empty_like(bits)
    for index in np.ndindex(bits.shape):
        before = int(bits[(index[0] - 1, *index[1:])]) if index[0] else 0
        difference = (int(bits[index]) - before) % 2**width
        signed = difference - 2**width if difference >> (width - 1) else difference
        out[index] = 2 * signed if signed >= 0 else -2 * signed - 1
    return out


@given(
    npst.arrays(
        st.sampled_from([np.uint16, np.uint32, np.uint64]),
        npst.array_shapes(min_dims=1, max_dims=3, max_side=6),
    ),
    st.sampled_from([1, 24, 100, 1 << 20]),
    st.sampled_from([0, 3, 256]),
    st.integers(0, 5),
)
def test_folding_is_what_the_format_says_and_can_be_undone(
    bits: np.ndarray, group: int, short: int, start: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Groups of one row, of some, and of all; rows added up one by one, and at once.
        for name, value in (("_GROUP", group), ("_SHORT", short)):
            patch.setattr(f"trajstore.codec.delta.{name}", value)
        np.testing.assert_array_equal(folded(bits), reference(bits))
        np.testing.assert_array_equal(unfolded(folded(bits)), bits)
        start = min(start, len(bits) - 1)
        np.testing.assert_array_equal(unfolded(folded(bits), start), bits[start:])


def test_the_bytes_of_the_worked_example_are_pinned() -> None:
    assert folded(EXAMPLE).astype("<u2").tobytes().hex(" ") == GOLDEN
    text = FORMAT.read_text()
    assert f"`{GOLDEN}`" in text
    rows = re.findall(r"\| step \d \| " + " \\| ".join(["([0-9A-F]{4})"] * 6), text)
    table = np.array([[int(cell, 16) for cell in row] for row in rows], np.uint16)
    np.testing.assert_array_equal(table[:, :2], EXAMPLE)
    np.testing.assert_array_equal(table[:, 4:], folded(EXAMPLE))
    values = EXAMPLE.view(ml_dtypes.bfloat16).astype(float)
    assert values.T.tolist() == [[1.0, 1.0078125, 0.99609375], [-1.0, -1.0, 1.0]]


def test_a_forged_chunk_is_an_error_and_takes_no_memory() -> None:
    """Its checksum fits, but its header promises more than there is."""
    large = (8, 20_120, 64)
    size = int(np.prod(large)) * 2
    coding = chain(native_type("bfloat16"), 3, small=False)
    for flags in (0x06, 0x24):  # bytes copied, bytes packed
        data = struct.pack("<BBBBIII", 2, 1, flags, 2, size, size, size + 16) + b"x" * 100
        with pytest.raises(ValueError, match="not a whole Blosc frame"):
            Decoder(coding, large).unpack(data + checksum(data))
    coding = chain(native_type("bfloat16"), 3, small=True)
    data = coding.encode(random_bits((4, 6, 5), 1, 16), (4, 6, 5))
    assert Decoder(coding, (4, 6, 5)).unpack(data).shape == (4, 6, 5)
    with pytest.raises(ValueError, match="its size differs"):
        Decoder(coding, (4, 6, 6)).unpack(data)
    # Of too many terms; a frame of zeros is short, however many they are.
    head, body = (coding.compress(np.zeros(shape, np.uint16)) for shape in ((2, 9, 7), (2, 3, 4)))
    data = OWN_FORM + LENGTH.pack(len(head)) + head + body
    with pytest.raises(ValueError, match="9 terms"):
        Decoder(replace(coding, kind="predicted"), (2, 3, 4)).unpack(data + checksum(data))


@pytest.mark.parametrize("history", [True, False])
def test_only_what_is_needed_is_decompressed(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordered by token, blocks of the tokens alone; otherwise the rows so far."""
    native, shape = native_type("bfloat16"), (8, 2_000, 64)
    coding = chain(native, 3, small=False, history=history)
    changes = np.random.default_rng(3).integers(-2, 3, shape)
    bits = (0x3F80 + changes.cumsum(axis=0)).astype(np.uint16)
    data, real = coding.encode(bits, shape), blosc.decompress
    decompressed: list[int] = []

    def decompress(frame: memoryview, out: np.ndarray) -> object:
        decompressed.append(out.nbytes)
        return real(frame, out)

    monkeypatch.setattr(blosc, "decompress", decompress)
    for steps, few in ((slice(0, 8), history), (slice(2, 3), True)):
        decompressed.clear()
        window = (steps, slice(700, 703), slice(0, 64))
        out = np.empty_like(bits[window])
        Decoder(coding, shape).decode(data, window, out)
        np.testing.assert_array_equal(out, bits[window])
        assert 0 < sum(decompressed) <= (0.6 if few else 1) * bits.nbytes


HEADER = 16

SIZE = 200_003


RANDOM = np.random.default_rng(5)
CONTENT = {  # what compresses well, hardly, or not at all
    "zeros": bytes(SIZE),
    "some": RANDOM.integers(0, 9, SIZE, np.uint8).tobytes(),
    "noise": RANDOM.bytes(SIZE),
}


def frame(data: bytes, compressor: str, shuffle: int, typesize: int, blocksize: int) -> bytes:
    packed: bytes = blosc.Blosc(compressor, 5, shuffle, blocksize, typesize).encode(data)
    return packed


@given(
    kind=st.sampled_from([*CONTENT]),
    compressor=st.sampled_from(["lz4", "zstd"]),
    shuffle=st.sampled_from([blosc.Blosc.SHUFFLE, blosc.Blosc.BITSHUFFLE]),
    typesize=st.sampled_from([2, 4, 8]),
    blocksize=st.sampled_from([0, 1 << 10, 1 << 16]),
    ends=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).filter(
        lambda ends: len({*ends}) == 2
    ),
)
def test_a_cut_holds_the_segment(
    kind: str, compressor: str, shuffle: int, typesize: int, blocksize: int, ends: tuple[int, int]
) -> None:
    data, (start, stop) = CONTENT[kind], sorted(ends)
    whole = frame(data, compressor, shuffle, typesize, blocksize)
    part, skip = cut_frame(memoryview(whole), start, stop)
    assert len(part) <= len(whole)
    found = blosc.decompress(part)
    assert found[skip : skip + stop - start] == data[start:stop]
    block = int.from_bytes(whole[8:12], "little")
    assert len(found) <= stop - start + 2 * block


def test_blocks_in_another_order_are_left_alone() -> None:
    # As a Blosc with threads may write them.
    data = CONTENT["some"]
    whole = bytearray(frame(data, "zstd", blosc.Blosc.BITSHUFFLE, 2, 1 << 16))
    count = -(-SIZE // (1 << 16))
    starts = [*struct.unpack_from(f"<{count}i", whole, HEADER), len(whole)]
    blocks = [bytes(whole[here:after]) for here, after in itertools.pairwise(starts)]
    at, moved = starts[0], {}
    for number in (2, 0, *range(3, count), 1):
        moved[number] = at
        whole[at : at + len(blocks[number])] = blocks[number]
        at += len(blocks[number])
    struct.pack_into(f"<{count}i", whole, HEADER, *(moved[number] for number in range(count)))
    assert blosc.decompress(bytes(whole)) == data
    part, skip = cut_frame(memoryview(whole), 70_000, 70_010)
    assert blosc.decompress(part)[skip : skip + 10] == data[70_000:70_010]


def test_a_torn_frame_or_bytes_outside_of_it_are_an_error() -> None:
    whole = memoryview(frame(CONTENT["some"], "lz4", blosc.Blosc.SHUFFLE, 2, 0))
    for keep in (0, 15, 16, 20, 100):
        with pytest.raises(ValueError, match="not a whole Blosc frame"):
            cut_frame(whole[:keep], 0, 10)
    for start, stop in ((0, SIZE + 1), (-1, 5), (7, 7)):
        with pytest.raises(ValueError, match=f"it holds {SIZE} bytes"):
            cut_frame(whole, start, stop)


@given(st.data())
def test_a_broken_header_is_an_error_or_harmless(draw: st.DataObject) -> None:
    """Checksums come first; whoever forges them gets an error, or other numbers, but no crash."""
    whole = bytearray(frame(CONTENT["some"], "lz4", blosc.Blosc.BITSHUFFLE, 2, 1 << 16))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, HEADER + 15))
        whole[at] = draw.draw(st.integers(0, 255))
    start = draw.draw(st.integers(0, SIZE - 2))
    try:
        part, skip = cut_frame(memoryview(whole), start, start + 2)
        out = np.empty(SIZE, np.uint8)
        blosc.decompress(part, out)
    except (ValueError, RuntimeError):
        return
    assert skip >= 0
