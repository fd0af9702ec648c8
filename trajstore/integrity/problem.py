"""What may be wrong with a run, as verification reports it and a repair reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trajstore.store.storage.remote_path import Location

__all__ = ["Problem"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong with a run.

    Attributes
    ----------
    array : str or None
        None for what concerns the run as a whole.
    block : int or None
        Of the array, where it lies in one.
    first_byte, stop_byte : int or None
        What is broken in the file, from the first byte up to, not including, the last.
    path : Path or RemotePath
        The file.
    message : str
        One sentence.
    remedy : {'rewrite', 'cut', 'remove', 'none'}
        What a repair can do: write the document anew from what else is known, drop the rows from
        this block on, remove the file, or nothing.
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
