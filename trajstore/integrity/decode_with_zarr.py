"""Arrays of a run that are not stored as a recorder stores them: zarr reads these."""

from __future__ import annotations

from typing import Any

import zarr

from trajstore.errors import FormatError, ObjectStoreError
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.store.storage.remote_path import RemotePath

__all__ = ["note_on_fallback", "open_with_zarr"]


def open_with_zarr(metadata: CheckedMetadata, name: str) -> zarr.Array[Any]:
    """Open an array with zarr, from its own document.

    Raises
    ------
    FormatError
        If it cannot be opened.
    """
    place = metadata.path / name
    try:
        if isinstance(place, RemotePath):
            store = place.zarr_store()
            return zarr.open_array(store, path=place.key, mode="r", zarr_format=3)
        return zarr.open_array(place, mode="r", zarr_format=3)
    except ObjectStoreError:
        raise
    except Exception as error:  # whatever zarr raises for a document that nobody wrote
        raise FormatError(f"cannot be read ({error})") from error


def note_on_fallback(name: str) -> str:
    """What a check through zarr is worth."""
    return (
        f"{name} is not stored as a recorder stores it; it is read through zarr, and only what its "
        "own codecs check is checked"
    )
