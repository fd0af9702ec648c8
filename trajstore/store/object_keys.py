"""Names of the objects of a run, and of the files beside it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["CHECKPOINT", "DOCUMENT", "block_of", "checkpoint_folder", "chunk_key"]

DOCUMENT = "zarr.json"
"""Key of the metadata of a group or an array."""

CHECKPOINT = re.compile(r"step-(\d{8,})\.safetensors")
"""Name of the file of a checkpoint; the group is its step."""


def chunk_key(name: str, block: int, ndim: int) -> str:
    """Key of the shard that holds a block of an array: ``W/c.3.0.0``."""
    return f"{name}/" + ".".join(["c", str(block), *["0"] * (ndim - 1)])


def block_of(leaf: str, ndim: int) -> int | None:
    """Number of the block whose shard has that file name; None if no shard is called so."""
    number = leaf.split(".")[1] if leaf.count(".") == ndim else ""
    if not number.isdecimal() or leaf != chunk_key("", int(number), ndim)[1:]:
        return None
    return int(number)


def checkpoint_folder(run: Path) -> Path:
    """Where the checkpoints of a run lie: beside it, as ``NAME.ckpt``."""
    return run.with_name(f"{run.name.removesuffix('.zarr')}.ckpt")
