"""The plan of a repair, complete before anything is written.

Metadata files are rebuilt from their copies. A damaged block costs the rows from there on. Each
decision has a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from trajstore.codec.computed_rows import unit_of
from trajstore.integrity.array_checks import in_steps
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.fingerprint_checks import made_again
from trajstore.integrity.leftovers import find_leftovers
from trajstore.integrity.problem import Problem
from trajstore.integrity.root_attribute_checks import fixed_attributes
from trajstore.integrity.verify import CheckedRun
from trajstore.schema import FORMAT, NAMES, STEP, TRAJECTORIES, belongs, coordinate
from trajstore.store.metadata.array_metadata import is_series
from trajstore.store.metadata.fingerprint import CONTENT, FINGERPRINT
from trajstore.store.metadata.metadata_form import (
    STATUSES,
    Status,
    is_digest,
    is_moment,
    is_possible,
)
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.metadata.zarr_json import RunMetadata, is_outgrown
from trajstore.store.storage.remote_path import Location, key_within
from trajstore.strict_json import JsonObject, same, utc_now
from trajstore.version import __version__


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Result of `repair`, applied or planned.

    Attributes
    ----------
    path : Path or RemotePath
    actions : tuple of str
        One sentence each; empty for a sound run.
    unrepaired : tuple of str
        Problems that stay, because no other copy exists.
    rows_before, rows : int
        Committed rows.
    damaged : dict of str to str
        Damaged arrays with their damaged steps; empty text for damage outside of steps.
    whole : tuple of str
        Names of the sound variables, with `step`.
    exports : tuple of str
        Options of ``trajstore export --format run`` that copy more than the repair keeps.
    done : bool
        True if the actions were applied.
    """

    path: Location
    actions: tuple[str, ...] = ()
    unrepaired: tuple[str, ...]
    rows_before: int
    rows: int
    damaged: dict[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    done: bool = False

    def facts(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self) | {
            "path": str(self.path),
            "actions": list(self.actions),
            "unrepaired": list(self.unrepaired),
            "whole": list(self.whole),
            "exports": list(self.exports),
        }


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """Files to write and to remove, in this order.

    Attributes
    ----------
    report : Repair
    files : dict of Path or RemotePath to bytes
        Metadata to write.
    removed : tuple of Path or RemotePath
        Files to remove.
    sweeps : bool
        True if there are temporary files to remove.
    """

    report: Repair
    files: dict[Location, bytes] = field(default_factory=dict)
    removed: tuple[Location, ...] = ()
    sweeps: bool = False


def plan_repair(checked: CheckedRun) -> RepairPlan:
    """Plan the repair of a run."""
    metadata = checked.metadata
    # A metadata file that the system refuses to read may be sound: do not replace it, drop no rows.
    facts: dict[str, Any] = {"path": metadata.path, "rows_before": metadata.rows}
    if metadata.refused or STEP.name not in metadata.arrays:
        problems = tuple(map(str, checked.found.problems))
        return RepairPlan(report=Repair(rows=metadata.rows, unrepaired=problems, **facts))
    lost = _lost_blocks(checked)
    rows = min((row for row, _ in lost), default=metadata.rows)
    damaged = _damage_by_array(checked, lost)
    whole = tuple(name for name in metadata.arrays if is_series(name) and name not in damaged)
    attributes, on_attributes = _attributes(metadata)
    digests, on_digests = _digests(checked, rows, attributes, changed=bool(on_attributes))
    changed = _changed_metadata(metadata, rows, attributes, _status(metadata, rows), digests)
    beyond = [path for paths in find_leftovers(metadata, rows).beyond.values() for path in paths]
    broken = list(dict.fromkeys(p.path for p in checked.found.problems if p.remedy == "remove"))
    lasting = [problem for problem in checked.found.problems if _is_lasting(metadata, problem)]
    report = Repair(
        rows=rows,
        actions=(
            *_on_rows(metadata, rows, lost),
            *on_attributes,
            *on_digests,
            *_on_status(metadata),
            *_on_metadata(checked, rows, changed),
            *_on_removed(checked, beyond, broken),
        ),
        unrepaired=tuple(map(str, lasting)),
        damaged=damaged,
        whole=whole,
        exports=_exports(checked, lost, damaged, whole),
        **facts,
    )
    return RepairPlan(
        report=report,
        files={
            path: json.dumps(content, indent=1, allow_nan=False).encode()
            for path, content in changed.items()
        },
        removed=(*beyond, *broken),
        sweeps=bool(checked.leftovers.temporaries),
    )


def _lost_blocks(checked: CheckedRun) -> list[tuple[int, Problem]]:
    """Problems that cost rows, with the first lost row."""
    metadata = checked.metadata
    return [
        (problem.block * metadata.stored(problem.array).shard[0], problem)
        for problem in checked.found.problems
        if problem.remedy == "cut" and problem.array is not None and problem.block is not None
    ]


def _damage_by_array(checked: CheckedRun, lost: list[tuple[int, Problem]]) -> dict[str, str]:
    """Damaged arrays with their damaged steps; empty text for damage outside of steps."""
    metadata = checked.metadata
    rows: dict[str, list[tuple[int, int]]] = {
        problem.array: []
        for problem in checked.found.problems
        if problem.array is not None
        and (problem.remedy != "rewrite" or problem.array not in metadata.arrays)
        and belongs(problem.array, metadata.variables)
    }
    for first, problem in lost:
        assert problem.array is not None
        length = metadata.stored(problem.array).shard[0]
        rows[problem.array].append((first, min(first + length, metadata.rows)))
    chains = [metadata.stored(name).chain for name in metadata.arrays if is_series(name)]
    for unit in (unit_of(rule) for rule in dict.fromkeys(chain.rule for chain in chains) if rule):
        if unit.chains.keys() & rows.keys():
            all_rows = [each for name in unit.chains for each in rows.get(name, ())]
            rows |= dict.fromkeys(unit.rule.state, all_rows)
    return {name: in_steps(checked.read, rows[name]) if rows[name] else "" for name in rows}


def _exports(
    checked: CheckedRun,
    lost: list[tuple[int, Problem]],
    damaged: dict[str, str],
    whole: tuple[str, ...],
) -> tuple[str, ...]:
    """Options of `trajstore export --format run` that copy more than the repair keeps."""
    # A run is not opened if a coordinate has no values at all. Broken values have a place.
    is_closed = any(
        problem.remedy == "none" and problem.block is None and coordinate(problem.array)
        for problem in checked.found.problems
        if problem.array is not None
    )
    if not damaged or is_closed or {STEP.name, "token", *NAMES} & damaged.keys():
        return ()
    found = []
    if all(map(is_series, damaged)) and not set(whole).isdisjoint(TRAJECTORIES):
        found.append(f"--variables {','.join(name for name in whole if name != STEP.name)}")
    if lost or not all(map(is_series, damaged)):
        found.append("--fill-damaged")
    return tuple(found)


def _on_rows(
    metadata: CheckedMetadata, rows: int, lost: list[tuple[int, Problem]]
) -> Iterator[str]:
    if not lost:
        return
    _, first = min(lost, key=lambda item: item[0])
    rest = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    left = f"{rows} stay" if rows else "none stay"
    yield (
        f"{metadata.rows - rows} of {metadata.rows} rows are dropped, from row {rows} on; "
        f"{left}: {first}{rest}"
    )


def _attributes(metadata: CheckedMetadata) -> tuple[JsonObject, list[str]]:
    """Fixed attributes of the root after the repair, and the actions.

    The root's own attributes win, unless only the copy is plausible.
    """
    own, copy = fixed_attributes(metadata.attributes), metadata.copy or {}
    # zarr drops the consolidated metadata when a user sets an attribute. Without them, a change is
    # intended; with them, it is damage.
    intended = metadata.consolidated() is None
    settled = {**copy, **own} if intended else {**own, **copy}
    actions = []
    compared = settled if metadata.root is not None and metadata.copy is not None else ()
    for key in list(compared):
        if key in own and key in copy and same(own[key], copy[key]):
            continue
        lost = [name for name in copy.keys() - own.keys() if same(copy[name], own.get(key))]
        if key in copy and (key not in own or not intended):
            actions.append(f"the attribute {key} is restored from its copy in step")
        elif key not in copy and lost:
            actions.append(f"the attribute {key} is removed: it is {lost[0]} with a broken name")
            del settled[key]
        else:
            actions.append(f"the copy in step receives the attribute {key}")
    if metadata.root is None and metadata.copy is None:
        actions.append(
            "the attributes of the root are lost, without a copy: config, optimizer and provenance "
            "are lost"
        )
    for key, value in _least_attributes(metadata).items():
        if key not in settled or not is_possible(key, settled[key]):
            if metadata.root is not None or metadata.copy is not None:
                actions.append(f"the attribute {key} is lost; it becomes {value!r}")
            settled[key] = value
    # In the order of the copy, so that its text stays the same without changes.
    return {key: settled[key] for key in (*copy, *settled)}, actions


def _least_attributes(metadata: CheckedMetadata) -> JsonObject:
    """Required attributes of a root that the arrays determine."""
    form = metadata.stored(STEP.name).form
    is_compact = any(
        metadata.stored(name).chain.has_forms for name in metadata.arrays if is_series(name)
    )
    return {
        "trajstore_format": FORMAT,
        "trajstore_version": __version__,
        "created": utc_now(),
        "encoding": "compact" if is_compact else "delta",
        "block_rows": form.shape[0],
        "config": {},
        "runs": [list(entry) for entry in form.runs],
    }


def _digests(
    checked: CheckedRun, rows: int, attributes: JsonObject, *, changed: bool
) -> tuple[dict[str, str], list[str]]:
    """Content digest and fingerprint after the repair, and the actions.

    The root's digests stay if they can be right, so tampering remains detectable.
    """
    metadata = checked.metadata
    kept = {key: metadata.attributes.get(key) for key in (CONTENT, FINGERPRINT)}
    lost = not all(map(is_digest, kept.values()))
    as_before = {key: str(value) for key, value in kept.items()}
    keeps_rows = not lost and rows == metadata.rows and metadata.consolidated() is not None
    if keeps_rows and not changed:
        return as_before, []
    found = made_again(metadata, checked.read, rows=rows, attributes=attributes)
    if keeps_rows and (found is None or found.attributes()[CONTENT] != kept[CONTENT]):
        return as_before, []
    if found is None:
        return {}, ["the fingerprint is lost: a part of the content is not readable"]
    return found.attributes(), [
        "the fingerprint is computed again from the stored content"
    ] if lost else []


def _status(metadata: CheckedMetadata, rows: int) -> Status:
    """Status after the repair: interrupted, unless all rows remain."""
    status = metadata.attributes.get("status")
    if status not in STATUSES or status == "recording" or rows < metadata.rows:
        return "interrupted"
    return status  # type: ignore[no-any-return]


def _on_status(metadata: CheckedMetadata) -> Iterator[str]:
    if metadata.attributes.get("status") == "recording":
        yield "the status becomes interrupted: no process is recording the run"


def _changed_metadata(
    metadata: CheckedMetadata,
    rows: int,
    attributes: JsonObject,
    status: Status,
    digests: dict[str, str],
) -> dict[Location, JsonObject]:
    """New content of the metadata files that change, the root first."""
    arrays, listed = metadata.arrays, metadata.consolidated() or {}
    root = json.loads(RunMetadata(arrays, attributes).root(rows, status, digests))
    targets = root["consolidated_metadata"]["metadata"]
    # Foreign entries, and entries unreadable in both places, stay unchanged.
    strange = {
        name: entry
        for name, entry in listed.items()
        if name not in arrays and not _is_dropped(metadata, name)
        if rows == metadata.rows or not is_outgrown(name, entry, metadata.variables)
    }
    order = dict.fromkeys([*listed, *targets])
    targets |= strange
    root["consolidated_metadata"]["metadata"] = {
        name: targets[name] for name in order if name in targets
    }
    changed: dict[Location, JsonObject] = {}
    if not _same_root(root, metadata.root):
        changed[metadata.path / METADATA_KEY] = root
    for name in arrays:
        if not same(targets[name], metadata.own[name]):
            changed[metadata.path / name / METADATA_KEY] = targets[name]
    return changed


def _is_dropped(metadata: CheckedMetadata, name: str) -> bool:
    """True for an unknown name in the root without a folder."""
    known = {STEP.name, *metadata.variables, *metadata.arrays}
    return name not in known and not (metadata.path / name).exists()


def _same_root(target: dict[str, Any], root: JsonObject | None) -> bool:
    """True if the root stays the same, apart from the time of its last change."""
    attributes = (root or {}).get("attributes")
    moment = attributes.get("updated") if isinstance(attributes, dict) else None
    expected = target | {"attributes": target["attributes"] | {"updated": moment}}
    return is_moment(moment) and same(expected, root)


def _on_metadata(
    checked: CheckedRun, rows: int, changed: dict[Location, JsonObject]
) -> Iterator[str]:
    metadata = checked.metadata
    for path in changed:
        what = key_within(path, metadata.path)
        reasons = [
            problem.message
            for problem in checked.found.problems
            if problem.path == path and problem.remedy == "rewrite"
        ]
        own = metadata.own.get(path.parent.name) if path.parent != metadata.path else None
        if reasons:
            yield f"{what} is rewritten: {'; '.join(reasons)}"
        elif own is not None and own["shape"][0] > metadata.rows:
            yield (
                f"{what} is reset from {own['shape'][0]} rows to {rows}: the others were never "
                "committed"
            )
        elif metadata.replaced and path.parent.name == STEP.name:
            yield f"{what} receives the attributes of the root"


def _on_removed(
    checked: CheckedRun, beyond: list[Location], broken: list[Location]
) -> Iterator[str]:
    past = sum(map(len, checked.leftovers.beyond.values()))
    if past:
        yield (f"shards past the commit are removed ({past}): no reader sees them")
    if len(beyond) > past:
        yield f"shards of the dropped rows are removed ({len(beyond) - past})"
    if checked.leftovers.temporaries:
        count = len(checked.leftovers.temporaries)
        yield f"temporary files of unfinished writes are removed ({count})"
    for path in broken:
        faults = [problem.message for problem in checked.found.problems if problem.path == path]
        yield f"{path.parent.name}/{path.name} is removed: {'; '.join(faults)}"


def _is_lasting(metadata: CheckedMetadata, problem: Problem) -> bool:
    """True if no repair is possible."""
    if problem.remedy != "rewrite":
        return problem.remedy == "none"
    name = problem.array
    return name is not None and name not in metadata.arrays and not _is_dropped(metadata, name)
