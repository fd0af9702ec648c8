"""What a repair shall do: decided whole, from what is known of a run, before anything is written.

What can be rebuilt is rebuilt from what is written down twice; what cannot costs the rows from
there on. Each decision comes with the sentences that say it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trajstore.integrity.array_json_checks import block_rows, is_series
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.fingerprint_checks import made_again
from trajstore.integrity.leftovers import find_leftovers
from trajstore.integrity.problem import Problem
from trajstore.integrity.root_attribute_checks import fixed_attributes
from trajstore.integrity.verify import CheckedRun
from trajstore.schema import ENCODING, FORMAT, STEP
from trajstore.store.metadata.document_form import (
    REQUIRED,
    STATUSES,
    Status,
    is_digest,
    is_moment,
    is_possible,
)
from trajstore.store.metadata.fingerprint import CONTENT, FINGERPRINT
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.storage.remote_path import Location, key_within
from trajstore.strict_json import Document, same, utc_now
from trajstore.version import __version__

__all__ = ["RepairPlan", "plan_repair"]


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """What shall be written and removed, in this order, and why.

    Attributes
    ----------
    rows : int
        That stay.
    documents : dict of Path or RemotePath to bytes
        To be written.
    removed : tuple of Path or RemotePath
        To be removed.
    sweeps : bool
        Whether there are temporaries to be removed.
    actions : tuple of str
        One sentence each; empty if there is nothing to do.
    unrepaired : tuple of str
        What is wrong and stays so.
    """

    rows: int
    documents: dict[Location, bytes]
    removed: tuple[Location, ...]
    sweeps: bool
    actions: tuple[str, ...]
    unrepaired: tuple[str, ...]


def plan_repair(checked: CheckedRun) -> RepairPlan:
    """Decide how a run is brought back to its last whole commit."""
    metadata = checked.metadata
    # A document that the system refuses may be sound: nothing is written in its place, and no row
    # is dropped by what the others say.
    if metadata.refused or STEP.name not in metadata.arrays:
        return RepairPlan(
            rows=metadata.rows,
            documents={},
            removed=(),
            sweeps=False,
            actions=(),
            unrepaired=tuple(map(str, checked.found.problems)),
        )
    lost = _lost_blocks(checked)
    rows = min((row for row, _ in lost), default=metadata.rows)
    attributes, on_attributes = _attributes(metadata)
    status = _status(metadata, rows)
    digests, on_digests = _digests(checked, rows, attributes, changed=bool(on_attributes))
    changed = _changed_documents(metadata, rows, attributes, status, digests)
    beyond = [path for paths in find_leftovers(metadata, rows).beyond.values() for path in paths]
    broken = list(dict.fromkeys(p.path for p in checked.found.problems if p.remedy == "remove"))
    lasting = [problem for problem in checked.found.problems if _is_lasting(metadata, problem)]
    return RepairPlan(
        rows=rows,
        documents={
            path: json.dumps(document, indent=1, allow_nan=False).encode()
            for path, document in changed.items()
        },
        removed=(*beyond, *broken),
        sweeps=bool(checked.leftovers.temporaries),
        actions=(
            *_on_rows(metadata, rows, lost),
            *on_attributes,
            *on_digests,
            *_on_status(metadata),
            *_on_documents(checked, rows, changed),
            *_on_removed(checked, beyond, broken),
        ),
        unrepaired=tuple(map(str, lasting)),
    )


def _lost_blocks(checked: CheckedRun) -> list[tuple[int, Problem]]:
    """Problems that cost rows, and the first row that each costs."""
    arrays = checked.metadata.arrays
    return [
        (problem.block * block_rows(arrays[problem.array]), problem)
        for problem in checked.found.problems
        if problem.remedy == "cut" and problem.array is not None and problem.block is not None
    ]


def _on_rows(
    metadata: CheckedMetadata, rows: int, lost: list[tuple[int, Problem]]
) -> Iterator[str]:
    if not lost:
        return
    _, first = min(lost, key=lambda item: item[0])
    rest = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    left = f"{rows} stay" if rows else "none stay"
    yield (
        f"{metadata.rows - rows} of {metadata.rows} rows are dropped, those from row {rows} on; "
        f"{left}: {first}{rest}"
    )


def _attributes(metadata: CheckedMetadata) -> tuple[Document, list[str]]:
    """Fixed attributes of the root, and what is done to them.

    Its own where nothing speaks against them, or their copy's.
    """
    own, copy = fixed_attributes(metadata.attributes), metadata.copy or {}
    settled, actions = dict(own), []
    for key, value in copy.items():
        if key not in own:
            if metadata.root is not None:
                actions.append(f"the attribute {key} comes back from its copy in step")
            settled[key] = value
        elif not same(own[key], value):
            # zarr drops the consolidated metadata when somebody sets an attribute: where they are
            # lost, the change was meant; where they are not, it is damage.
            if metadata.consolidated() is None:
                actions.append(f"the copy in step takes over the attribute {key}")
            else:
                actions.append(f"the attribute {key} is put back to what its copy in step says")
                settled[key] = value
    if metadata.copy is not None and metadata.root is not None:
        for key in sorted(own.keys() - copy.keys()):
            lost = [name for name in copy.keys() - own.keys() if same(copy[name], own[key])]
            if lost:
                actions.append(f"the attribute {key} goes: it is {lost[0]} with a broken name")
                del settled[key]
            else:
                actions.append(f"the copy in step takes over the attribute {key}")
    if metadata.root is None and metadata.copy is None:
        actions.append(
            "the attributes of the root are lost, and this run has no copy of them: what config, "
            "optimizer and provenance said is gone"
        )
    for key, value in _least_attributes(metadata).items():
        if key not in settled or not is_possible(key, settled[key]):
            if metadata.root is not None or metadata.copy is not None:
                actions.append(f"the attribute {key} is lost; it becomes {value!r}")
            settled[key] = value
    # In the order of the copy, whose text stays as it is where nothing has changed.
    return {key: settled[key] for key in (*copy, *settled)}, actions


def _least_attributes(metadata: CheckedMetadata) -> Document:
    """What every root says at least, as far as the arrays tell it."""
    form = metadata.stored(STEP.name).form
    values = {
        "trajstore_format": FORMAT,
        "trajstore_version": __version__,
        "created": utc_now(),
        "timeline": "post-step",
        "encoding": ENCODING,
        "block_rows": form.shape[0],
        "config": {},
        "runs": [list(entry) for entry in form.runs],
    }
    return {key: values[key] for key in REQUIRED if key in values}


def _digests(
    checked: CheckedRun, rows: int, attributes: Document, *, changed: bool
) -> tuple[dict[str, str], list[str]]:
    """Content digest and fingerprint of the run afterwards, and what is done to them.

    Those of the root where they can be right: what has changed in secret is not made good.
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
        return {}, ["the fingerprint is lost: not all that it is made of can be read"]
    return found.attributes(), ["the fingerprint is made again, of what is stored"] if lost else []


def _status(metadata: CheckedMetadata, rows: int) -> Status:
    """Status of the run afterwards: that of a recording that did not end, unless all is there."""
    status = metadata.attributes.get("status")
    if status not in STATUSES or status == "recording" or rows < metadata.rows:
        return "interrupted"
    return status  # type: ignore[no-any-return]


def _on_status(metadata: CheckedMetadata) -> Iterator[str]:
    if metadata.attributes.get("status") == "recording":
        yield "its status becomes interrupted: nobody is recording it any more"


def _changed_documents(
    metadata: CheckedMetadata,
    rows: int,
    attributes: Document,
    status: Status,
    digests: dict[str, str],
) -> dict[Location, Document]:
    """Documents that say something else than they shall, as they shall be, the root first."""
    arrays, listed = metadata.arrays, metadata.consolidated() or {}
    documents = RunMetadata(arrays, attributes)
    root = json.loads(documents.root(rows, status, digests))
    targets = root["consolidated_metadata"]["metadata"]
    # What is somebody else's, or unreadable in both places, stays to the letter.
    strange = {
        name: entry
        for name, entry in listed.items()
        if name not in arrays and not _is_dropped(metadata, name)
    }
    order = dict.fromkeys([*listed, *targets])
    targets |= strange
    root["consolidated_metadata"]["metadata"] = {
        name: targets[name] for name in order if name in targets
    }
    changed: dict[Location, Document] = {}
    if not _same_root(root, metadata.root):
        changed[metadata.path / DOCUMENT] = root
    for name in arrays:
        announces = name == STEP.name and metadata.announced
        if announces or not same(targets[name], metadata.own[name]):
            changed[metadata.path / name / DOCUMENT] = targets[name]
    return changed


def _is_dropped(metadata: CheckedMetadata, name: str) -> bool:
    """Whether an array is an entry of the root and nothing else, of a name that nobody knows."""
    return (
        name not in metadata.arrays and not is_series(name) and not (metadata.path / name).exists()
    )


def _same_root(target: dict[str, Any], root: Document | None) -> bool:
    """Whether a root needs no writing; the time of its last change is no reason to."""
    if root is None or not isinstance(root.get("attributes"), dict):
        return False
    moment = root["attributes"].get("updated")
    if not is_moment(moment):
        return False
    return same(target | {"attributes": target["attributes"] | {"updated": moment}}, root)


def _on_documents(
    checked: CheckedRun, rows: int, changed: dict[Location, Document]
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
            yield f"{what} is written anew: {'; '.join(reasons)}"
        elif own is not None and own["shape"][0] > metadata.rows:
            yield (
                f"{what} goes back from {own['shape'][0]} rows to {rows}: the others were never "
                "committed"
            )
        elif metadata.announced:
            yield f"{what} no longer says what a writer was about to make of the root's attributes"


def _on_removed(
    checked: CheckedRun, beyond: list[Location], broken: list[Location]
) -> Iterator[str]:
    past = sum(map(len, checked.leftovers.beyond.values()))
    if past:
        yield (
            f"shards past the commit are removed ({past}): no reader has ever seen them as part of "
            "the run"
        )
    if len(beyond) > past:
        yield f"shards of the dropped rows are removed ({len(beyond) - past})"
    if checked.leftovers.temporaries:
        count = len(checked.leftovers.temporaries)
        yield f"temporaries of writes that did not end are removed ({count})"
    for path in broken:
        faults = [problem.message for problem in checked.found.problems if problem.path == path]
        yield f"{path.parent.name}/{path.name} is removed: {'; '.join(faults)}"


def _is_lasting(metadata: CheckedMetadata, problem: Problem) -> bool:
    """Whether no repair can help."""
    if problem.remedy != "rewrite":
        return problem.remedy == "none"
    name = problem.array
    return name is not None and name not in metadata.arrays and not _is_dropped(metadata, name)
