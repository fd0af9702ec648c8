"""`repair`: restore a damaged run to its last complete commit.

A repair first determines all metadata, and then writes the differences. So it can be
interrupted and repeated, and a sound run stays unchanged. It writes the root first, so readers
never see rows that it drops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument, RunLocked
from trajstore.integrity.metadata_checks import check_metadata
from trajstore.integrity.repair_plan import Repair, RepairPlan, plan_repair
from trajstore.integrity.verify import check_run
from trajstore.store.storage.atomic import (
    check_writable,
    flush,
    flush_tree,
    put,
    refuse_links,
    sweep,
)
from trajstore.store.storage.lock import RemoteLock, RunLock, is_written_to, taken_over
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.threads import Progress


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
    takes_lock = not dry_run or _can_lock(run)
    with RunLock.acquire(run) if takes_lock else _unlocked(run) as lock:
        checked = check_run(run, threads=threads, on_progress=on_progress)
        plan = plan_repair(checked)
        if on_plan is not None:
            on_plan(plan.report)
        if not dry_run:
            if isinstance(lock, RemoteLock) and not lock.is_held():
                raise taken_over(run)
            _carry_out(run, plan)
    return replace(plan.report, done=not dry_run)


def _can_lock(run: Location) -> bool:
    """True if the folder of a run is local, and a file can be created in it."""
    if not isinstance(run, Path):
        return False
    try:
        check_writable(run)
    except InvalidArgument:
        return False
    return True


@contextlib.contextmanager
def _unlocked(run: Location) -> Iterator[None]:
    if isinstance(run, RemotePath) and is_written_to(run):
        raise RunLocked(f"another process is writing to {run}; wait for it, or end it")
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
