"""The display of `trajstore sweep`: the status of each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from trajstore.cli.tables import err, out, table
from trajstore.durations import format_duration

if TYPE_CHECKING:
    from trajstore.trainers.sweeps.process_queue import Job

_STATES = {
    "busy": "waiting: another process writes to this run",
    "waiting": "waiting",
    "running": "recording",
    "skipped": "complete already",
}


def status_lines(jobs: Sequence[Job]) -> Callable[[], None]:
    """Return a function that prints the runs whose status has changed since its last call."""
    shown = ["waiting"] * len(jobs)

    def show() -> None:
        for number, job in enumerate(jobs):
            if job.state != shown[number]:
                shown[number] = job.state
                err.print(Text(f"{job.run.name}: {_status_line(job)}"))

    return show


def print_jobs(jobs: Sequence[Job], rows: Sequence[int]) -> None:
    """Print the status of each run, and the message of each failed run."""
    from trajstore.trainers.sweeps.sweep_folder import committed_rows

    found = [
        (
            job.run.name,
            _STATES.get(job.state, job.state),
            f"{committed_rows(job.run):,}",
            f"{planned:,}",
            format_duration(job.seconds) if job.seconds else "",
        )
        for job, planned in zip(jobs, rows, strict=True)
    ]
    columns = ("run", "status", "rows", "planned", "duration")
    out.print(table("", columns, found, words=(0, 1), fold=True), soft_wrap=False)
    for job in jobs:
        if job.state == "failed":
            out.print(f"{job.run.name} failed: {job.message} (full output: {job.log})")


def _status_line(job: Job) -> str:
    state = _STATES.get(job.state, job.state)
    after = f" after {format_duration(job.seconds)}" if job.seconds else ""
    message = f": {job.message}" if job.message else ""
    return f"{state}{after}{message}"
