"""Metadata files of a run, damaged at random: wrong types, missing members, broken texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

METADATA_KEY = "zarr.json"

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1.5, 1e300, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30, "",
    "x", "0", "NaN", "W", "a/b", "..", "\x00", "\ud800", "é" * 300, "days since 2000-01-01",
)  # fmt: skip
COLLECTIONS: tuple[Callable[[], Any], ...] = (
    list, dict, lambda: [None], lambda: [[]], lambda: [-1], lambda: [1 << 40], lambda: {"a": 1},
    lambda: {"name": "x"}, lambda: {"name": None, "configuration": []}, lambda: [0, 1, 2, 3],
)  # fmt: skip


def other_value(value: Any, rng: random.Random) -> Any:
    """Something in the place of a value."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(COLLECTIONS)()
    if kind == 1:
        return rng.choice(([value], {"a": value}, [value, value], {"name": value}))
    if kind == 2:
        return str(value)
    if kind == 3 and type(value) is int:
        return rng.choice((-value, value + 1, value - 1, value * 2, value << 40, value / 2))
    if kind == 4:
        deep = value
        for _ in range(rng.choice((3, 90, 110))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(SCALARS)


def places(value: Any, rng: random.Random) -> list[tuple[Any, Any]]:
    """A way into a metadata file, as container and key, that ends anywhere."""
    found: list[tuple[Any, Any]] = []
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found.append((value, key))
        value = value[key]
    return found


def changed(metadata: Any, rng: random.Random) -> None:
    """Change one member of a metadata file in its place."""
    found = places(metadata, rng)
    if not found:
        return
    container, key = rng.choice(found)
    kind = rng.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[rng.choice(("x", "", "..", "a/b", "configuration", "name"))] = container[key]
    elif kind == 1:
        container.insert(key, container[key])
    elif kind == 2 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif kind == 3:
        # Of another place of the metadata file.
        elsewhere = places(metadata, rng)
        other, name = rng.choice(elsewhere)
        container[key] = json.loads(json.dumps(other[name]))
    else:
        container[key] = other_value(container[key], rng)


def broken_text(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are no metadata file, or hardly one."""
    at = rng.randrange(len(data))
    kind = rng.randrange(10)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + b"\xff\xfe\x80" + data[at:]
    if kind == 3:
        return data.decode().encode(rng.choice(("utf-16", "utf-8-sig", "utf-32")))
    if kind == 4:  # a member twice
        return data.replace(b"{", b'{"attributes": {}, "shape": [1], "attributes": 1, ', 1)
    if kind == 5:
        return rng.choice((b"", b"null", b"[]", b"{}", b"1", b'"x"', b"[" * 10000, b"\x00" * 9))
    if kind == 6:
        return data[:at] + data[at:].replace(b"3", b"9" * 5000, 1)
    if kind == 7:
        return data[:at] + data[at:].replace(b"null", b"NaN", 1).replace(b"1", b"Infinity", 1)
    if kind == 8:
        return data[:at] + data[at + rng.choice((1, 8, 64)) :]
    return data + data[at:]


def claimed(run: Path, rng: random.Random) -> None:
    """Have all metadata files claim a length that nobody stored, in the same way."""
    dim, length = rng.choice(("step", "token", "hidden")), 1 << rng.choice((20, 31, 40, 47))
    blocks = rng.random() < 0.4

    def change(metadata: Any) -> None:
        for at, name in enumerate(metadata["dimension_names"]):
            if name == dim:
                metadata["shape"][at] = length
                if blocks:
                    metadata["chunk_grid"]["configuration"]["chunk_shape"][at] = length

    root = json.loads((run / METADATA_KEY).read_bytes())
    if dim == "step":
        root["attributes"]["committed_rows"] = length
        root["attributes"]["block_rows"] = length if blocks else root["attributes"]["block_rows"]
    for name, copy in root["consolidated_metadata"]["metadata"].items():
        own = json.loads((run / name / METADATA_KEY).read_bytes())
        for metadata in (copy, own):
            change(metadata)
        (run / name / METADATA_KEY).write_text(json.dumps(own))
    (run / METADATA_KEY).write_text(json.dumps(root))


def damage_metadata(run: Path, rng: random.Random) -> None:
    """Damage a metadata file of a run, or several; of an array sometimes both, in the same way."""
    if rng.random() < 0.04:
        claimed(run, rng)
    names = ["", "", "", *sorted(path.parent.name for path in run.glob(f"*/{METADATA_KEY}"))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(names)
        path = run / name / METADATA_KEY
        if rng.random() < 0.12:
            data = path.read_bytes()
            path.write_bytes(broken_text(data, rng) if data else b"{}")
            continue
        try:
            metadata = json.loads(path.read_bytes())
        except (ValueError, RecursionError):  # damaged before
            continue
        both = name and rng.random() < 0.6
        seed = rng.randrange(1 << 32)
        changed(metadata, random.Random(seed))
        path.write_text(json.dumps(metadata))
        if both:
            root = run / METADATA_KEY
            try:
                whole = json.loads(root.read_bytes())
                changed(whole["consolidated_metadata"]["metadata"][name], random.Random(seed))
            except (ValueError, RecursionError, LookupError, TypeError):
                continue
            root.write_text(json.dumps(whole))
