"""`repair`: a damaged run brought back to its last whole commit.

A repair settles first what the run shall say, as a whole, and then writes what differs: so it can
be interrupted and begun again, and a sound run is left alone. The root is written first, so that no
reader ever sees rows that are on their way out.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trajstore.errors import InvalidArgument
from trajstore.integrity.metadata_checks import check_metadata
from trajstore.integrity.repair_plan import RepairPlan, plan_repair
from trajstore.integrity.verify import check_run
from trajstore.store.atomic import put, sweep
from trajstore.store.inner_links import refuse_links
from trajstore.store.lock import RunLock
from trajstore.threads import Progress

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
        If there is no run at `path`, one of a newer format, or one with a link inside.
    RunLocked
        If another process writes to it.
    InvalidArgument
        If `path` is an address.
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
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(f"cannot repair {text}: copy the run to a local folder first")
    run = Path(text).absolute()
    check_metadata(text)  # before a lock is made beside what is no run
    refuse_links(run)
    # A copy on a medium that cannot be written to has no writer, and no place for a lock.
    locked = yes or os.access(run.parent, os.W_OK)
    with RunLock.acquire(run) if locked else contextlib.nullcontext():
        checked = check_run(run, threads=threads, on_progress=on_progress)
        plan = plan_repair(checked)
        if yes:
            _carry_out(run, plan)
    return Repair(
        path=run,
        actions=plan.actions,
        unrepaired=plan.unrepaired,
        rows_before=checked.metadata.rows,
        rows=plan.rows,
        done=yes,
    )


def _carry_out(run: Path, plan: RepairPlan) -> None:
    for target, data in plan.documents.items():
        target.parent.mkdir(exist_ok=True)
        put(target, [data], fsync=True)
    for path in plan.removed:
        path.unlink(missing_ok=True)
    if plan.sweeps:
        sweep(run)
