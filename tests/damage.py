"""Damage of runs: one way to describe it, for tests of who notices, mends, or is misled.

A `Damage` has a name, and a function of a run that does it; those below make such functions. They
replace each file that they change, so a copy of hard links can be damaged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zarr
from bits_and_calls import random_bits

from trajstore import RunWriter
from trajstore.codec.block import LABEL, BlockLabel, digest_of
from trajstore.codec.chunk import checksum
from trajstore.integrity.metadata_checks import check_metadata

METADATA_KEY = "zarr.json"

Act = Callable[[Path], object]
Change = Callable[[dict[str, Any]], object]
Copies = Literal["own", "root", "both"]


@dataclass(frozen=True)
class Damage:
    """One way to damage a run.

    Attributes
    ----------
    name : str
        With its kind, before a colon.
    act : callable
        Given the run.
    told : str
        Pattern of what `verify` says.
    kept : int or None
        Rows, of 11, that a `repair` keeps; None if it can do nothing.
    misled : tuple of {'plain', 'ours'}
        Readers, plain `xr.open_zarr` or `open_run`, that give other numbers then, because nothing
        that they read says so. The others raise, or give the right numbers.
    """

    name: str
    act: Act
    told: str = ""
    kept: int | None = 11
    misled: tuple[str, ...] = ()


# Files.


def write(path: Path, data: bytes) -> None:
    """Replace a file, which others may share by a hard link."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    write(path, data)


def cut(path: Path, size: int) -> None:
    """Cut a file short; a negative size counts from its end."""
    write(path, path.read_bytes()[:size])


def edit(path: Path, change: Change) -> None:
    """Change a JSON document."""
    metadata = json.loads(path.read_bytes())
    change(metadata)
    write(path, json.dumps(metadata, indent=1).encode())


def put(metadata: Any, place: str, value: Any) -> None:
    """Set a member of a metadata file, remove it with ``...``, or change it by a function."""
    *way, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    for part in way:
        metadata = metadata[part]
    if value is ...:
        del metadata[last]
    else:
        metadata[last] = value(metadata[last]) if callable(value) else value


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def times(folder: Path) -> dict[Path, int]:
    """When a folder, and each file and folder below, was changed last."""
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def arrays_of(root: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the arrays in the root."""
    found: dict[str, Any] = root["consolidated_metadata"]["metadata"]
    return found


# What makes damage.


def all_of(*acts: Act) -> Act:
    return lambda run: [act(run) for act in acts]


def lost(key: str) -> Act:
    """A file or a folder goes."""
    return lambda run: shutil.rmtree(run / key) if (run / key).is_dir() else (run / key).unlink()


def changed(key: str, change: Callable[[bytes], bytes]) -> Act:
    return lambda run: write(run / key, change((run / key).read_bytes()))


def flipped(key: str, bit: int) -> Act:
    return lambda run: flip(run / key, bit)


def copied(key: str, to: str) -> Act:
    return lambda run: write(run / to, (run / key).read_bytes())


def swapped(one: str, other: str) -> Act:
    def act(run: Path) -> None:
        first, second = (run / one).read_bytes(), (run / other).read_bytes()
        write(run / one, second)
        write(run / other, first)

    return act


def taken(source: str, *patterns: str) -> Act:
    """Files of a run beside this one."""

    def act(run: Path) -> None:
        other = run.with_name(source)
        for path in (path for pattern in patterns for path in other.glob(pattern)):
            write(run / path.relative_to(other), path.read_bytes())

    return act


def root(place: str, value: Any) -> Act:
    """A member of the root; its copies stay as they are."""
    return lambda run: edit(run / METADATA_KEY, lambda metadata: put(metadata, place, value))


def member(array: str, place: str, value: Any, copies: Copies = "both") -> Act:
    """A member of an array's own metadata file, of its copy in the root, or of both."""

    def act(run: Path) -> None:
        if copies != "root":
            edit(run / array / METADATA_KEY, lambda metadata: put(metadata, place, value))
        if copies != "own":
            root(f"consolidated_metadata.metadata.{array}.{place}", value)(run)

    return act


def attribute(name: str, value: Any) -> Act:
    """An attribute of the root, also where `step` has a copy of it."""

    def in_copy(text: str) -> str:
        copy = json.loads(text)
        if value is not ... or name in copy:
            put(copy, name, value)
        return json.dumps(copy)

    return all_of(
        root(f"attributes.{name}", value), member("step", "attributes.root_attributes", in_copy)
    )


def codec(array: str, name: str, value: Any) -> Act:
    """A setting of the one codec of an array."""
    return member(array, f"codecs.0.configuration.{name}", value)


def with_zarr(name: str, where: Any, values: Any) -> Act:
    """Write values with zarr itself: every checksum fits, the metadata files stay."""

    def act(run: Path) -> None:
        for path in (path for path in (run / name).iterdir() if path.is_file()):
            write(path, path.read_bytes())
        zarr.open_array(run / name, mode="r+")[where] = values

    return act


# Shards.


def shard_index(run: Path, name: str, block: int) -> tuple[Path, list[tuple[int, int]]]:
    """File of a shard, and offset and length of its chunks."""
    stored = check_metadata(run).stored(name)
    path = run / name / ".".join(["c", str(block), *["0"] * (stored.ndim - 1)])
    with stored.opened(block, 0) as shard:
        index = shard.tail.index
    return path, [(int(offset), int(length)) for offset, length in index]


def in_chunk(name: str, block: int, number: int) -> Act:
    """A bit of a chunk is flipped."""

    def act(run: Path) -> None:
        path, index = shard_index(run, name, block)
        offset, length = index[number]
        flip(path, 8 * (offset + length // 2))

    return act


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
    write(run / stored.key(block, 0), chunks + tail)


def taken_apart(data: bytes) -> tuple[list[bytes], BlockLabel]:
    """The two chunks and the label of an object."""
    index = np.frombuffer(data[-36:-4], "<u8").reshape(-1, 2).tolist()
    label = BlockLabel.unpack(data[-36 - LABEL : -36], data[-36:-4])
    return [data[at : at + length] for at, length in index], label


def put_together(pieces: list[bytes], label: BlockLabel | None) -> bytes:
    """An object of these chunks, with this label or none; its checksums fit."""
    ends = np.cumsum([0, *map(len, pieces)])
    entries = [(int(at), len(piece)) for at, piece in zip(ends, pieces, strict=False)]
    packed = np.array(entries, "<u8").tobytes()
    tail = b"" if label is None else label.pack(packed)
    return b"".join(pieces) + tail + packed + checksum(packed)


def relabeled(data: bytes) -> bytes:
    """The label of an object says that it is block 1."""
    pieces, label = taken_apart(data)
    return put_together(pieces, replace(label, block=1))


def index_swapped(data: bytes) -> bytes:
    """The two inner chunks change places; the label and its checksum stay as they were."""
    body, index = data[:-36], data[-36:-4]
    return body + index[16:] + index[:16] + checksum(index[16:] + index[:16])


# Runs to damage.

ROWS, TOKENS, HIDDEN, BLOCK = 10, 10, 3, 4


@contextmanager
def block_plan(**limits: Any) -> Iterator[None]:
    """Runs that are created meanwhile have blocks of other sizes, to be small and divided."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(f"trajstore.store.metadata.block_plan.{name}", value)
        yield


def _created(
    path: Path, token: np.ndarray, *, variables: Any, config: Any, seed: int = 0, **sizes: Any
) -> RunWriter:
    """A new run in blocks of 4 rows; chunks and parts have these sizes."""
    place = np.arange(len(token)) + seed
    with block_plan(**sizes):
        return RunWriter.create(
            path,
            token=token,
            hidden=HIDDEN,
            variables=variables,
            is_dead=place % 3 == 0,
            token_count=place % 3 * 5,
            token_text=[f"«{number}»" for number in place],
            config=config,
            block_rows=BLOCK,
            fsync=False,
        )


def wide_run(path: Path, rows: int = 11) -> Path:
    """A run of several chunks a shard, as training makes it."""
    rng, tokens = np.random.default_rng(7), 300
    types = {"W": "bfloat16", "grad": "float16", "exp_avg": "float32", "loss": "float32"}
    config = {"why": "a test", "lr": 1.5e-05}
    writer = _created(path, np.arange(tokens), variables=types, config=config, _CHUNK=1 << 10)
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


def divided_run(path: Path, *, large: bool) -> np.ndarray:
    """A run of W in three blocks of three objects, each of several chunks; its bits.

    If `large`, it is stored as large rows are: in two chunks along step, and token by token.
    """
    bits = random_bits((11, 300, 3), 21)
    sizes = {"_LARGEST_OBJECT": 5 << 10, "_CHUNK": 2 << 10, "_CHUNK_OF_HISTORIES": 1 << 10}
    as_large = {"_SMALL_ROW": 0} if large else {}
    with block_plan(**sizes, **as_large, _FEWEST_TOKENS=8, _ROWS_OF_A_SNAPSHOT=(2,)):
        recorded(path, bits)
    return bits


def recorded(path: Path, bits: np.ndarray) -> Path:
    """A run of these bits, in blocks of 4 rows."""
    with RunWriter.create(
        path,
        token=np.arange(bits.shape[1]),
        hidden=bits.shape[2],
        variables={"W": "bfloat16"},
        block_rows=4,
        fsync=False,
    ) as run:
        for row in range(len(bits)):
            run.append(step=row, W=bits[row])
    return path


TYPES = {"W": "bfloat16", "grad": "bfloat16", "loss": "float32"}
COORDINATES = ("token", "is_dead", "token_count", "token_text")
RUNS = ("run.zarr", "shorter.zarr", "before.zarr", "other.zarr")


def write_runs(folder: Path) -> Path:
    """The run that is tampered with; beside it are those that other objects come from.

    It is complete, with 10 rows in blocks of 4, W and grad in two parts of two inner chunks each.
    ``shorter.zarr`` is the same run when it was complete with 9 rows; ``before.zarr``, before its
    rows from the fourth on were recorded again, with other values; ``other.zarr``, another run.
    """
    run, shorter, before, other = (folder / name for name in RUNS)
    _record(run, seed=1)
    shutil.copytree(run, before)
    with RunWriter.resume(run, rows=4) as writer:
        _append(writer, range(4, 9), seed=2)
    shutil.copytree(run, shorter)
    with RunWriter.resume(run) as writer:
        _append(writer, range(9, 10), seed=3)
    _record(other, seed=5)
    return run


def _record(path: Path, seed: int) -> None:
    sizes = {"_FEWEST_TOKENS": 3, "_LARGEST_OBJECT": BLOCK * HIDDEN * 4 * 6, "_CHUNK": 150}
    token, config = np.arange(TOKENS) * 7 + seed, {"seed": seed}
    with _created(path, token, variables=TYPES, config=config, seed=seed, **sizes) as writer:
        _append(writer, range(ROWS), seed)


def _append(writer: RunWriter, rows: Iterable[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for row in rows:
        for name, place in writer.next_row().items():
            # Finite numbers, a zero among them.
            bits = rng.integers(1, 1 << 14, place.shape)
            place[...] = bits << 16 if name == "loss" else bits
            if place.size > 1:
                place.flat[0] = 0
        writer.commit_row(row * 2)


def key(name: str, block: int, part: int = 0) -> str:
    return f"{name}/c.{block}" + f".{part}.0" * (name in ("W", "grad"))


_ENTRIES = "consolidated_metadata.metadata"


def _renamed(metadata: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in metadata.items()}


def named(place: str, value: Any) -> str:
    return f"{place} is missing" if value is ... else place


# Copies of the metadata of `wide_run`: `verify` names the damaged one, `repair` restores it.

_OF_W: tuple[tuple[str, Any, str], ...] = (
    ("attributes.units", "furlong", "attributes.units"),
    ("shape.0", 10, "shape.0|10 along step"),
    ("attributes.native_dtype", "float32", "native_dtype"),
    ("shape.1", 299, "shape.1|299 along token"),
    ("codecs.0.name", "sharding", "codecs|in its own way"),
    ("fill_value", ..., "fill_value"),
)
_OF_THE_ROOT: tuple[tuple[str, Any, str], ...] = (
    ("attributes.committed_rows", 10, "committed_rows is 10, expected 11, the rows of its arrays"),
    ("attributes.updated", "2026-01-01 00:00:00", "updated"),
    ("attributes.updated", ..., "updated is missing"),
    ("attributes.created", "2020-01-01T00:00:00+00:00", "created differs from its copy"),
    ("attributes.config.why", "a tess", "config.why"),
    ("attributes.config", ..., "attribute config differs"),
    ("attributes.trajstore_format", 9, "trajstore_format"),
    ("attributes.segments", [{"step": 0, "config": {}}], "segments is missing in its copy"),
    ("attributes.notes", [{"note": "x"}], "notes"),
    ("attributes", lambda old: _renamed(old, "created", "creatdd"), "creatdd"),
    (_ENTRIES, lambda old: _renamed(old, "W", "V"), "V: .*no variable"),
    (f"{_ENTRIES}.grad", ..., "grad: its copy in the root"),
    (f"{_ENTRIES}.step.attributes.root_attributes", "{}", "its copy"),
    *((f"{_ENTRIES}.W.{place}", value, told) for place, value, told in _OF_W),
)
COPIES = (
    Damage("root: missing", lost(METADATA_KEY), "it is missing"),
    Damage("root: cut", changed(METADATA_KEY, lambda data: data[:500]), "not the JSON document"),
    Damage("own: step is missing", lost("step/zarr.json"), "it is missing"),
    Damage("own: token is missing", lost("token/zarr.json"), "it is missing"),
    *(Damage(f"root: {named(at, v)}", root(at, v), told) for at, v, told in _OF_THE_ROOT),
    *(Damage(f"own: {named(at, v)}", member("W", at, v, "own"), told) for at, v, told in _OF_W),
)


# Values of `wide_run`, of which there is one copy.

_TEXTS = "token_text/c.0"
_LOST = "its values are missing"
VALUES = (
    Damage("chunk: W", in_chunk("W", 1, 0), "^W, block 1, bytes 0 to .*checksum", 4),
    Damage("chunk: step", in_chunk("step", 1, 0), "^step, block 1, bytes 0 to .*checksum", 4),
    Damage("object: missing", lost("grad/c.2.0.0"), "^grad, block 2: the shard is missing", 8),
    Damage(
        "object: empty", changed("grad/c.2.0.0", lambda data: b""), "^grad.* 0 to 0: .*index", 8
    ),
    Damage("object: no end", changed("W/c.2.0.0", lambda data: data[:-1]), "^W, .*index", 8),
    Damage("coordinate: a bit", flipped(_TEXTS, 140), "^token_text, block 0, .*checksum", None),
    Damage("coordinate: no end", changed(_TEXTS, lambda data: data[:-3]), "^token_text", None),
    Damage("coordinate: empty", changed(_TEXTS, lambda data: b""), "^token_text, block 0", None),
    Damage("coordinate: missing", lost(_TEXTS), f"^token_text: {_LOST}", None),
    Damage("coordinate: a token twice", with_zarr("token", 5, 4), "1 of 300 ids occur", None),
    Damage("coordinate: is_dead", with_zarr("is_dead", 4, True), "^is_dead: .*position 4", None),
    Damage("values: steps", with_zarr("step", 8, 7), "row 8 is step 7 after step 7; .*must", None),
)


# Tampering, with the runs of `write_runs`: no damage by accident is like these. `verify` notices
# all of them. Members of metadata files that differ from their copy are above.

BOTH = ("plain", "ours")


def _added(**attributes: Any) -> Act:
    return member("W", "attributes", lambda old: old | attributes)


def own_metadata_in_root(run: Path) -> None:
    """The root's copy of the metadata of W becomes its own metadata file."""
    root(f"{_ENTRIES}.W", json.loads((run / "W" / METADATA_KEY).read_bytes()))(run)


_W0, _W1 = key("W", 0), key("W", 1)
_BLOCKS = [f"{name}/c.*" for name in ("step", *TYPES)]


def forged_chunks(run: Path) -> None:
    """Inner chunks of another block, and the label of this one."""
    (chunks, _), (_, label) = (taken_apart((run / name).read_bytes()) for name in (_W0, _W1))
    write(run / _W1, put_together(chunks, label))


TAMPERINGS = (
    Damage("swapped: two blocks of W", swapped(_W0, _W1)),
    Damage("swapped: two parts of a block", swapped(_W1, key("W", 1, 1))),
    Damage("swapped: a block of W and of grad", swapped(_W1, key("grad", 1))),
    Damage("of another run: all blocks", taken("other.zarr", *_BLOCKS)),
    Damage(
        "of another run: W with both metadata files",
        all_of(taken("other.zarr", "W/zarr.json", "W/c.*"), own_metadata_in_root),
        misled=("plain",),
    ),
    Damage(
        "of another run: all coordinates",
        taken("other.zarr", *(f"{name}/c.0" for name in COORDINATES)),
        misled=BOTH,
    ),
    Damage("brought back: the shorter last block", taken("shorter.zarr", "*/c.2*")),
    Damage(
        "brought back: a block of all arrays that was recorded again",
        taken("before.zarr", "*/c.1*"),
        misled=BOTH,
    ),
    Damage(
        "missing: an array, also from the root", all_of(lost("grad"), root(f"{_ENTRIES}.grad", ...))
    ),
    Damage(
        "forged: without its label",
        changed(_W1, lambda data: put_together(taken_apart(data)[0], None)),
    ),
    Damage("forged: inner chunks swapped in the index", changed(_W1, index_swapped)),
    Damage(
        "forged: another block, its label changed",
        all_of(copied(_W0, _W1), changed(_W1, relabeled)),
        misled=BOTH,
    ),
    Damage("forged: inner chunks of another block, the label kept", forged_chunks, misled=BOTH),
    Damage("forged: numbers written with zarr", with_zarr("W", slice(4), 1), misled=BOTH),
    Damage("added: coordinates of W", _added(coordinates="grad")),
    Damage("added: scale_factor of W", _added(scale_factor=2.0), misled=("plain",)),
    Damage("otherwise: other inner chunks", codec("W", "chunk_shape", [2, 6, HIDDEN])),
    Damage(
        "otherwise: float16 for bfloat16, also as attribute",
        all_of(codec("W", "native_dtype", "float16"), _added(native_dtype="float16")),
    ),
    Damage("root, and its copy: config", attribute("config", {"seed": 5})),
    Damage(
        "root, and its copy: no digests",
        all_of(root("attributes.content_digest", ...), root("attributes.fingerprint", ...)),
    ),
    Damage(
        "tokens: in another order",
        with_zarr("token", ..., np.arange(TOKENS)[::-1] * 7 + 1),
        misled=BOTH,
    ),
)
