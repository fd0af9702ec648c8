"""Repairs that keep all rows: damaged arrays to drop, and chunks to fill with NaN."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from trajstore.codec.computed_rows import ComputedUnit, unit_of
from trajstore.errors import InvalidArgument
from trajstore.integrity.array_checks import in_steps
from trajstore.integrity.array_json_checks import is_series
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.damaged_shards import DamagedShard, damaged_shards, nan_filled
from trajstore.integrity.verify import CheckedRun
from trajstore.schema import OF_PARAMETERS, STEP, TRAJECTORIES, coordinate
from trajstore.store.metadata.repairs import FilledShard, filled_shards
from trajstore.store.storage.remote_path import Location
from trajstore.strict_json import Document

__all__ = ["Replacement", "alternatives", "damage_by_array"]

_NEEDED = (STEP.name, "token")


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """Damaged arrays to drop, and damaged chunks to fill.

    Attributes
    ----------
    dropped : frozenset of str
    filled : list of (FilledShard, Problem)
    again : set of FilledShard
        Shards of `filled` that the root records already, from an interrupted repair.
    """

    dropped: frozenset[str]
    filled: list[DamagedShard]
    again: set[FilledShard]

    @classmethod
    def planned(
        cls, checked: CheckedRun, *, fill_damaged: bool, drop_arrays: Collection[str]
    ) -> Replacement:
        """Select arrays and chunks.

        Parameters
        ----------
        checked : CheckedRun
        fill_damaged : bool
            Fill all damaged chunks; by default only those of an interrupted repair.
        drop_arrays : collection of str

        Raises
        ------
        InvalidArgument
            If an array cannot be dropped.
        """
        dropped = frozenset(drop_arrays)
        for name in sorted(dropped):
            _check_droppable(checked, name)
        kept = checked.metadata.arrays.keys() - dropped
        if dropped and kept.isdisjoint(TRAJECTORIES):
            raise InvalidArgument(
                f"cannot drop {', '.join(sorted(dropped))}: a run needs one of "
                f"{', '.join(TRAJECTORIES)}; fill the damaged blocks (--fill-damaged)"
            )
        fixed = dropped | _unfillable(checked.metadata)
        damaged = [
            item
            for item in damaged_shards(checked.metadata, checked.found.problems)
            if item[0].array not in fixed
        ]
        again = {shard for shard, _ in damaged if _is_recorded(checked.metadata, shard)}
        filled = [item for item in damaged if fill_damaged or item[0] in again]
        return cls(dropped=dropped, filled=filled, again=again)

    def before(self, rows: int) -> Replacement:
        """Without chunks past the remaining rows."""
        return replace(self, filled=[item for item in self.filled if item[0].rows[0] < rows])

    def __bool__(self) -> bool:
        return bool(self.dropped or self.filled)

    def new(self) -> list[FilledShard]:
        """Shards to record as filled."""
        return [shard for shard, _ in self.filled if shard not in self.again]

    def shards(self, metadata: CheckedMetadata) -> dict[Location, Iterator[bytes]]:
        """Shards to write, by their path."""
        return {problem.path: nan_filled(metadata, shard) for shard, problem in self.filled}

    def applied(self, checked: CheckedRun) -> CheckedRun:
        """Facts about the run after the replacement."""
        metadata = _without(checked.metadata, self.dropped)
        labels, digests = dict(checked.read.labels), dict(checked.read.digests)
        for damage, _ in self.filled:
            *_, end = nan_filled(metadata, damage)
            place = damage.array, damage.block, damage.part
            labels[place] = metadata.stored(damage.array).form.read_tail(end, place[1:]).label
            digests[place] = labels[place].digest
        problems = [
            problem for problem in checked.found.problems if problem.array not in self.dropped
        ]
        return replace(
            checked,
            metadata=metadata,
            read=replace(checked.read, labels=labels, digests=digests),
            found=replace(checked.found, problems=tuple(problems)),
        )

    def sentences(self, checked: CheckedRun) -> list[str]:
        """Actions with their reasons."""
        where = damage_by_array(checked)
        found = [
            f"the array {name} is dropped: damaged{f' in {where[name]}' if where[name] else ''}"
            for name in sorted(self.dropped)
        ]
        for array in dict.fromkeys(shard.array for shard, _ in self.filled):
            mine = [item for item in self.filled if item[0].array == array]
            rows = in_steps(checked.read, [shard.rows for shard, _ in mine])
            more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
            found.append(f"{array} becomes NaN in {rows}: {mine[0][1]}{more}")
        return found


def alternatives(checked: CheckedRun, replaced: Replacement) -> tuple[str, ...]:
    """Options of `trajstore repair` that keep more rows, or drop damaged coordinates.

    Parameters
    ----------
    checked : CheckedRun
    replaced : Replacement
        The current selection.
    """
    metadata = checked.metadata
    filled = {problem.path for _, problem in replaced.filled}
    left = [
        shard
        for shard, problem in damaged_shards(metadata, checked.found.problems)
        if problem.path not in filled and shard.array not in replaced.dropped
    ]
    fixed = _unfillable(metadata)
    options = ["--fill-damaged"] if any(shard.array not in fixed for shard in left) else []
    names = damage_by_array(checked).keys() - replaced.dropped - fixed
    names -= {shard.array for shard, _ in replaced.filled}
    droppable = sorted(name for name in names if not _is_needed(metadata, name))
    kept = metadata.arrays.keys() - replaced.dropped - set(droppable)
    if droppable and not kept.isdisjoint(TRAJECTORIES):
        options.append(" ".join(f"--drop-array {name}" for name in droppable))
    return tuple(options)


def damage_by_array(checked: CheckedRun) -> dict[str, str]:
    """Damaged arrays with their damaged steps; empty text for damage outside of steps."""
    metadata, problems = checked.metadata, checked.found.problems
    names = [
        problem.array
        for problem in problems
        if problem.array is not None
        and (problem.remedy != "rewrite" or problem.array not in metadata.arrays)
        and (is_series(problem.array) or coordinate(problem.array) is not None)
    ]
    damaged = damaged_shards(metadata, problems)
    rows = {name: [shard.rows for shard, _ in damaged if shard.array == name] for name in names}
    for unit in _units(metadata):
        if unit.chains.keys() & rows.keys():
            lost = [shard.rows for shard, _ in damaged if shard.array in unit.chains]
            rows |= dict.fromkeys(unit.rule.state, lost)
    return {name: in_steps(checked.read, rows[name]) if rows[name] else "" for name in rows}


def _check_droppable(checked: CheckedRun, name: str) -> None:
    metadata = checked.metadata
    damaged = damage_by_array(checked)
    for unit in _units(metadata):
        if name in unit.chains:
            raise InvalidArgument(
                f"cannot drop {name}: {', '.join(unit.rule.state)} are computed together, and it "
                "is part of that (encoding replay); repair without options drops rows"
            )
    if _is_needed(metadata, name):
        raise InvalidArgument(f"cannot drop {name}: every run of these arrays needs it")
    if name not in damaged:
        found = "is not damaged" if name in metadata.arrays else "is not an array of the run"
        raise InvalidArgument(
            f"cannot drop {name}: it {found}; damaged arrays: {', '.join(damaged) or 'none'}"
        )


def _is_needed(metadata: CheckedMetadata, name: str) -> bool:
    names_model = name == "parameter" and not metadata.arrays.keys().isdisjoint(OF_PARAMETERS)
    return name in _NEEDED or names_model


def _unfillable(metadata: CheckedMetadata) -> set[str]:
    """Arrays whose blocks cannot be NaN: int64 has none, and others are computed together."""
    return {STEP.name, *(name for unit in _units(metadata) for name in unit.chains)}


def _units(metadata: CheckedMetadata) -> list[ComputedUnit]:
    """Arrays that are computed together, and those they are computed from."""
    chains = [metadata.stored(name).chain for name in metadata.arrays if is_series(name)]
    return [unit_of(rule) for rule in dict.fromkeys(chain.rule for chain in chains) if rule]


def _is_recorded(metadata: CheckedMetadata, damage: FilledShard) -> bool:
    """True if the root records all this damage as filled."""
    return any(
        (shard.array, shard.block, shard.part) == (damage.array, damage.block, damage.part)
        and set(damage.chunks) <= set(shard.chunks)
        and shard.rows[0] <= damage.rows[0]
        and damage.rows[1] <= shard.rows[1]
        for shard in filled_shards(metadata.attributes or metadata.copy or {})
    )


def _without(metadata: CheckedMetadata, dropped: Collection[str]) -> CheckedMetadata:
    """Metadata without some arrays, and without their names in the others."""
    return replace(
        metadata,
        own={name: document for name, document in metadata.own.items() if name not in dropped},
        arrays={
            name: _without_coordinates(document, dropped)
            for name, document in metadata.arrays.items()
            if name not in dropped
        },
    )


def _without_coordinates(document: Document, dropped: Collection[str]) -> Document:
    named = document["attributes"].get("coordinates")
    if not isinstance(named, str) or not set(named.split()) & set(dropped):
        return document
    left = " ".join(name for name in named.split() if name not in dropped)
    attributes = {key: item for key, item in document["attributes"].items() if key != "coordinates"}
    return document | {"attributes": attributes | ({"coordinates": left} if left else {})}
