"""Names of the objects of a run, and of the files next to it."""

from __future__ import annotations

import re
from typing import TypeVar, cast

from trajstore.store.storage.remote_path import Location

Place = TypeVar("Place", bound=Location)

METADATA_KEY = "zarr.json"
"""Key of the metadata of a group or an array."""

CHECKPOINT = re.compile(r"step-(\d{8,})\.safetensors")
"""File name of a checkpoint; the group is its step."""


def chunk_key(name: str, block: int, ndim: int, part: int = 0) -> str:
    """Key of the shard of a block, or of one part of its tokens: ``W/c.3.0.0``."""
    return f"{name}/" + ".".join(["c", str(block), str(part), *["0"] * (ndim - 2)][: ndim + 1])


def block_of(leaf: str, ndim: int) -> tuple[int, int] | None:
    """Block and part of a shard, from its file name; None if it is not the name of a shard."""
    numbers = leaf.split(".")[1:3] if leaf.count(".") == ndim else []
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    block, part = int(numbers[0]), int(numbers[1]) if ndim > 1 else 0
    return (block, part) if leaf == chunk_key("", block, ndim, part)[1:] else None


def checkpoint_folder(run: Place) -> Place:
    """Folder of a run's checkpoints: ``NAME.ckpt``, next to the run."""
    return cast(Place, run.with_name(f"{run.name.removesuffix('.zarr')}.ckpt"))
