"""Ways to tamper with a run, each with what reading does then; no damage by accident is like these.

An object is swapped, brought back or forged so that its checksums fit; a metadata file is edited in
each place that holds what it says. `verify` notices all of them. Each case says what readers do:
``safe``, they raise or give the right numbers; ``wrong``, they give other numbers, because nothing
that they read says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from trajstore import RunWriter
from trajstore.codec.block import LABEL, BlockLabel, digest_of
from trajstore.codec.chunk import checksum

ROWS, TOKENS, HIDDEN, BLOCK = 10, 10, 3, 4
TYPES = {"W": "bfloat16", "grad": "bfloat16", "loss": "float32"}
SERIES = ("step", *TYPES)
READERS = ("plain", "ours")


@dataclass(frozen=True, kw_only=True)
class World:
    """Runs of one shape: the one that is tampered with, and where other objects come from.

    Attributes
    ----------
    run : Path
        Complete, with 10 rows in blocks of 4, W and grad in two parts of two inner chunks each.
    shorter : Path
        The same run when it was complete with 9 rows.
    before : Path
        The same run before its rows from the fourth on were recorded again, with other values.
    other : Path
        Another run.
    """

    run: Path
    shorter: Path
    before: Path
    other: Path


@dataclass(frozen=True, kw_only=True)
class Tampering:
    """One way to tamper.

    Attributes
    ----------
    kind, name : str
    act : callable
        Given the run and the world.
    plain, ours : {'safe', 'wrong'}
        What plain `xr.open_zarr`, and `open_run`, do then.
    """

    kind: str
    name: str
    act: Callable[[Path, World], None]
    plain: str = "safe"
    ours: str = "safe"

    def misleads(self, reader: str) -> bool:
        """Whether a reader gives other numbers than were recorded."""
        return {"plain": self.plain, "ours": self.ours}[reader] == "wrong"


def make_world(folder: Path) -> World:
    """Record the runs."""
    world = World(
        run=folder / "run.zarr",
        shorter=folder / "shorter.zarr",
        before=folder / "before.zarr",
        other=folder / "other.zarr",
    )
    _record(world.run, seed=1)
    shutil.copytree(world.run, world.before)
    with RunWriter.resume(world.run, rows=4) as writer:
        _append(writer, range(4, 9), seed=2)
    shutil.copytree(world.run, world.shorter)
    with RunWriter.resume(world.run) as writer:
        _append(writer, range(9, 10), seed=3)
    _record(world.other, seed=5)
    return world


def _record(path: Path, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small = {"_FEWEST_TOKENS": 3, "_LARGEST_OBJECT": BLOCK * HIDDEN * 4 * 6, "_CHUNK": 150}
        for name, value in small.items():
            patch.setattr(f"trajstore.store.metadata.block_plan.{name}", value)
        writer = RunWriter.create(
            path,
            token=np.arange(TOKENS) * 7 + seed,
            hidden=HIDDEN,
            variables=TYPES,
            is_dead=(np.arange(TOKENS) + seed) % 3 == 0,
            token_count=(np.arange(TOKENS) + seed) % 3 * 5,
            token_text=[f"«{number + seed}»" for number in range(TOKENS)],
            config={"seed": seed},
            block_rows=BLOCK,
        )
    with writer:
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


# What is done to objects.


def put(path: Path, data: bytes) -> None:
    """Replace a file, which others share by a hard link."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def key(name: str, block: int, part: int = 0) -> str:
    return f"{name}/" + ".".join(["c", str(block), *([str(part), "0"] if name in "W grad" else [])])


def parts(name: str) -> range:
    return range(2 if name in ("W", "grad") else 1)


def objects(names: Iterable[str] = SERIES, blocks: Iterable[int] = range(3)) -> list[str]:
    return [key(name, block, part) for block in blocks for name in names for part in parts(name)]


def swap(run: Path, *pairs: tuple[str, str]) -> None:
    for one, other in pairs:
        first, second = (run / one).read_bytes(), (run / other).read_bytes()
        put(run / one, second)
        put(run / other, first)


def take(run: Path, source: Path, keys: Iterable[str]) -> None:
    for item in keys:
        put(run / item, (source / item).read_bytes())


def change(run: Path, item: str, changed: Callable[[bytes], bytes]) -> None:
    put(run / item, changed((run / item).read_bytes()))


def layout(name: str) -> int:
    """Bytes of the index of an object, with its checksum."""
    return 16 * (2 if name in ("W", "grad") else 1) + 4


def taken_apart(name: str, data: bytes) -> tuple[list[bytes], BlockLabel]:
    size = layout(name)
    index = np.frombuffer(data[-size:-4], "<u8").reshape(-1, 2).tolist()
    label = BlockLabel.unpack(data[-size - LABEL : -size], data[-size:-4])
    return [data[at : at + length] for at, length in index], label


def put_together(
    pieces: list[bytes], label: BlockLabel | None, *, own_digest: bool = True
) -> bytes:
    """An object whose checksums fit; its label says what is there, or what it did before."""
    ends = np.cumsum([0, *map(len, pieces)])
    entries = [(int(at), len(piece)) for at, piece in zip(ends, pieces, strict=False)]
    packed = np.array(entries, "<u8").tobytes()
    if label is not None and own_digest:
        digest = digest_of(hashlib.sha256(piece).digest() for piece in pieces)
        label = replace(label, digest=digest)
    tail = b"" if label is None else label.pack(packed)
    return b"".join(pieces) + tail + packed + checksum(packed)


def forged(name: str, data: bytes, **fields: Any) -> bytes:
    pieces, label = taken_apart(name, data)
    return put_together(pieces, replace(label, **fields))


def unlabelled(name: str, data: bytes) -> bytes:
    return put_together(taken_apart(name, data)[0], None)


def index_swapped(data: bytes) -> bytes:
    """The two inner chunks change places, the label and its checksum stay as they were."""
    body, index = data[: -layout("W")], data[-layout("W") : -4]
    return body + index[16:] + index[:16] + checksum(index[16:] + index[:16])


def write_with_zarr(run: Path, world: World) -> None:
    for item in ("W/zarr.json", *objects(["W"])):
        put(run / item, (run / item).read_bytes())
    zarr.open_array(run / "W", mode="r+")[0:4] = np.ones((4, TOKENS, HIDDEN), "float32")


# What is done to metadata files.


def edit(path: Path, changed: Callable[[dict[str, Any]], Any]) -> None:
    metadata = json.loads(path.read_bytes())
    changed(metadata)
    put(path, json.dumps(metadata, indent=1).encode())


def edit_own(run: Path, name: str, changed: Callable[[dict[str, Any]], Any]) -> None:
    edit(run / name / "zarr.json", changed)


def edit_copy(run: Path, name: str, changed: Callable[[dict[str, Any]], Any]) -> None:
    edit(run / "zarr.json", lambda root: changed(root["consolidated_metadata"]["metadata"][name]))


def edit_array(run: Path, name: str, changed: Callable[[dict[str, Any]], Any]) -> None:
    """An array's own metadata file, and its copy in the root."""
    edit_own(run, name, changed)
    edit_copy(run, name, changed)


def edit_root(run: Path, changed: Callable[[dict[str, Any]], Any]) -> None:
    """Attributes of the root, and their copy in both metadata files of `step`."""

    def in_step(metadata: dict[str, Any]) -> None:
        copy = json.loads(metadata["attributes"]["root_attributes"])
        changed(copy)
        metadata["attributes"]["root_attributes"] = json.dumps(copy)

    edit(run / "zarr.json", lambda root: changed(root["attributes"]))
    edit_array(run, "step", in_step)


def codec(metadata: dict[str, Any]) -> dict[str, Any]:
    """Configuration of the one codec."""
    found: dict[str, Any] = metadata["codecs"][0]["configuration"]
    return found


def everywhere(run: Path, changed: Callable[[dict[str, Any]], Any]) -> None:
    """The root's attributes with their copy, and the codecs of all arrays."""
    edit_root(run, changed)
    for name in SERIES:
        edit_array(run, name, lambda metadata: changed(codec(metadata)))


def whole_array(run: Path, source: Path, name: str, to: str) -> None:
    """Folder and entry in the root of an array, from another place."""
    root = json.loads((source / "zarr.json").read_bytes())
    metadata = root["consolidated_metadata"]["metadata"][name]
    shutil.rmtree(run / to, ignore_errors=True)
    shutil.copytree(source / name, run / to, copy_function=os.link)
    edit(run / "zarr.json", lambda d: d["consolidated_metadata"]["metadata"].update({to: metadata}))


def exchange_arrays(run: Path, world: World, *, rename: bool = False) -> None:
    """W under the name of grad, and the other way round."""
    (run / "W").rename(run / "x")
    (run / "grad").rename(run / "W")
    (run / "x").rename(run / "grad")

    def exchanged(root: dict[str, Any]) -> None:
        arrays = root["consolidated_metadata"]["metadata"]
        arrays["W"], arrays["grad"] = arrays["grad"], arrays["W"]

    edit(run / "zarr.json", exchanged)
    if rename:
        for name in ("W", "grad"):
            edit_array(run, name, lambda metadata, name=name: codec(metadata).update(array=name))


def drop_array(run: Path, world: World) -> None:
    shutil.rmtree(run / "grad")
    edit(run / "zarr.json", lambda root: root["consolidated_metadata"]["metadata"].pop("grad"))


def forget_format(run: Path, world: World) -> None:
    """All that makes it a run of the format goes from the metadata files."""

    def changed(attributes: dict[str, Any]) -> None:
        attributes["trajstore_format"] = 1
        for name in ("runs", "content_digest", "fingerprint"):
            attributes.pop(name, None)

    edit_root(run, changed)


def add_attributes(name: str, **attributes: Any) -> Callable[[Path, World], None]:
    return lambda run, world: edit_array(
        run, name, lambda metadata: metadata["attributes"].update(attributes)
    )


def set_member(name: str, **members: Any) -> Callable[[Path, World], None]:
    return lambda run, world: edit_array(run, name, lambda metadata: metadata.update(members))


def set_codec(name: str, **members: Any) -> Callable[[Path, World], None]:
    return lambda run, world: edit_array(run, name, lambda d: codec(d).update(members))


def set_grid(name: str, *shape: int) -> Callable[[Path, World], None]:
    return lambda run, world: edit_array(
        run, name, lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=list(shape))
    )


def reshape(run: Path, world: World) -> None:
    """Fewer tokens, each with more hidden units, of as many bytes."""

    def changed(metadata: dict[str, Any]) -> None:
        metadata["shape"] = [ROWS, 5, 6]
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = [4, 3, 6]

    edit_array(run, "W", changed)


def fewer_rows(run: Path, world: World) -> None:
    for name in SERIES:
        edit_array(run, name, lambda d: d.update(shape=[7, *d["shape"][1:]]))
    edit(run / "zarr.json", lambda root: root["attributes"].update(committed_rows=7))


def other_token(run: Path, values: np.ndarray) -> None:
    put(run / "token" / "c.0", (run / "token" / "c.0").read_bytes())
    zarr.open_array(run / "token", mode="r+")[...] = values


def all_metadata(run: Path, source: Path) -> None:
    take(run, source, ["zarr.json", *(f"{path.name}/zarr.json" for path in run.iterdir()
                                      if path.is_dir())])  # fmt: skip


def digests_of(run: Path, source: Path, *names: str) -> None:
    found = json.loads((source / "zarr.json").read_bytes())["attributes"]
    edit(run / "zarr.json", lambda d: d["attributes"].update({n: found[n] for n in names}))


W0, W1, W2 = key("W", 0), key("W", 1), key("W", 2)
_Act = Callable[[Path, World], None]


def _cases() -> Iterable[Tampering]:
    def case(name: str, act: _Act, plain: str = "safe", ours: str = "safe") -> Tampering:
        return Tampering(kind=kind, name=name, act=act, plain=plain, ours=ours)

    kind = "swapped"
    pairs = list(zip(objects(blocks=[0]), objects(blocks=[1]), strict=True))
    yield case("two blocks of W", lambda r, w: swap(r, (W0, W1)))
    yield case("two parts of a block", lambda r, w: swap(r, (W1, key("W", 1, 1))))
    yield case("a block of W and of grad", lambda r, w: swap(r, (W1, key("grad", 1))))
    yield case(
        "the folders of W and grad, and their metadata files in the root",
        exchange_arrays,
    )
    yield case(
        "the folders of W and grad, each with its metadata files under its new name",
        lambda r, w: exchange_arrays(r, w, rename=True),
    )

    kind = "duplicated"
    yield case("a block of W", lambda r, w: change(r, W1, lambda d: (r / W0).read_bytes()))
    yield case(
        "a block of all arrays",
        lambda r, w: [change(r, b, lambda d, a=a: (r / a).read_bytes()) for a, b in pairs],
    )

    kind = "of another run"
    yield case("all blocks", lambda r, w: take(r, w.other, objects()))
    yield case("W with its own metadata file",
               lambda r, w: take(r, w.other, ["W/zarr.json", *objects(["W"])]))  # fmt: skip
    yield case("W with both metadata files", lambda r, w: whole_array(r, w.other, "W", "W"),
               "wrong")  # fmt: skip
    yield case("the root", lambda r, w: take(r, w.other, ["zarr.json"]))
    yield case("all metadata files", lambda r, w: all_metadata(r, w.other))
    yield case("the metadata file of step", lambda r, w: take(r, w.other, ["step/zarr.json"]))
    yield case(
        "all coordinates",
        lambda r, w: take(
            r, w.other, [f"{n}/c.0" for n in ("token", "is_dead", "token_count", "token_text")]
        ),
        "wrong",
        "wrong",
    )

    kind = "brought back"
    last = objects(blocks=[2])
    yield case("the shorter last block", lambda r, w: take(r, w.shorter, last))
    yield case("all metadata files of 9 rows", lambda r, w: all_metadata(r, w.shorter))
    yield case("all of 9 rows but the root", lambda r, w: [take(r, w.shorter, last), take(
        r, w.shorter, [f"{name}/zarr.json" for name in SERIES])])  # fmt: skip
    yield case("the fingerprint", lambda r, w: digests_of(r, w.shorter, "fingerprint"))
    yield case("a block of all arrays that was recorded again",
               lambda r, w: take(r, w.before, objects(blocks=[1])), "wrong", "wrong")  # fmt: skip
    yield case("the root of before they were recorded again",
               lambda r, w: take(r, w.before, ["zarr.json"]))  # fmt: skip

    kind = "missing or cut"
    yield case("an object", lambda r, w: (r / W1).unlink())
    yield case("the folder of W", lambda r, w: shutil.rmtree(r / "W"))
    yield case("an array, also from the root", drop_array)
    yield case("an array, from the root only", lambda r, w: edit(
        r / "zarr.json", lambda d: d["consolidated_metadata"]["metadata"].pop("grad")))  # fmt: skip
    yield case("the last byte", lambda r, w: change(r, W1, lambda d: d[:-1]))
    yield case("nothing: a byte more", lambda r, w: change(r, W1, lambda d: d + b"\0"))
    yield case("a coordinate", lambda r, w: (r / "is_dead" / "c.0").unlink(), "wrong")
    yield case("the metadata file of W", lambda r, w: (r / "W" / "zarr.json").unlink())
    yield case("the root", lambda r, w: (r / "zarr.json").unlink())
    yield case("the root's list of arrays", lambda r, w: edit(
        r / "zarr.json", lambda d: d.pop("consolidated_metadata")))  # fmt: skip

    kind = "forged"
    yield case(
        "an object without its label", lambda r, w: change(r, W1, lambda d: unlabelled("W", d))
    )
    yield case("another block, its label changed", lambda r, w: change(
        r, W1, lambda d: forged("W", (r / W0).read_bytes(), block=1)),
        "wrong", "wrong")  # fmt: skip
    yield case("the rows of all last blocks", lambda r, w: [change(
        r, k, lambda d, k=k: forged(k.partition("/")[0], d, rows=4)) for k in last])  # fmt: skip
    yield case("inner chunks of another block, the label kept", lambda r, w: change(
        r, W1, lambda d: put_together(taken_apart("W", (r / W0).read_bytes())[0],
                                      taken_apart("W", d)[1], own_digest=False)),
        "wrong", "wrong")  # fmt: skip
    yield case("inner chunks swapped in the index", lambda r, w: change(r, W1, index_swapped))
    yield case("inner chunks swapped, label and index anew", lambda r, w: change(
        r, W1, lambda d: put_together(taken_apart("W", d)[0][::-1], taken_apart("W", d)[1])),
        "wrong", "wrong")  # fmt: skip
    yield case("numbers written with zarr", write_with_zarr, "wrong", "wrong")

    kind = "attributes added"
    added: dict[str, dict[str, Any]] = {
        "scale_factor": {"scale_factor": 2.0},
        "_FillValue": {"_FillValue": base64.b64encode(struct.pack("<d", 0.0)).decode()},
        "_Unsigned": {"_Unsigned": "true"},
        "units of time": {"units": "days since 2000-01-01"},
        "dtype": {"dtype": "bool"},
    }
    for name, attributes in added.items():
        plain = "safe" if name == "_Unsigned" else "wrong"
        yield case(f"{name} of W", add_attributes("W", **attributes), plain)
    yield case("scale_factor of step", add_attributes("step", scale_factor=2), "wrong")
    yield case("coordinates of W", add_attributes("W", coordinates="grad"))
    yield case("another native_dtype", add_attributes("W", native_dtype="float16"))
    yield case("scale_factor in the root's copy", lambda r, w: edit_copy(
        r, "W", lambda d: d["attributes"].update(scale_factor=2.0)), "wrong")  # fmt: skip
    yield case("scale_factor in W's own metadata file", lambda r, w: edit_own(
        r, "W", lambda d: d["attributes"].update(scale_factor=2.0)))  # fmt: skip

    kind = "arrays described otherwise"
    yield case("int32 for float32", set_member("W", data_type="int32", fill_value=0))
    yield case("more tokens", set_member("W", shape=[ROWS, 12, HIDDEN]))
    yield case("fewer rows", set_member("W", shape=[8, TOKENS, HIDDEN]))
    yield case("fewer rows in all arrays", fewer_rows)
    yield case("other tokens and hidden, as many bytes", reshape)
    yield case("other parts", set_grid("W", 4, 3, HIDDEN))
    yield case("other inner chunks", set_codec("W", chunk_shape=[2, 6, HIDDEN]))
    yield case(
        "token and hidden exchanged", set_member("W", dimension_names=["step", "hidden", "token"])
    )
    yield case("a dimension renamed", set_member("W", dimension_names=["step", "token", "head"]),
               "wrong")  # fmt: skip
    yield case("a fill value of 0", set_member("W", fill_value=0.0))
    yield case("the shuffle", set_codec("W", shuffle="shuffle"))
    yield case("float16 for bfloat16, also as attribute", lambda r, w: [
        set_codec("W", native_dtype="float16")(r, w),
        add_attributes("W", native_dtype="float16")(r, w)])  # fmt: skip
    yield case("no differences", set_codec("W", kind="plain", native_dtype="float32"))
    yield case("the name of the array", set_codec("W", array="grad"))
    yield case("blocks without labels, and swapped", lambda r, w: [
        set_codec("W", runs=None)(r, w), swap(r, (W0, W1))])  # fmt: skip
    yield case("another run", set_codec("W", runs=[[0, "0" * 32]]))
    yield case("one run more", lambda r, w: edit_array(
        r, "W", lambda d: codec(d)["runs"].insert(0, [0, "0" * 32])))  # fmt: skip
    yield case("a configuration that nobody knows", set_codec("W", more=1))

    kind = "the root, and its copy"
    yield case("config", lambda r, w: edit_root(r, lambda a: a.update(config={"seed": 5})))
    yield case("runs", lambda r, w: edit_root(r, lambda a: a.update(runs=[[0, "0" * 32]])))
    yield case("runs, and in all codecs", lambda r, w: everywhere(
        r, lambda a: a.update(runs=[[0, "0" * 32]])))  # fmt: skip
    yield case("another format", lambda r, w: edit_root(r, lambda a: a.update(trajstore_format=1)))
    yield case("another format, and blocks swapped", lambda r, w: [
        forget_format(r, w), swap(r, (W0, W1))])  # fmt: skip
    yield case("committed_rows", lambda r, w: edit(
        r / "zarr.json", lambda d: d["attributes"].update(committed_rows=9)))  # fmt: skip
    yield case("no digests", lambda r, w: edit(r / "zarr.json", lambda d: [
        d["attributes"].pop(n) for n in ("content_digest", "fingerprint")]))  # fmt: skip

    kind = "coordinates"
    yield case("tokens in another order", lambda r, w: other_token(
        r, np.arange(TOKENS)[::-1] * 7 + 1), "wrong", "wrong")  # fmt: skip
    yield case("another length", set_member("token", shape=[8]))
    yield case(
        "a token twice", lambda r, w: other_token(r, np.zeros(TOKENS, "i4")), "wrong", "wrong"
    )


TAMPERINGS = tuple(_cases())
