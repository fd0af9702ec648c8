"""`repair`: a damaged run brought back to its last whole commit.

What can be rebuilt is rebuilt from what is written down twice; what cannot costs the rows from
there on. A repair settles first what the run shall say, as a whole, and then writes what differs:
so it can be interrupted and begun again, and a sound run is left alone. The root is written first,
so that no reader ever sees rows that are on their way out.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trajstore.documents import Problem, block_rows, is_moment, is_series, same
from trajstore.encoding import ENCODINGS
from trajstore.errors import InvalidArgument, RunNotFound
from trajstore.inspection import REQUIRED, STATUSES, Inspection
from trajstore.leftovers import find_leftovers
from trajstore.lock import RunLock
from trajstore.metadata import CHANGING, COPY, DOCUMENT, Documents, Status, utc_now
from trajstore.objects import put, sweep
from trajstore.parts import Progress
from trajstore.schema import FORMAT, STEP
from trajstore.verification import Checked, check
from trajstore.version import __version__

__all__ = ["Repair", "repair"]


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What `repair` has done, or would do.

    Attributes
    ----------
    path : Path
    actions : tuple of str
        One sentence each; empty if there is nothing to do.
    unrepaired : tuple of str
        What is wrong and stays so, as it is written down nowhere else.
    rows_before, rows : int
        Committed rows.
    done : bool
        Whether the actions have been carried out.
    """

    path: Path
    actions: tuple[str, ...]
    unrepaired: tuple[str, ...]
    rows_before: int
    rows: int
    done: bool

    def facts(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self) | {
            "path": str(self.path),
            "actions": list(self.actions),
            "unrepaired": list(self.unrepaired),
        }


@dataclass(kw_only=True)
class _Plan:
    """What shall be written and removed, in this order, and why."""

    rows: int
    actions: list[str] = field(default_factory=list)
    unrepaired: list[str] = field(default_factory=list)
    documents: dict[Path, bytes] = field(default_factory=dict)
    remove: list[Path] = field(default_factory=list)
    temporaries: bool = False


def repair(
    path: str | os.PathLike[str],
    *,
    yes: bool = False,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Repair:
    """Bring a run back to its last whole commit; by default only say how.

    Rows are cut back to before the first block that any array has lost. Shards past the commit
    and temporaries are removed: no reader has ever seen them as part of the run. Documents are
    rebuilt from their copies. A chunk that belongs to rows that stay is never touched.

    Parameters
    ----------
    path : path-like
        A local run.
    yes : bool
        Do it. Twice does no harm, also after a first time that was interrupted.
    threads : int, optional
        That read the run; without it as many as there are processors, at most 8.
    on_progress : callable, optional
        Called with the bytes that have been checked, and those there are.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`, or one of a newer format.
    RunLocked
        If another process writes to it.
    InvalidArgument
        If `path` is an address.
    OSError
        If something could not be written; another repair goes on from there.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(f"cannot repair {text}: copy the run to a local folder first")
    run = Path(text).absolute()
    if not run.exists():
        raise RunNotFound(f"there is no run at {text}")
    # A copy on a medium that cannot be written to has no writer, and no place for a lock.
    locked = yes or os.access(run.parent, os.W_OK)
    with RunLock.acquire(run) if locked else contextlib.nullcontext():
        checked = check(run, threads=threads, on_progress=on_progress)
        plan = _plan(checked)
        if yes:
            for target, data in plan.documents.items():
                target.parent.mkdir(exist_ok=True)
                put(target, [data], fsync=True)
            for lost in plan.remove:
                lost.unlink(missing_ok=True)
            if plan.temporaries:
                sweep(run)
    return Repair(
        path=run,
        actions=tuple(plan.actions),
        unrepaired=tuple(plan.unrepaired),
        rows_before=checked.inspection.rows,
        rows=plan.rows,
        done=yes,
    )


def _plan(checked: Checked) -> _Plan:
    inspection = checked.inspection
    plan = _Plan(rows=inspection.rows)
    lasting = [problem for problem in checked.problems if _is_lasting(inspection, problem)]
    plan.unrepaired = [str(problem) for problem in lasting]
    # A document that the system refuses may be sound: nothing is written in its place, and no row
    # is dropped by what the others say.
    if inspection.refused or STEP.name not in inspection.arrays:
        plan.unrepaired = [str(problem) for problem in checked.problems]
        return plan
    _cut(checked, plan)
    _write(checked, plan)
    _remove(checked, plan)
    return plan


def _is_lasting(inspection: Inspection, problem: Problem) -> bool:
    """Whether no repair can help."""
    if problem.remedy != "rewrite":
        return problem.remedy == "none"
    name = problem.array
    return name is not None and name not in inspection.arrays and not _is_dropped(inspection, name)


def _is_dropped(inspection: Inspection, name: str) -> bool:
    """Whether an array is an entry of the root and nothing else, of a name that nobody knows."""
    return (
        name not in inspection.arrays
        and not is_series(name)
        and not (inspection.path / name).exists()
    )


def _cut(checked: Checked, plan: _Plan) -> None:
    """Settle how many rows stay: those before the first block that an array has lost."""
    arrays = checked.inspection.arrays
    lost: list[tuple[int, Problem]] = []
    for problem in checked.problems:
        if problem.remedy == "cut" and problem.array is not None and problem.block is not None:
            rows = block_rows(arrays[problem.array])
            lost.append((problem.block * rows, problem))
    if not lost:
        return
    plan.rows, first = min(lost, key=lambda item: item[0])
    dropped = checked.inspection.rows - plan.rows
    rest = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    left = f"{plan.rows} stay" if plan.rows else "none stay"
    plan.actions.append(
        f"{dropped} of {checked.inspection.rows} rows are dropped, those from row {plan.rows} on; "
        f"{left}: {first}{rest}"
    )


def _write(checked: Checked, plan: _Plan) -> None:
    """Settle what the documents shall say, and which of them say something else."""
    inspection = checked.inspection
    fixed = _attributes(inspection, plan)
    arrays = inspection.arrays
    # What is somebody else's, or unreadable in both places, stays to the letter.
    strange = {
        name: entry
        for name, entry in (inspection.consolidated() or {}).items()
        if name not in arrays and not _is_dropped(inspection, name)
    }
    # Runs of the first versions have no copy of the attributes, and need none.
    copied = inspection.copy is not None or COPY in arrays[STEP.name]["attributes"]
    root, targets = _documents(arrays, fixed, plan.rows, _status(inspection, plan), copied)
    order = dict.fromkeys([*(inspection.consolidated() or {}), *targets])
    targets |= strange
    root["consolidated_metadata"]["metadata"] = {
        name: targets[name] for name in order if name in targets
    }
    changed = {} if _same_root(root, inspection.root) else {inspection.path / DOCUMENT: root}
    for name in inspection.arrays:
        if not same(targets[name], inspection.own[name]):
            changed[inspection.path / name / DOCUMENT] = targets[name]
    for path, document in changed.items():
        plan.documents[path] = json.dumps(document, indent=1, allow_nan=False).encode()
        reasons = [
            problem.message
            for problem in checked.problems
            if problem.path == path and problem.remedy == "rewrite"
        ]
        own = inspection.own.get(path.parent.name) if path.parent != inspection.path else None
        if reasons:
            what = path.relative_to(inspection.path)
            plan.actions.append(f"{what} is written anew: {'; '.join(reasons)}")
        elif own is not None and own["shape"][0] > inspection.rows:
            plan.actions.append(
                f"{path.relative_to(inspection.path)} goes back from {own['shape'][0]} rows to "
                f"{plan.rows}: the others were never committed"
            )


def _documents(
    arrays: dict[str, Any], fixed: dict[str, Any], rows: int, status: Status, copied: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Documents of the root and of each array."""
    documents = Documents(arrays, fixed)
    root = json.loads(documents.root(rows, status))
    targets = root["consolidated_metadata"]["metadata"]
    if not copied:
        del targets[STEP.name]["attributes"][COPY]
    return root, targets


def _same_root(target: dict[str, Any], root: dict[str, Any] | None) -> bool:
    """Whether a root needs no writing; the time of its last change is no reason to."""
    if root is None or not isinstance(root.get("attributes"), dict):
        return False
    moment = root["attributes"].get("updated")
    if not is_moment(moment):
        return False
    return same(target | {"attributes": target["attributes"] | {"updated": moment}}, root)


def _status(inspection: Inspection, plan: _Plan) -> Status:
    """Status of the run afterwards: that of a recording that did not end, unless all is there."""
    status = inspection.attributes.get("status")
    if status == "recording":
        plan.actions.append("its status becomes interrupted: nobody is recording it any more")
    if status not in STATUSES or status == "recording" or plan.rows < inspection.rows:
        return "interrupted"
    return status  # type: ignore[no-any-return]


def _attributes(inspection: Inspection, plan: _Plan) -> dict[str, Any]:
    """Fixed attributes of the root: its own where nothing speaks against them, or their copy's."""
    own = {key: value for key, value in inspection.attributes.items() if key not in CHANGING}
    copy = inspection.copy or {}
    fixed = dict(own)
    for key, value in copy.items():
        if key not in own:
            if inspection.root is not None:
                plan.actions.append(f"the attribute {key} comes back from its copy in step")
            fixed[key] = value
        elif not same(own[key], value):
            # zarr drops the consolidated metadata when somebody sets an attribute: where they are
            # lost, the change was meant; where they are not, it is damage.
            if inspection.consolidated() is None:
                plan.actions.append(f"the copy in step takes over the attribute {key}")
            else:
                plan.actions.append(
                    f"the attribute {key} is put back to what its copy in step says"
                )
                fixed[key] = value
    if inspection.copy is not None and inspection.root is not None:
        for key in sorted(own.keys() - copy.keys()):
            lost = [name for name in copy.keys() - own.keys() if same(copy[name], own[key])]
            if lost:
                plan.actions.append(f"the attribute {key} goes: it is {lost[0]} with a broken name")
                del fixed[key]
            else:
                plan.actions.append(f"the copy in step takes over the attribute {key}")
    if inspection.root is None and inspection.copy is None:
        plan.actions.append(
            "the attributes of the root are lost, and this run has no copy of them: what config, "
            "optimizer and provenance said is gone"
        )
    for key, value in _least(inspection).items():
        if key not in fixed or not _is_possible(key, fixed[key]):
            if inspection.root is not None or inspection.copy is not None:
                plan.actions.append(f"the attribute {key} is lost; it becomes {value!r}")
            fixed[key] = value
    # In the order of the copy, whose text stays as it is where nothing has changed.
    return {key: fixed[key] for key in (*copy, *fixed)}


def _least(inspection: Inspection) -> dict[str, Any]:
    """What every root says at least, as far as the arrays tell it."""
    stored = inspection.stored(STEP.name)
    chains = [inspection.stored(name) for name in inspection.arrays if is_series(name)]
    delta = any(item is not None and item.chain.kind == "delta" for item in chains)
    rows = stored.shard[0] if stored else block_rows(inspection.arrays[STEP.name])
    values = {
        "trajstore_format": FORMAT,
        "trajstore_version": __version__,
        "created": utc_now(),
        "timeline": "post-step",
        "encoding": "delta" if delta else "portable",
        "block_rows": rows,
        "config": {},
    }
    return {key: values[key] for key in REQUIRED if key in values}


def _is_possible(key: str, value: Any) -> bool:
    possible = {
        "trajstore_format": type(value) is int and 1 <= value <= FORMAT,
        "created": is_moment(value),
        "timeline": value == "post-step",
        "encoding": value in ENCODINGS,
        "block_rows": type(value) is int and value > 0,
        "config": isinstance(value, dict),
    }
    return bool(possible.get(key, True))


def _remove(checked: Checked, plan: _Plan) -> None:
    """Settle which files go."""
    inspection = checked.inspection
    for paths in find_leftovers(inspection, plan.rows).beyond.values():
        plan.remove += paths
    past = sum(map(len, checked.leftovers.beyond.values()))
    if past:
        plan.actions.append(
            f"shards past the commit are removed ({past}): no reader has ever seen them as part of "
            "the run"
        )
    if len(plan.remove) > past:
        plan.actions.append(f"shards of the dropped rows are removed ({len(plan.remove) - past})")
    if checked.leftovers.temporaries:
        plan.temporaries = True
        plan.actions.append(
            f"temporaries of writes that did not end are removed "
            f"({len(checked.leftovers.temporaries)})"
        )
    for path in dict.fromkeys(p.path for p in checked.problems if p.remedy == "remove"):
        plan.remove.append(path)
        faults = [str(problem.message) for problem in checked.problems if problem.path == path]
        plan.actions.append(f"{path.parent.name}/{path.name} is removed: {'; '.join(faults)}")
