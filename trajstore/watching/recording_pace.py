"""How fast a run grows, by its commits, and how long it will take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["RecordingPace"]

_WINDOW = 120.0  # seconds: long against the time between commits, short against a training


@dataclass(frozen=True, kw_only=True)
class _Commit:
    at: float
    rows: int
    step: int


class RecordingPace:
    """Rows and steps a second over the last two minutes of commits.

    Until a second commit is seen, or where the run does not grow any more, it is the average since
    the run was created; a run that was gone on with has none, as nobody knows how long it rested.
    """

    def __init__(self) -> None:
        self._commits: deque[_Commit] = deque()
        self._created = False  # whether the first is no commit, but the creation

    def see(self, at: float, rows: int, step: int) -> None:
        """Take note of a commit: its time in seconds, and what it made visible."""
        if self._commits and rows < self._commits[-1].rows:
            self._commits.clear()  # cut: it grows from there
            self._created = False
        elif self._commits and rows == self._commits[-1].rows:
            return
        elif self._created and len(self._commits) == 2:
            self._commits.popleft()  # between which and the first step much time may have passed
            self._created = False
        self._commits.append(_Commit(at=at, rows=rows, step=step))
        while len(self._commits) > 2 and self._commits[1].at < at - _WINDOW:
            self._commits.popleft()

    def start(self, at: float) -> None:
        """Take note of when the run was created, without rows."""
        if not self._commits:
            self._commits.append(_Commit(at=at, rows=0, step=0))
            self._created = True

    @property
    def rows_per_second(self) -> float | None:
        """None where nothing is known yet."""
        return self._rate("rows")

    def remaining(self, total: int | None, now: float) -> float | None:
        """Seconds until step `total`; None where that, or the pace, is not known."""
        steps = self._rate("step")
        if total is None or not steps:
            return None
        last = self._commits[-1]
        return max((total - last.step) / steps - (now - last.at), 0.0)

    def _rate(self, what: str) -> float | None:
        if len(self._commits) < 2:
            return None
        first, last = self._commits[0], self._commits[-1]
        seconds = last.at - first.at
        if seconds <= 0:
            return None
        grown: int = getattr(last, what) - getattr(first, what)
        return grown / seconds
