"""What a repair took out of a run: the root records it in ``provenance.repaired``.

An entry is about one shard whose damaged inner chunks hold NaN since, or about an array that was
dropped. Source: docs/format.md, *Repairs*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "FilledShard",
    "dropped_arrays",
    "filled_rows",
    "filled_shards",
    "with_repairs",
    "without_later_repairs",
]

_PROVENANCE = "provenance"
_REPAIRED = "repaired"
_BOUNDS = 2


@dataclass(frozen=True, kw_only=True)
class FilledShard:
    """Inner chunks of one shard that hold NaN since a repair.

    Attributes
    ----------
    array : str
    block, part : int
    chunks : tuple of int
        Numbers of the inner chunks, in C order of their grid.
    rows : (int, int)
        First row, and the row after the last.
    """

    array: str
    block: int
    part: int
    chunks: tuple[int, ...]
    rows: tuple[int, int]


def filled_shards(attributes: Mapping[str, Any]) -> list[FilledShard]:
    """Shards that repairs filled, in their order.

    Parameters
    ----------
    attributes : mapping
        Of the root; entries that no repair wrote are left out.
    """
    return [shard for entry in _entries(attributes) if (shard := _shard(entry)) is not None]


def filled_rows(attributes: Mapping[str, Any], arrays: Collection[str] | None = None) -> set[int]:
    """Rows in which repairs wrote NaN into any array, or any of these."""
    return {
        row
        for shard in filled_shards(attributes)
        if arrays is None or shard.array in arrays
        for row in range(*shard.rows)
    }


def dropped_arrays(attributes: Mapping[str, Any]) -> set[str]:
    """Names of the arrays that repairs dropped."""
    return {entry["array"] for entry in _entries(attributes) if entry.get("dropped") is True}


def with_repairs(
    attributes: Mapping[str, Any],
    *,
    filled: Iterable[FilledShard],
    dropped: Iterable[str],
    time: str,
) -> dict[str, Any]:
    """The attributes, with another repair in their ``provenance``."""
    entries: list[dict[str, Any]] = [
        {"time": time, "array": name, "dropped": True} for name in sorted(dropped)
    ]
    entries += [
        {"time": time, **asdict(shard), "chunks": list(shard.chunks), "rows": list(shard.rows)}
        for shard in filled
    ]
    provenance = attributes.get(_PROVENANCE) or {}
    listed = [*(provenance.get(_REPAIRED) or []), *entries]
    return dict(attributes) | {_PROVENANCE: dict(provenance) | {_REPAIRED: listed}}


def without_later_repairs(attributes: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The attributes of a run that keeps so many rows: NaN that goes with a row is forgotten."""
    shards = filled_shards(attributes)
    if all(shard.rows[1] <= rows for shard in shards):
        return dict(attributes)
    provenance = dict(attributes[_PROVENANCE])
    kept = []
    for entry in provenance[_REPAIRED]:
        shard = _shard(entry) if isinstance(entry, dict) else None
        if shard is None:
            kept.append(entry)
        elif shard.rows[0] < rows:
            kept.append(entry | {"rows": [shard.rows[0], min(shard.rows[1], rows)]})
    return dict(attributes) | {_PROVENANCE: provenance | {_REPAIRED: kept}}


def _entries(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    provenance = attributes.get(_PROVENANCE)
    listed = provenance.get(_REPAIRED) if isinstance(provenance, Mapping) else None
    if not isinstance(listed, list):
        return []
    return [
        entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("array"), str)
    ]


def _shard(entry: Mapping[str, Any]) -> FilledShard | None:
    """The shard that an entry is about; None if it is about none."""
    array, block, part = (entry.get(name) for name in ("array", "block", "part"))
    chunks, rows = entry.get("chunks"), entry.get("rows")
    if not isinstance(array, str) or not isinstance(chunks, list) or not isinstance(rows, list):
        return None
    numbers = (block, part, *chunks, *rows)
    if len(rows) != _BOUNDS or not all(type(number) is int for number in numbers):
        return None
    return FilledShard(
        array=array,
        block=int(block or 0),
        part=int(part or 0),
        chunks=tuple(chunks),
        rows=(rows[0], rows[1]),
    )
