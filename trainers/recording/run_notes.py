"""Notes of a recording: what a run does not hold, or not as the loop suggests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trajstore.errors import RecordingError

__all__ = ["CannotFollow", "RunNotes"]


class CannotFollow(RecordingError):
    """The training has changed so that no row of the run can hold its steps."""


class RunNotes:
    """Sentences about a recording, each with its first step and the number of its steps.

    Parameters
    ----------
    report : callable
        Called with each sentence at the first time.
    strict : bool
        Raise an error in place of a note about a value that is not recorded.

    Attributes
    ----------
    entries : list of dict
        ``note``, ``step`` and ``count``: attribute ``notes`` of the root of a run.
    """

    def __init__(self, report: Callable[[str], None], *, strict: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self.step = 0
        self._report = report
        self.strict = strict

    def add(self, sentence: str) -> None:
        """Note something about the current step.

        Raises
        ------
        RecordingError
            If notes are errors.
        """
        if self.strict:
            raise RecordingError(sentence)
        self.mention(sentence)

    def mention(self, sentence: str) -> None:
        """Note a fact about the current step that is no error."""
        for entry in self.entries:
            if entry["note"] == sentence:
                if entry["last"] != self.step:
                    entry["count"] += 1
                    entry["last"] = self.step
                return
        self.entries.append({"note": sentence, "step": self.step, "last": self.step, "count": 1})
        self._report(sentence)
