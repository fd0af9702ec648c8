"""Part of a Blosc frame, as a frame of its own."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from trajstore.codec.chunk import cut_frame

HEADER = 16

SIZE = 200_003


def content(kind: str) -> bytes:
    """Bytes that compress well, hardly, or not at all."""
    random = np.random.default_rng(5)
    values = {
        "zeros": np.zeros(SIZE, np.uint8),
        "some": random.integers(0, 9, SIZE, np.uint8),
        "noise": random.integers(0, 256, SIZE, np.uint8),
    }
    return values[kind].tobytes()


def frame(data: bytes, compressor: str, shuffle: int, typesize: int, blocksize: int) -> bytes:
    packed: bytes = blosc.Blosc(compressor, 5, shuffle, blocksize, typesize).encode(data)
    return packed


@given(
    kind=st.sampled_from(["zeros", "some", "noise"]),
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
    data, (start, stop) = content(kind), sorted(ends)
    whole = frame(data, compressor, shuffle, typesize, blocksize)
    part, skip = cut_frame(memoryview(whole), start, stop)
    assert len(part) <= len(whole)
    assert blosc.decompress(part)[skip : skip + stop - start] == data[start:stop]


@pytest.mark.parametrize("kind", ["some", "noise"])
def test_a_cut_is_as_small_as_blocks_allow(kind: str) -> None:
    data = content(kind)
    whole = frame(data, "zstd", blosc.Blosc.BITSHUFFLE, 2, 1 << 12)
    part, skip = cut_frame(memoryview(whole), 50_000, 50_100)
    assert skip < 1 << 12
    assert len(blosc.decompress(part)) <= 2 << 12
    # Also of the last block, which is short.
    part, _ = cut_frame(memoryview(whole), SIZE - 1, SIZE)
    assert len(blosc.decompress(part)) <= 2 << 12


def test_blocks_in_another_order_are_left_alone() -> None:
    # As a Blosc with threads may write them.
    data = content("some")
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


@pytest.mark.parametrize("keep", [0, 15, 16, 20, 100])
def test_a_torn_frame_is_an_error(keep: int) -> None:
    whole = frame(content("some"), "lz4", blosc.Blosc.SHUFFLE, 2, 0)
    with pytest.raises(ValueError, match="not a whole Blosc frame"):
        cut_frame(memoryview(whole[:keep]), 0, 10)


def test_what_lies_outside_is_an_error() -> None:
    whole = memoryview(frame(content("some"), "lz4", blosc.Blosc.SHUFFLE, 2, 0))
    for start, stop in ((0, SIZE + 1), (-1, 5), (7, 7)):
        with pytest.raises(ValueError, match=f"it holds {SIZE} bytes"):
            cut_frame(whole, start, stop)


@given(st.data())
def test_a_broken_header_is_an_error_or_harmless(draw: st.DataObject) -> None:
    """Checksums come first; whoever forges them gets an error, or other numbers, but no crash."""
    whole = bytearray(frame(content("some"), "lz4", blosc.Blosc.BITSHUFFLE, 2, 1 << 16))
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
