"""Names of the objects of a run, and of the files beside it."""

from __future__ import annotations

import re
from typing import TypeVar, cast

from trajstore.store.storage.remote_path import Location

__all__ = ["CHECKPOINT", "DOCUMENT", "block_of", "checkpoint_folder", "chunk_key"]

Place = TypeVar("Place", bound=Location)

DOCUMENT = "zarr.json"
"""Key of the metadata of a group or an array."""

CHECKPOINT = re.compile(r"step-(\d{8,})\.safetensors")
"""Name of the file of a checkpoint; the group is its step."""


def chunk_key(name: str, block: int, ndim: int, part: int = 0) -> str:
    """Key of the shard that holds a block of an array, or a part of its tokens: ``W/c.3.0.0``."""
    return f"{name}/" + ".".join(["c", str(block), str(part), *["0"] * (ndim - 2)][: ndim + 1])


def block_of(leaf: str, ndim: int) -> tuple[int, int] | None:
    """Numbers of the block and part whose shard has that file name; None if none is called so."""
    numbers = leaf.split(".")[1:3] if leaf.count(".") == ndim else []
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    block, part = int(numbers[0]), int(numbers[1]) if ndim > 1 else 0
    return (block, part) if leaf == chunk_key("", block, ndim, part)[1:] else None


def checkpoint_folder(run: Place) -> Place:
    """Where the checkpoints of a run lie: beside it, as ``NAME.ckpt``."""
    return cast(Place, run.with_name(f"{run.name.removesuffix('.zarr')}.ckpt"))
