"""A problem of a run, from `verify` to `repair`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trajstore.store.storage.remote_path import Location


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of a run.

    Attributes
    ----------
    array : str or None
        None if it concerns the whole run.
    block : int or None
        Block of the array, if it concerns one.
    first_byte, stop_byte : int or None
        Range of the broken bytes in the file; the last is excluded.
    path : Path or RemotePath
        The file.
    message : str
        One sentence.
    remedy : {'rewrite', 'cut', 'remove', 'none'}
        Action of a repair: rewrite the metadata file from the second copy, cut the rows from this
        block on, remove the file, or nothing.
    """

    array: str | None
    path: Location
    message: str
    remedy: Literal["rewrite", "cut", "remove", "none"] = "none"
    block: int | None = None
    first_byte: int | None = None
    stop_byte: int | None = None

    def __str__(self) -> str:
        where = [] if self.array is None else [self.array]
        if self.block is not None:
            where.append(f"block {self.block}")
        if self.first_byte is not None:
            where.append(f"bytes {self.first_byte} to {self.stop_byte}")
        return f"{', '.join(where) or self.path.name}: {self.message}"
