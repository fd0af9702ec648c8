"""Damage done to runs, for tests of who finds and mends it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import RunWriter
from trajstore.codec.block import digest_of
from trajstore.integrity.metadata_checks import check_metadata


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    """Cut a file short; a negative size counts from its end."""
    path.write_bytes(path.read_bytes()[:size])


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON document."""
    metadata = json.loads(path.read_bytes())
    change(metadata)
    path.write_text(json.dumps(metadata))


def put(metadata: Any, place: str, value: Any) -> None:
    """Set a member of a metadata file, or remove it with ``...``."""
    *way, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    for part in way:
        metadata = metadata[part]
    if value is ...:
        del metadata[last]
    else:
        metadata[last] = value


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def shard_index(run: Path, name: str, block: int) -> tuple[Path, list[tuple[int, int]]]:
    """File of a shard, and offset and length of its chunks."""
    stored = check_metadata(run).stored(name)
    path = run / name / ".".join(["c", str(block), *["0"] * (stored.ndim - 1)])
    with stored.opened(block, 0) as shard:
        index = shard.tail.index
    return path, [(int(offset), int(length)) for offset, length in index]


def write_shard(
    run: Path, name: str, block: int, chunks: bytes, index: list[tuple[int, int]]
) -> None:
    """Write a shard whose index may say anything; its checksums and digest fit."""
    stored = check_metadata(run).stored(name)
    pieces = [chunks[offset : offset + length] for offset, length in index]
    digest = digest_of(hashlib.sha256(piece).digest() for piece in pieces)
    with stored.opened(block, 0) as shard:
        label = shard.tail.label
    tail = stored.form.tail(index, replace(label, digest=digest))
    (run / stored.key(block, 0)).write_bytes(chunks + tail)


def wide_run(path: Path, rows: int = 11) -> Path:
    """A run of several chunks a shard, in blocks of 4 rows, as training makes it."""
    rng = np.random.default_rng(7)
    tokens = 300
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "trajstore.store.metadata.block_plan._CHUNK", 1 << 10
        )  # to have several chunks a shard
        writer = RunWriter.create(
            path,
            token=np.arange(tokens),
            hidden=3,
            variables={"W": "bfloat16", "grad": "float16", "exp_avg": "float32", "loss": "float32"},
            is_dead=np.arange(tokens) % 3 == 0,
            token_count=np.arange(tokens) % 3 * 5,
            token_text=[f"«{number}»" for number in range(tokens)],
            config={"why": "a test", "lr": 1.5e-05},
            block_rows=4,
        )
    with writer as run:
        for row in range(rows):
            grad = rng.normal(size=(tokens, 3)).astype("float16").astype("float32")
            moments = rng.normal(size=(tokens, 3)).astype("float32")
            run.append(
                step=row,
                W=rng.integers(0, 1 << 16, (tokens, 3), dtype="u2"),
                grad=grad if row else np.full_like(grad, np.nan),
                exp_avg=moments if row else np.zeros_like(moments),
                loss=np.float32(1 / row if row else np.nan),
            )
    return path
