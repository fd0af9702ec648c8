"""A writer's timer without a thread, whose clock a test moves on, and a commit at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trajstore import RunWriter
from trajstore.store.writing.commit import CommitTimer


class StillTimer(CommitTimer):
    """A writer's timer without a thread; it asks when a test moves its clock on.

    Attributes
    ----------
    now : float
        What the clock shows.
    """

    def __init__(self, every: float, commit: Callable[[], bool | None]) -> None:
        self.now = 0.0
        super().__init__(every, commit, clock=lambda: self.now)

    def start(self) -> None:
        """Start no thread."""

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have every writer that is made from now on take it."""
        monkeypatch.setattr("trajstore.store.writing.blocks.CommitTimer", cls)

    @classmethod
    def of(cls, writer: RunWriter) -> StillTimer:
        """That of a writer."""
        timer: Any = writer._blocks._timer
        assert isinstance(timer, cls)
        return timer


def commit_now(writer: RunWriter) -> None:
    """Have what is there committed as the timer does, and wait for that."""
    pending = writer._blocks._last
    if pending is not None:
        pending.result()
    assert writer._blocks._commit_unfinished()
    pending = writer._blocks._last
    if pending is not None:
        pending.result()
