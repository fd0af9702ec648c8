"""The checksum behind every chunk and index: crc32c, as Zarr's codec of that name writes it."""

from __future__ import annotations

import google_crc32c

__all__ = ["CHECKSUM", "checksum", "is_intact"]

CHECKSUM = 4
"""Bytes of it, behind a chunk."""

_RESIDUE = 0x48674BC7


def checksum(data: bytes) -> bytes:
    """The four bytes that the crc32c codec puts behind the data."""
    value: int = google_crc32c.value(data)
    return value.to_bytes(CHECKSUM, "little")


def is_intact(data: bytes) -> bool:
    """Whether data ends with its own checksum."""
    # Of anything followed by its crc32c, the crc32c is always the same.
    intact: bool = google_crc32c.value(data) == _RESIDUE
    return intact
