"""`repair`: restore a damaged run to its last complete commit.

The plan is complete before anything is written. The copy of the metadata that is whole replaces the
other. A damaged block costs the rows from there on. Each decision has a sentence.

Then the differences are written, the root first, so readers never see rows that the repair drops.
It can be interrupted and repeated, and a sound run stays unchanged.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trajstore.arguments import Count, checks_types
from trajstore.codec.computed_rows import unit_of
from trajstore.errors import FormatError, InvalidArgument, ObjectStoreError, RunLocked
from trajstore.integrity.array_checks import in_steps, step_of
from trajstore.integrity.metadata_checks import check_metadata
from trajstore.integrity.metadata_faults import (
    CheckedMetadata,
    Problem,
    attributes_of,
    digests_of,
    listed_arrays,
    parsed_copy,
)
from trajstore.integrity.verify import CheckedRun, check_run, find_leftovers
from trajstore.schema import NAMES, STEP, TRAJECTORIES, belongs, coordinate, variables_of
from trajstore.store.metadata.metadata_form import CONTENT, FINGERPRINT, Status, is_moment
from trajstore.store.metadata.zarr_json import (
    RunMetadata,
    fixed_attributes,
    is_series,
    notes_of,
    notes_until,
)
from trajstore.store.storage.atomic import (
    flush,
    flush_tree,
    put,
    refuse_links,
    sweep,
)
from trajstore.store.storage.lock import RemoteLock, RunLock, is_written_to, taken_over
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    Location,
    RemotePath,
    RunPath,
    key_within,
    location,
)
from trajstore.strict_json import JsonObject, same
from trajstore.threads import Progress


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
        return asdict(self) | {"path": str(self.path)}


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
    metadata, problems = checked.metadata, checked.verification.problems
    lost = _lost_blocks(checked)
    rows = min((row for row, _ in lost), default=metadata.rows)
    try:
        digests, on_digests = _digests(metadata, rows)
    except _NotPossible as error:
        kept = tuple(map(str, (*problems, *error.args)))
        facts: dict[str, Any] = {"path": metadata.path, "rows_before": metadata.rows}
        return RepairPlan(report=Repair(rows=metadata.rows, unrepaired=kept, **facts))
    damaged = _damage_by_array(checked, lost)
    whole = tuple(name for name in metadata.arrays if is_series(name) and name not in damaged)
    changed = _changed_metadata(checked, rows, digests)
    beyond = [path for paths in find_leftovers(metadata, rows).beyond.values() for path in paths]
    broken = list(dict.fromkeys(item.path for item in problems if item.remedy == "remove"))
    actions = (
        *_on_rows(metadata, rows, lost),
        *on_digests,
        *_on_status(metadata),
        *_on_metadata(checked, rows, changed),
        *_on_removed(checked, beyond, broken),
    )
    lasting = [
        str(item)
        for item in problems
        if item.remedy == "none"
        or (item.remedy == "rewrite" and item.array and item.path not in changed)
    ]
    report = Repair(
        path=metadata.path,
        actions=actions,
        unrepaired=tuple(lasting),
        rows_before=metadata.rows,
        rows=rows,
        damaged=damaged,
        whole=whole,
        exports=_exports(checked, lost, damaged, whole),
    )
    files = {path: json.dumps(new, indent=1).encode() for path, new in changed.items()}
    sweeps = bool(checked.leftovers.temporaries)
    return RepairPlan(report=report, files=files, removed=(*beyond, *broken), sweeps=sweeps)


class _NotPossible(Exception):
    """Nothing can be repaired; with other problems than those of the check."""


def _lost_blocks(checked: CheckedRun) -> list[tuple[int, Problem]]:
    """Problems that cost rows, with the first lost row."""
    metadata = checked.metadata
    return [
        (problem.block * metadata.stored(problem.array).shard[0], problem)
        for problem in checked.verification.problems
        if problem.remedy == "cut" and problem.array is not None and problem.block is not None
    ]


def _damage_by_array(checked: CheckedRun, lost: list[tuple[int, Problem]]) -> dict[str, str]:
    """Damaged arrays with their damaged steps; empty text for damage outside of steps."""
    metadata = checked.metadata
    variables = variables_of(metadata.attributes)
    rows: dict[str, list[tuple[int, int]]] = {
        problem.array: []
        for problem in checked.verification.problems
        if problem.array is not None
        and (problem.remedy != "rewrite" or problem.array not in metadata.arrays)
        and belongs(problem.array, variables)
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
        for problem in checked.verification.problems
        if problem.array is not None
    )
    if not damaged or is_closed or {STEP.name, "token", *NAMES} & damaged.keys():
        return ()
    options = []
    if all(map(is_series, damaged)) and not set(whole).isdisjoint(TRAJECTORIES):
        options.append(f"--variables {','.join(name for name in whole if name != STEP.name)}")
    if lost or not all(map(is_series, damaged)):
        options.append("--fill-damaged")
    return tuple(options)


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


def _digests(metadata: CheckedMetadata, rows: int) -> tuple[dict[str, str], list[str]]:
    """Content digest and fingerprint after the repair, and the actions.

    The root's digests stay if they can be right, so tampering remains detectable.

    Raises
    ------
    _NotPossible
        Without whole metadata; if the system refused to read a part of them, which may be sound; or
        if the digests have to be computed, and a label of a block cannot be read.
    """
    if metadata.refused or metadata.whole is None:
        raise _NotPossible
    attributes = metadata.attributes
    kept = {key: attributes[key] for key in (CONTENT, FINGERPRINT) if key in attributes}
    if len(kept) == 2 and rows == attributes_of(metadata.root).get("committed_rows"):
        return kept, []
    try:
        digests = digests_of(metadata.path, metadata.whole, rows)
    except ObjectStoreError:
        raise
    except (FormatError, OSError) as error:
        raise _NotPossible(f"the fingerprint cannot be computed: {error}") from error
    lost = ["the fingerprint is computed again from the stored content"]
    return digests, lost if len(kept) < 2 else []


def _on_status(metadata: CheckedMetadata) -> Iterator[str]:
    if metadata.attributes["status"] == "recording":
        yield "the status becomes interrupted: no process is recording the run"
    if metadata.root is None:
        yield "the status becomes interrupted, and the notes of the recording are lost"


def _changed_metadata(
    checked: CheckedRun, rows: int, digests: dict[str, str]
) -> dict[Location, JsonObject]:
    """New content of the metadata files that change, the root first."""
    metadata, attributes = checked.metadata, checked.metadata.attributes
    arrays = listed_arrays(metadata.whole)
    # In the order of the copy in step, so that its text stays the same without changes.
    fixed, copy = fixed_attributes(attributes), parsed_copy(arrays[STEP.name]) or {}
    run = RunMetadata(arrays, {key: fixed[key] for key in copy})
    status: Status = attributes["status"]
    if status == "recording" or rows < metadata.rows:
        status = "interrupted"
    last = step_of(checked.read, rows - 1)
    run.notes = notes_of(attributes)
    if rows < metadata.rows and last is not None:
        run.notes = notes_until(run.notes, last)
    root = json.loads(run.root(rows, status, digests))
    targets = root["consolidated_metadata"]["metadata"]
    if rows == metadata.rows:  # arrays of others along step contradict fewer rows only
        targets |= {name: array for name, array in arrays.items() if name not in targets}
    changed: dict[Location, JsonObject] = {}
    updated = attributes_of(metadata.root).get("updated")
    as_before = root | {"attributes": root["attributes"] | {"updated": updated}}
    if not is_moment(updated) or not same(as_before, metadata.root):
        changed[metadata.path / METADATA_KEY] = root
    for name in metadata.arrays:
        if not same(targets[name], metadata.documents.get(name)):
            changed[metadata.path / name / METADATA_KEY] = targets[name]
    return changed


def _on_metadata(
    checked: CheckedRun, rows: int, changed: dict[Location, JsonObject]
) -> Iterator[str]:
    metadata = checked.metadata
    for path in changed:
        what = key_within(path, metadata.path)
        reasons = [
            problem.message
            for problem in checked.verification.problems
            if problem.path == path and problem.remedy == "rewrite"
        ]
        document = (
            metadata.documents.get(path.parent.name) if path.parent != metadata.path else None
        )
        if reasons:
            yield f"{what} is rewritten: {'; '.join(reasons)}"
        elif document is not None and document["shape"][0] > metadata.rows:
            yield (
                f"{what} is reset from {document['shape'][0]} rows to {rows}: the others were "
                "never committed"
            )
        elif document is not None and parsed_copy(document) != parsed_copy(changed[path]):
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
        faults = [
            problem.message for problem in checked.verification.problems if problem.path == path
        ]
        yield f"{path.parent.name}/{path.name} is removed: {'; '.join(faults)}"


@checks_types
def repair(
    path: RunPath,
    *,
    dry_run: bool = False,
    threads: Count | None = None,
    on_progress: Progress | None = None,
    on_plan: Callable[[Repair], None] | None = None,
) -> Repair:
    """Restore a run to its last complete commit.

    All arrays are cut to the rows before the first damaged block. Shards past the commit and
    temporary files are removed; no reader sees them. Damaged metadata files are replaced by their
    second copy, if all of it is whole; otherwise nothing is changed. Sound chunks of the remaining
    rows stay unchanged. `trajstore.export` copies more of a damaged run, as a new run: with
    ``variables`` or ``fill_damaged``.

    Parameters
    ----------
    path : path-like, str or RemotePath
    dry_run : bool
        Only return the plan. A repair can be repeated, also after an interruption.
    threads : int, optional
        Threads that read the run; by default the number of processors, at most 8.
    on_progress : callable, optional
        Called with the bytes of the checked shards, and of all shards.
    on_plan : callable, optional
        Called with the plan, before anything is changed.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`, one of a newer format, or one with a link inside.
    RunLocked
        If another process writes to it.
    InvalidArgument
        If `path` is on a web server.
    OSError
        If a write failed; another repair continues.

    Examples
    --------
    >>> from pathlib import Path
    >>> Path("gatsby.zarr/W/c.2.0.0").unlink()  # lose a block of rows
    >>> planned = repair("gatsby.zarr", dry_run=True)
    >>> planned.rows_before, planned.rows, planned.done
    (21, 16, False)
    >>> repair("gatsby.zarr").done
    True
    >>> repair("gatsby.zarr").actions  # nothing remains
    ()
    """
    run = location(path).absolute()
    if isinstance(run, RemotePath) and not run.listed:
        raise InvalidArgument(
            f"cannot repair {run}: a web server is read-only; copy the run to a folder, repair the "
            "copy, and upload it"
        )
    check_metadata(path)  # before it makes a lock for something else
    refuse_links(run)
    with _unlocked(run) if dry_run else RunLock.acquire(run) as lock:
        checked = check_run(run, threads=threads, on_progress=on_progress)
        plan = plan_repair(checked)
        if on_plan is not None:
            on_plan(plan.report)
        if not dry_run:
            if isinstance(lock, RemoteLock) and not lock.is_held():
                raise taken_over(run)
            _carry_out(run, plan)
    return replace(plan.report, done=not dry_run)


@contextlib.contextmanager
def _unlocked(run: Location) -> Iterator[None]:
    if is_written_to(run) is not False:
        raise RunLocked(f"{run} is being written to; wait for its writer, or end it")
    yield


def _carry_out(run: Location, plan: RepairPlan) -> None:
    for target, data in plan.files.items():
        if isinstance(target, Path) and target.parent != run:  # do not recreate a deleted run
            target.parent.mkdir(exist_ok=True)
        put(target, [data])
    for path in plan.removed:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in plan.removed if isinstance(path, Path)}:
        if folder != run and folder.parent == run and not any(folder.iterdir()):
            folder.rmdir()
    if plan.sweeps:
        sweep(run)
    if isinstance(run, Path) and plan.report.actions:
        # The writer may have left the run's name and the rows that stay to the system.
        flush_tree(run)
        flush([run.parent])
