"""`repair`: a damaged run brought back to its last whole commit.

A repair settles first what the run shall say, as a whole, and then writes what differs: so it can
be interrupted and begun again, and a sound run is left alone. The root is written first, so that no
reader ever sees rows that are on their way out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trajstore.errors import InvalidArgument, RunLocked
from trajstore.integrity.metadata_checks import check_metadata
from trajstore.integrity.repair_plan import RepairPlan, plan_repair
from trajstore.integrity.verify import check_run
from trajstore.store.storage.atomic import flush, flush_tree, put, refuse_links, sweep
from trajstore.store.storage.lock import RunLock, is_written_to
from trajstore.store.storage.remote_lock import RemoteLock, taken_over
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.threads import Progress

__all__ = ["Repair", "repair"]


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What `repair` has done, or would do.

    Attributes
    ----------
    path : Path or RemotePath
    actions : tuple of str
        One sentence each; empty if there is nothing to do.
    unrepaired : tuple of str
        What is wrong and stays so, as it is written down nowhere else.
    rows_before, rows : int
        Committed rows.
    done : bool
        Whether the actions have been carried out.
    """

    path: Location
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


def repair(
    path: RunPath,
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
    path : path-like, str or RemotePath
    yes : bool
        Do it. Twice does no harm, also after a first time that was interrupted.
    threads : int, optional
        That read the run; without it as many as there are processors, at most 8.
    on_progress : callable, optional
        Called with the bytes that have been checked, and those there are.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`, one of a newer format, or one with a link inside.
    RunLocked
        If another process writes to it.
    InvalidArgument
        If `path` is on a web server, which takes nothing.
    OSError
        If something could not be written; another repair goes on from there.

    Examples
    --------
    >>> from pathlib import Path
    >>> Path("gatsby.zarr/W/c.2.0.0").unlink()  # a block of rows is lost
    >>> planned = repair("gatsby.zarr")
    >>> planned.rows_before, planned.rows, planned.done
    (21, 16, False)
    >>> repair("gatsby.zarr", yes=True).done
    True
    >>> repair("gatsby.zarr").actions  # nothing is left to do
    ()
    """
    run = location(path).absolute()
    if isinstance(run, RemotePath) and not run.listed:
        raise InvalidArgument(
            f"cannot repair {run}: a web server takes nothing; copy the run to a folder, repair "
            "that, and put it in the place of this one"
        )
    check_metadata(path)  # before a lock is made beside what is no run
    refuse_links(run)
    with RunLock.acquire(run) if yes or _has_place_for_lock(run) else _unlocked(run) as lock:
        checked = check_run(run, threads=threads, on_progress=on_progress)
        plan = plan_repair(checked)
        if yes:
            if isinstance(lock, RemoteLock) and not lock.is_held():
                raise taken_over(run)
            _carry_out(run, plan)
    return Repair(
        path=run,
        actions=plan.actions,
        unrepaired=plan.unrepaired,
        rows_before=checked.metadata.rows,
        rows=plan.rows,
        done=yes,
    )


def _has_place_for_lock(run: Location) -> bool:
    """Whether to lock what is only looked at: not on a medium that cannot be written to.

    Of an object store, where that is no matter of course, it is never asked for.
    """
    return isinstance(run, Path) and os.access(run.parent, os.W_OK)


@contextlib.contextmanager
def _unlocked(run: Location) -> Iterator[None]:
    if isinstance(run, RemotePath) and is_written_to(run):
        raise RunLocked(f"{run} is being written to by another process; wait for it, or end it")
    yield


def _carry_out(run: Location, plan: RepairPlan) -> None:
    for target, data in plan.documents.items():
        if isinstance(target, Path) and target.parent != run:  # a run that has gone stays gone
            target.parent.mkdir(exist_ok=True)
        put(target, [data])
    for path in plan.removed:
        path.unlink(missing_ok=True)
    if plan.sweeps:
        sweep(run)
    if isinstance(run, Path) and plan.actions:
        # Also the run's name and the rows that stay, which a writer may have left to the system.
        flush_tree(run)
        flush([run.parent])
