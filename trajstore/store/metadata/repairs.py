"""Values and arrays that repairs removed from a run, as ``provenance.repaired`` records them.

An entry describes a shard with NaN in its damaged inner chunks, or a dropped array.

Source: docs/reference/format.md, *Repairs*.
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
    """Inner chunks of one shard that a repair filled with NaN.

    Attributes
    ----------
    array : str
    block, part : int
    chunks : tuple of int
        Numbers of the inner chunks, in C order of their grid.
    rows : (int, int)
        First row, and the row after the last one.
    """

    array: str
    block: int
    part: int
    chunks: tuple[int, ...]
    rows: tuple[int, int]


def filled_shards(attributes: Mapping[str, Any]) -> list[FilledShard]:
    """Shards that repairs filled, in order.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root. Malformed entries are skipped.
    """
    return [shard for entry in _entries(attributes) if (shard := _shard(entry)) is not None]


def filled_rows(
    attributes: Mapping[str, Any], rows: int, arrays: Collection[str] | None = None
) -> set[int]:
    """Those of the first `rows` rows that hold NaN from a repair, in any array or in `arrays`."""
    return {
        row
        for shard in filled_shards(attributes)
        if arrays is None or shard.array in arrays
        for row in range(max(shard.rows[0], 0), min(shard.rows[1], rows))
    }


def dropped_arrays(attributes: Mapping[str, Any]) -> set[str]:
    """Names of arrays that repairs dropped."""
    return {entry["array"] for entry in _entries(attributes) if entry.get("dropped") is True}


def with_repairs(
    attributes: Mapping[str, Any],
    *,
    filled: Iterable[FilledShard],
    dropped: Iterable[str],
    time: str,
) -> dict[str, Any]:
    """Attributes with one more repair in ``provenance``."""
    entries: list[dict[str, Any]] = [
        {"time": time, "array": name, "dropped": True} for name in sorted(dropped)
    ]
    entries += [
        {"time": time, **asdict(shard), "chunks": list(shard.chunks), "rows": list(shard.rows)}
        for shard in filled
    ]
    provenance = attributes.get(_PROVENANCE)
    provenance = provenance if isinstance(provenance, Mapping) else {}
    listed = [*_entries(attributes), *entries]
    return dict(attributes) | {_PROVENANCE: dict(provenance) | {_REPAIRED: listed}}


def without_later_repairs(attributes: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Attributes of the first `rows` rows of a run, without repairs of later rows."""
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
    """Shard that an entry describes, or None."""
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
