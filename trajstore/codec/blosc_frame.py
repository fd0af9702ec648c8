"""Part of a Blosc frame, as a frame of its own.

A frame is a header of 16 bytes, the offsets of its blocks, and the blocks, each compressed by
itself. So a stretch of what was compressed needs a few of the blocks only, and those, behind a
header that says so, are what any Blosc library decompresses.

Source: the chunk format of C-Blosc 1, which its documentation describes.
"""

from __future__ import annotations

import struct

__all__ = ["HEADER", "cut"]

HEADER = 16
"""Bytes of the header: of the least that a frame can be."""

_FIELDS = struct.Struct("<3sBIII")  # versions and flags, typesize, bytes, of a block, compressed
_FLAGS = 2
_COPIED = 0x02  # the flag of a frame that holds its bytes as they are
_OFFSET = 4


def cut(frame: memoryview, start: int, stop: int) -> tuple[memoryview, int]:
    """Smaller frame that holds a stretch of what a frame holds.

    Parameters
    ----------
    frame : memoryview of bytes
    start, stop : int
        Bytes of what was compressed; start < stop.

    Returns
    -------
    frame : memoryview
        The one given, if its blocks do not lie in their order.
    skip : int
        Bytes that it holds before the stretch.

    Raises
    ------
    ValueError
        If the header does not describe what is there.
    """
    if len(frame) < HEADER:
        raise ValueError("it is not a whole Blosc frame")
    kind, typesize, size, block, packed = _FIELDS.unpack_from(frame)
    count = -(-size // block) if block else 0
    starts_end = HEADER + count * _OFFSET
    copied = kind[_FLAGS] & _COPIED
    if packed != len(frame) or not count or (not copied and starts_end > packed):
        raise ValueError("it is not a whole Blosc frame")
    if not 0 <= start < stop <= size:
        raise ValueError(f"it holds {size} bytes, not those from {start} to {stop}")
    if copied:
        held = stop - start
        head = _FIELDS.pack(kind, typesize, held, min(block, held), HEADER + held)
        return memoryview(head + frame[HEADER + start : HEADER + stop]), 0
    first, last = start // block, (stop - 1) // block + 1
    if first and last == count:
        # A block that is shorter than the header says is taken for the last of several.
        first = min(first, count - 2)
    starts = [*struct.unpack_from(f"<{count}i", frame, HEADER), packed]
    if starts[0] < starts_end or starts != sorted(set(starts)):
        return frame, start
    begin, end = starts[first], starts[last]
    moved = HEADER + (last - first) * _OFFSET
    head = _FIELDS.pack(
        kind, typesize, min(last * block, size) - first * block, block, moved + end - begin
    )
    offsets = struct.pack(f"<{last - first}i", *(at - begin + moved for at in starts[first:last]))
    return memoryview(head + offsets + frame[begin:end]), start - first * block
