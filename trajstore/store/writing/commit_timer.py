"""Commits of unfinished blocks, a given number of seconds after the last commit.

They run in a separate thread, so that rows are committed even while the next step takes long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from trajstore.errors import InvalidArgument

COMMIT_EVERY = 10.0
"""Default of the seconds between commits."""

_PAUSE = 5  # pause per duration of the last such commit: they use at most a sixth of the time
_ATTEMPTS = 10  # attempts in the time of one pause, while another write is running


def check_commit_every(seconds: float | None) -> None:
    """Raise an error unless the seconds between commits are valid.

    Raises
    ------
    InvalidArgument
        If they are not positive, or not finite.
    """
    if seconds is not None and not (0 < seconds < math.inf):
        raise InvalidArgument(
            f"commit_every: got {seconds}, expected seconds above 0, or None for whole blocks only"
        )


class CommitTimer:
    """Commits the rows of a writer at intervals.

    Parameters
    ----------
    every : float
        Seconds after the last commit, but at least five times the duration of the last timed
        commit.
    commit : callable
        Starts a commit of uncommitted rows, if there are any, and returns at once. Returns False if
        another write is running, and None if the writer no longer exists.
    clock : callable
        Returns seconds.

    Examples
    --------
    >>> now = 0.0
    >>> timer = CommitTimer(10.0, lambda: True, clock=lambda: now)
    >>> now = 4.0
    >>> timer.commit_if_due()
    6.0
    """

    def __init__(
        self,
        every: float,
        commit: Callable[[], bool | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._commit = commit
        self._clock = clock
        self._last = self._begun = clock()
        self._took = 0.0
        self._stopped = threading.Event()
        # A daemon, so that a recording that is never closed does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="trajstore-timer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A commit that has started continues."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def committed(self, *, by_time: bool) -> None:
        """Record the end of a commit. `by_time` is True if this timer started it."""
        self._last = self._clock()
        if by_time:
            self._took = self._last - self._begun

    def commit_if_due(self) -> float | None:
        """Start a commit if it is due.

        Returns
        -------
        float or None
            Seconds until the next call; None if the writer no longer exists.
        """
        now = self._clock()
        if now < (due := self._last + max(self._every, _PAUSE * self._took)):
            return due - now
        before, self._begun = self._begun, now
        begun = self._commit()
        if begun is False:  # the previous commit may still be running
            self._begun = before
        if begun is None:
            return None
        return self._every if begun else self._every / _ATTEMPTS

    def _run(self) -> None:
        seconds: float | None = self._every
        while seconds is not None:
            if self._stopped.wait(min(seconds, threading.TIMEOUT_MAX)):
                return
            seconds = self.commit_if_due()
