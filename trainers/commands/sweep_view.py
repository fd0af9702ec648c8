"""The display of `trajstore sweep`: the status of each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from trajstore.cli.tables import PlainConsole, PlainTable, err, out, table
from trajstore.durations import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trajstore.trainers.sweeps.process_queue import Job

__all__ = ["SweepProgress", "print_jobs", "sweep_facts"]

_STATES = {
    "busy": "waiting: another process writes to this run",
    "waiting": "waiting",
    "running": "recording",
    "skipped": "complete already",
}


class SweepProgress:
    """Status of the runs while the ``with`` block runs: a table on a terminal, else lines.

    Parameters
    ----------
    jobs : sequence of Job
    rows : sequence of int
        Planned rows of each run.
    """

    def __init__(self, jobs: Sequence[Job], rows: Sequence[int]) -> None:
        self._jobs = jobs
        self._rows = rows
        self._shown = ["waiting"] * len(jobs)
        self._live: Live | None = None
        if err.is_terminal:
            # A separate console that wraps lines, unlike `err`.
            self._live = Live(console=PlainConsole(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show the changes since the last call."""
        for number, job in enumerate(self._jobs):
            if job.state != self._shown[number]:
                self._shown[number] = job.state
                if self._live is None:
                    err.print(f"{job.run.name}: {_status_line(job)}")
        if self._live is not None:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        """Return a table of running and failed runs, and counts of the other states."""
        counted = Counter(job.state for job in self._jobs)
        counts = ", ".join(
            f"{number} {_STATES.get(state, state).partition(':')[0]}"
            for state, number in counted.items()
        )
        shown = [
            (job, rows)
            for job, rows in zip(self._jobs, self._rows, strict=True)
            if job.state in ("running", "busy", "failed")
        ]
        return Group(Text(f"{len(self._jobs)} runs: {counts}"), _table(shown))


def print_jobs(jobs: Sequence[Job], rows: Sequence[int]) -> None:
    """Print the status of each run, and the message of each failed run."""
    out.print(_table(zip(jobs, rows, strict=True)), soft_wrap=False)
    for job in jobs:
        if job.state == "failed":
            out.print(f"{job.run.name} failed: {job.message} (full output: {job.log})")


def sweep_facts(jobs: Sequence[Job], threads: int) -> dict[str, Any]:
    """Return the status of each run as JSON values."""
    from trajstore.trainers.sweeps.sweep_folder import committed_rows

    return {
        "threads": threads,
        "runs": [
            {
                "run": str(job.run),
                "status": job.state,
                "committed_rows": committed_rows(job.run),
                "seconds": job.seconds,
                "exit_code": job.exit_code,
                "message": job.message,
                "log": str(job.log),
            }
            for job in jobs
        ],
    }


def _table(jobs: Iterable[tuple[Job, int]]) -> PlainTable:
    from trajstore.trainers.sweeps.sweep_folder import committed_rows

    rows = [
        (
            job.run.name,
            _STATES.get(job.state, job.state),
            f"{committed_rows(job.run):,}",
            f"{planned:,}",
            format_duration(job.seconds) if job.seconds else "",
        )
        for job, planned in jobs
    ]
    columns = ("run", "status", "rows", "planned", "duration")
    return table("", columns, rows, words=(0, 1), fold=True)


def _status_line(job: Job) -> str:
    state = _STATES.get(job.state, job.state)
    after = f" after {format_duration(job.seconds)}" if job.seconds else ""
    message = f": {job.message}" if job.message else ""
    return f"{state}{after}{message}"
