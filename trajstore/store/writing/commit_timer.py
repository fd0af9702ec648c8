"""When rows are committed that are no whole block yet: so many seconds after the last commit.

A thread of its own looks after it, so that a row is committed also while the next one takes long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from trajstore.errors import InvalidArgument

__all__ = ["COMMIT_EVERY", "CommitTimer", "check_commit_every"]

COMMIT_EVERY = 10.0
"""Seconds from one commit to the next, where nothing else is asked for."""

_PAUSE = 5  # times what the last such commit took: so they take a sixth of the time at most
_ATTEMPTS = 10  # in the time of one pause, while something is being written


def check_commit_every(seconds: float | None) -> None:
    """Insist on a time from one commit to the next.

    Raises
    ------
    InvalidArgument
        If it is not positive, or not finite.
    """
    if seconds is not None and not (0 < seconds < math.inf):
        raise InvalidArgument(
            f"commit_every: got {seconds}, expected seconds above 0, or None for whole blocks only"
        )


class CommitTimer:
    """Has the rows of a writer committed every so many seconds.

    Parameters
    ----------
    every : float
        Seconds after the last commit. Where such commits take long, it is more: five times what
        the last one took.
    commit : callable
        Begins to commit what is not committed, if there is anything, and returns at once; returns
        False if it could not begin because something is being written, and None when the writer
        is no more.
    clock : callable
        Seconds.

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
        # A daemon: a recording that nobody closes does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="trajstore-timer", daemon=True)

    def start(self) -> None:
        """Begin to look after it, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Commit no more; what was begun goes on."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def committed(self, *, by_time: bool) -> None:
        """Note that a commit is done; `by_time` if it is one that this timer has begun."""
        self._last = self._clock()
        if by_time:
            self._took = self._last - self._begun

    def commit_if_due(self) -> float | None:
        """Begin a commit if it is time.

        Returns
        -------
        float or None
            Seconds until it makes sense to call again; None when the writer is no more.
        """
        now = self._clock()
        due = self._last + max(self._every, _PAUSE * self._took)
        if now < due:
            return due - now
        before, self._begun = self._begun, now
        begun = self._commit()
        if begun is False:  # what was begun before may still be on its way
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
