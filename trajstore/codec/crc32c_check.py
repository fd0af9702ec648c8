"""Checksum after every chunk and index: crc32c, as written by Zarr's codec of that name."""

from __future__ import annotations

import google_crc32c

CHECKSUM = 4
"""Bytes of the checksum."""

_RESIDUE = 0x48674BC7


def checksum(data: bytes) -> bytes:
    """The four bytes that the crc32c codec appends to the data."""
    value: int = google_crc32c.value(data)
    return value.to_bytes(CHECKSUM, "little")


def is_intact(data: bytes) -> bool:
    """True if data ends with its own checksum."""
    # The crc32c of data followed by its crc32c is a constant.
    intact: bool = google_crc32c.value(data) == _RESIDUE
    return intact
