"""Objects of a store on a local file system: each is replaced whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PARTIAL_SUFFIX", "put"]

PARTIAL_SUFFIX = ".partial"


def put(path: Path, parts: Iterable[bytes]) -> int:
    """Write an object from its parts and put it in place in one step.

    A reader, and whoever comes after a crash, sees the old object or the whole new one. A failed
    write leaves nothing behind.

    Parameters
    ----------
    path : Path
        Its folder is made if need be.
    parts : iterable of bytes
        Consumed one at a time, so an object is never in memory as a whole.

    Returns
    -------
    int
        Bytes written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            size = file.tell()
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size
