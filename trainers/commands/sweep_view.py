"""What `trajstore sweep` shows: its runs while they are trained, and what became of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from trajstore.cli.tables import PlainConsole, err, out, print_table, table
from trajstore.durations import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trajstore.trainers.sweeps.process_queue import Job

__all__ = ["SweepProgress", "print_jobs", "sweep_facts"]

_STATES = {
    "busy": "waits: another process writes to it",
    "waiting": "waiting",
    "running": "recording",
    "skipped": "complete already",
}


class SweepProgress:
    """A view on a terminal, a line for every change elsewhere; shown while the ``with`` block runs.

    Parameters
    ----------
    jobs : sequence of Job
    rows : sequence of int
        That each run has in the end.
    """

    def __init__(self, jobs: Sequence[Job], rows: Sequence[int]) -> None:
        self._jobs = jobs
        self._rows = rows
        self._shown = ["waiting"] * len(jobs)
        self._live: Live | None = None
        if err.is_terminal:
            # A console of its own, which wraps lines, other than `err`.
            self._live = Live(console=PlainConsole(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show what has changed."""
        for number, job in enumerate(self._jobs):
            if job.state != self._shown[number]:
                self._shown[number] = job.state
                if self._live is None:
                    err.print(Text(f"{job.run.name}: {_status_line(job)}"))
        if self._live is not None:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        """What is going on and what failed; of the others, how many there are."""
        counted = Counter(job.state for job in self._jobs)
        counts = ", ".join(
            f"{number} {_STATES.get(state, state).partition(':')[0]}"
            for state, number in counted.items()
        )
        printed = _table()
        for job, rows in zip(self._jobs, self._rows, strict=True):
            if job.state in ("running", "busy", "failed"):
                _add_row(printed, job, rows)
        return Group(Text(f"{len(self._jobs)} runs: {counts}"), printed)


def print_jobs(jobs: Sequence[Job], rows: Sequence[int]) -> None:
    """Print what became of each run, and why those that failed did."""
    printed = _table()
    for job, planned in zip(jobs, rows, strict=True):
        _add_row(printed, job, planned)
    print_table(printed)
    for job in jobs:
        if job.state == "failed":
            out.print(Text(f"{job.run.name} failed: {job.said} (all it said: {job.log})"))


def sweep_facts(jobs: Sequence[Job], threads: int) -> dict[str, Any]:
    """The same, as JSON values."""
    from trajstore.trainers.sweeps.sweep_folder import committed_rows

    return {
        "threads": threads,
        "runs": [
            {
                "run": str(job.run),
                "state": job.state,
                "committed_rows": committed_rows(job.run),
                "seconds": job.seconds,
                "exit_code": job.exit_code,
                "said": job.said,
                "log": str(job.log),
            }
            for job in jobs
        ],
    }


def _table() -> Any:
    printed = table("", "run", "became of it", "rows", "of", "took", words=(0, 1))
    printed.columns[0].no_wrap = False  # a name goes on below rather than being cut
    printed.columns[0].overflow = "fold"
    return printed


def _add_row(printed: Any, job: Job, rows: int) -> None:
    from trajstore.trainers.sweeps.sweep_folder import committed_rows

    took = format_duration(job.seconds) if job.seconds else ""
    state = _STATES.get(job.state, job.state)
    printed.add_row(job.run.name, state, f"{committed_rows(job.run):,}", f"{rows:,}", took)


def _status_line(job: Job) -> str:
    state = _STATES.get(job.state, job.state)
    after = f" after {format_duration(job.seconds)}" if job.seconds else ""
    said = f": {job.said}" if job.said else ""
    return f"{state}{after}{said}"
