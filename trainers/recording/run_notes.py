"""Notes of a recording: what a run does not hold, or not as the loop suggests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trajstore.errors import RecordingError

_MISSING = "there are no rows of steps"


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
        ``note``, ``first_step``, ``last_step`` and the ``count`` of steps.
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
                if entry["last_step"] != self.step:
                    entry["count"] += 1
                    entry["last_step"] = self.step
                return
        steps = {"first_step": self.step, "last_step": self.step, "count": 1}
        self.entries.append({"note": sentence, **steps})
        self._report(sentence)

    def add_missing(self, matrix: str, steps: range) -> None:
        """Note that a run has no rows of some steps, from which the training continues."""
        self.step = steps[-1]
        self.mention(
            f"{_MISSING} {steps[0]} to {steps[-1]} of {matrix}: an earlier recording ended before "
            "they were committed, so the weights at the resumed step were not compared either"
        )
        self.entries[-1] |= {"first_step": steps[0], "count": len(steps)}

    def resumed(self, before: Iterable[Mapping[str, Any]], last_step: int) -> list[dict[str, Any]]:
        """Begin with the notes of a run so far, and return all.

        Those about rows that are missing after `last_step` are left out.
        """
        known = {entry["note"] for entry in self.entries}
        self.entries[:0] = [
            dict(entry)
            for entry in before
            if entry["note"] not in known
            and not (entry["note"].startswith(_MISSING) and entry["last_step"] > last_step)
        ]
        return self.entries
