"""A queue of processes, of which a limited number run at once, and the status of each."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trajstore.store.storage.lock import is_written_to

_INTERVAL = 0.2
_MESSAGE_BYTES = 4096


@dataclass(kw_only=True)
class Job:
    """One process and its status.

    Attributes
    ----------
    run : Path
        The recorded run.
    command : sequence of str
    log : Path
        File to which its output is appended.
    done : callable
        Returns True if the run needs no process.
    state : str
        ``waiting``, ``busy`` (another process writes to the run), ``running``; at the end
        ``skipped``, ``complete``, ``interrupted`` or ``failed``.
    message : str
        Reason of a failure: the last line of its output.
    seconds : float
        Run time.
    exit_code : int or None
        Exit code of the process; if negative, the number of the signal that ended it.
    """

    run: Path
    command: Sequence[str]
    log: Path
    done: Callable[[], bool]
    state: str = "waiting"
    message: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _began: float = 0.0
    _log_began: int = 0

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, unless the run is complete or another process writes to it.

        Its standard input is a pipe from this process, so it closes when this process ends. The
        process has its own group. So Ctrl-C reaches only this process, which stops the other once.
        """
        if is_written_to(self.run):
            self.state = "busy"
            return
        if self.done():
            self.state = "skipped"
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._log_began = log.tell()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
            )
        self._began = time.monotonic()
        self.state = "running"

    def poll(self) -> None:
        """Update the status if the process has ended."""
        if self._process is None or self.state != "running":
            return
        self.seconds = time.monotonic() - self._began
        self.exit_code = self._process.poll()
        if self.exit_code is None:
            return
        if self.exit_code == 0:
            self.state = "complete"
        elif self.exit_code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            self.state = "interrupted"
        else:
            self.state = "failed"
            self.message = self._last_line()
        self.close_input()

    def stop(self) -> None:
        """Request a stop after the current step."""
        if self._process is not None and self.state == "running":
            self._process.send_signal(signal.SIGTERM)

    def close_input(self) -> None:
        """Close the pipe; a process that still runs then stops."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _last_line(self) -> str:
        with open(self.log, "rb") as log:
            end = log.seek(0, 2)
            log.seek(max(self._log_began, end - _MESSAGE_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        output = [line.strip() for line in lines if line.strip()]
        if self.exit_code is not None and self.exit_code < 0:
            return f"ended by {signal.Signals(-self.exit_code).name}"
        return output[-1].removeprefix("trajstore: ") if output else f"exit code {self.exit_code}"


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    environment: Mapping[str, str],
    stop: Callable[[], bool],
    report: Callable[[], None],
) -> None:
    """Run processes until each has ended; after a stop request, start no more processes.

    A failure does not stop the others. A run that another process writes to has to wait, for
    example for a process of a killed sweep.

    Parameters
    ----------
    jobs : sequence of Job
        In the order in which they start.
    at_once : int
        Maximum number of simultaneous processes.
    environment : mapping
        Environment variables of the processes.
    stop : callable
        Returns True to request a stop; called several times a second.
    report : callable
        Called several times a second.
    """
    stopping = False
    try:
        while True:
            for job in jobs:
                job.poll()
            if stop() and not stopping:
                stopping = True
                for job in jobs:
                    job.stop()
            if not stopping:
                _start_some(jobs, at_once, environment)
            report()
            left = ("running",) if stopping else ("waiting", "busy", "running")
            if not any(job.state in left for job in jobs):
                return
            time.sleep(_INTERVAL)  # processes of several kinds have no common wait on all systems
    finally:
        for job in jobs:
            job.close_input()


def _start_some(jobs: Sequence[Job], at_once: int, environment: Mapping[str, str]) -> None:
    running = sum(job.state == "running" for job in jobs)
    for job in jobs:
        if running >= at_once:
            return
        if job.state in ("waiting", "busy"):
            job.start(environment)
            running += job.state == "running"
