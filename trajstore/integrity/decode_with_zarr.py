"""Arrays of a run that are not stored as a recorder stores them: zarr reads these."""

from __future__ import annotations

from typing import Any

import zarr

from trajstore.errors import FormatError
from trajstore.integrity.checked_metadata import CheckedMetadata

__all__ = ["note_on_fallback", "open_with_zarr"]


def open_with_zarr(metadata: CheckedMetadata, name: str) -> zarr.Array[Any]:
    """Open an array with zarr, from its own document.

    Raises
    ------
    FormatError
        If it cannot be opened.
    """
    try:
        return zarr.open_array(metadata.path / name, mode="r", zarr_format=3)
    except Exception as error:  # whatever zarr raises for a document that nobody wrote
        raise FormatError(f"cannot be read ({error})") from error


def note_on_fallback(name: str) -> str:
    """What a check through zarr is worth."""
    return (
        f"{name} is not stored as a recorder stores it; it is read through zarr, and only what its "
        "own codecs check is checked"
    )
