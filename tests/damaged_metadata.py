"""Metadata files that are damaged at random: wrong types, missing members, broken texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from damage import METADATA_KEY, arrays_of, edit, member, root, write

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


def _change_one(metadata: Any, rng: random.Random) -> None:
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
    before, after = data[:at], data[at:]
    twice = b'{"attributes": {}, "shape": [1], "attributes": 1, '
    other = (b"", b"null", b"[]", b"{}", b"1", b'"x"', b"[" * 10000, b"\x00" * 9)
    encoding = rng.choice(("utf-16", "utf-8-sig", "utf-32"))
    return rng.choice(
        (
            before,
            before + rng.randbytes(1) + after[1:],
            before + b"\xff\xfe\x80" + after,
            data.decode(errors="replace").encode(encoding),
            data.replace(b"{", twice, 1),
            rng.choice(other),
            before + after.replace(b"3", b"9" * 5000, 1),
            before + after.replace(b"null", b"NaN", 1).replace(b"1", b"Infinity", 1),
            before + after[rng.choice((1, 8, 64)) :],
            data + after,
        )
    )


def claim_length(run: Path, rng: random.Random) -> None:
    """Have all metadata files claim a length that nobody stored, in the same way."""
    dim, length = rng.choice(("step", "token", "hidden")), 1 << rng.choice((20, 31, 40, 47))
    blocks = rng.random() < 0.4
    if dim == "step":
        root("attributes.committed_rows", length)(run)
        if blocks:
            root("attributes.block_rows", length)(run)
    for name, array in arrays_of(json.loads((run / METADATA_KEY).read_bytes())).items():
        for at in (at for at, each in enumerate(array["dimension_names"]) if each == dim):
            member(name, f"shape.{at}", length)(run)
            if blocks:
                member(name, f"chunk_grid.configuration.chunk_shape.{at}", length)(run)


def damage_metadata(run: Path, rng: random.Random) -> None:
    """Damage a metadata file of a run, or several; of an array sometimes both, in the same way."""
    if rng.random() < 0.04:
        claim_length(run, rng)
    names = ["", "", "", *sorted(path.parent.name for path in run.glob(f"*/{METADATA_KEY}"))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(names)
        path = run / name / METADATA_KEY
        if rng.random() < 0.12:
            data = path.read_bytes()
            write(path, broken_text(data, rng) if data else b"{}")
            continue
        both, seed = name and rng.random() < 0.6, rng.randrange(1 << 32)
        # Damaged before, a file may be no JSON, or have no such member.
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            edit(path, lambda metadata, seed=seed: _change_one(metadata, random.Random(seed)))
            if both:
                edit(
                    run / METADATA_KEY,
                    lambda whole, name=name, seed=seed: _change_one(
                        arrays_of(whole)[name], random.Random(seed)
                    ),
                )
