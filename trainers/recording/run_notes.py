"""Notes of a recording: what a run does not hold, or not as the loop suggests."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trajstore.errors import RecordingError
from trajstore.store.metadata.metadata_form import UNPROVEN
from trajstore.store.metadata.zarr_json import notes_until

_MOST_RANGES = 1000
"""Maximum number of ranges of a note, which every commit writes; the last one then grows."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without space."""

_FAILED = (*FULL, errno.EIO, errno.EROFS)


class CannotFollow(RecordingError):
    """The training has changed so that no row of the run can hold its steps."""


def file_error(error: BaseException | None) -> OSError | None:
    """Return an error, or the one of its causes, that is about a file; None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


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
        ``note``, ``first_step``, ``last_step`` and the ``count`` of steps. ``unproven``, if any:
        inclusive ranges of the steps that do not follow from the recorded values alone.
    """

    def __init__(self, report: Callable[[str], None], *, strict: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self.step = 0
        self._report = report
        self.strict = strict

    def add(self, sentence: str, *, unproven: bool = False) -> None:
        """Note something about the current step.

        Raises
        ------
        RecordingError
            If notes are errors.
        """
        if self.strict:
            raise RecordingError(sentence)
        self.mention(sentence, unproven=unproven)

    def ends_training(self, error: BaseException, *, has_begun: bool) -> bool:
        """Return True if the training has to know an error, and not only the recording ends.

        That is so for an interruption, a full or failed disk, a loop that cannot be recorded, and
        every error if notes are errors. Other errors of files, such as a folder that is gone, are
        the training's business only until the recording `has_begun`.
        """
        if self.strict or not isinstance(error, Exception):
            return True
        if (of_file := file_error(error)) is not None:
            return not has_begun or of_file.errno in _FAILED
        return isinstance(error, RecordingError) and not isinstance(error, CannotFollow)

    def mention(self, sentence: str, *, unproven: bool = False) -> None:
        """Note a fact about the current step that is no error.

        If the step is `unproven`, a replay does not compare it, and gives the sentence as reason.
        """
        if (entry := next((one for one in self.entries if one["note"] == sentence), None)) is None:
            steps = {"first_step": self.step, "last_step": self.step, "count": 1}
            entry = {"note": sentence, **steps}
            self.entries.append(entry)
            self._report(sentence)
        elif entry["last_step"] != self.step:
            entry["count"] += 1
            entry["last_step"] = self.step
        if unproven:
            ranges = entry.setdefault(UNPROVEN, [])
            if ranges and (self.step <= ranges[-1][1] + 1 or len(ranges) >= _MOST_RANGES):
                ranges[-1][1] = self.step
            else:
                ranges.append([self.step, self.step])

    def add_missing(self, matrix: str, steps: range) -> None:
        """Note that a run has no rows of some steps, from which the training continues."""
        self.step = steps[-1]
        self.mention(
            f"there are no rows of steps {steps[0]} to {steps[-1]} of {matrix}: an earlier "
            "recording ended before they were committed, so the weights at the resumed step were "
            "not compared either"
        )
        self.entries[-1] |= {"first_step": steps[0], "count": len(steps)}

    def resumed(self, before: Iterable[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
        """Begin with the notes of a run up to a step, and return all."""
        own = {entry["note"]: entry for entry in self.entries}
        earlier = []
        for entry in notes_until(before, step):
            if (known := own.get(entry["note"])) is None:
                earlier.append(entry)
                continue
            if entry["last_step"] < known["first_step"]:
                known["count"] += entry["count"]
            known["first_step"] = min(entry["first_step"], known["first_step"])
            if ranges := entry.get(UNPROVEN):
                more = [one for one in known.get(UNPROVEN, []) if one not in ranges]
                known[UNPROVEN] = ranges + more
        self.entries[:0] = earlier
        return self.entries
