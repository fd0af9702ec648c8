"""The one exception tree. Grouped by what whoever catches it would do about it."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CorpusError",
    "FlushedSubnormals",
    "FormatError",
    "InvalidArgument",
    "MissingExtra",
    "NothingToResume",
    "ObjectStoreError",
    "RecordingError",
    "RunExists",
    "RunLocked",
    "RunNotFound",
    "StepNotFound",
    "TrajstoreError",
    "VariableNotRecorded",
    "WriterClosed",
]


class TrajstoreError(Exception):
    """Root of every error that trajstore raises on purpose.

    Attributes
    ----------
    exit_code : int
        What the command line exits with: 1 when the run or the data is wrong, 2 when the call is.
    """

    exit_code = 1

    def __str__(self) -> str:
        # KeyError would show the repr of its argument; a sentence is wanted everywhere.
        return " ".join(str(arg) for arg in self.args)


class InvalidArgument(TrajstoreError, ValueError):
    """An argument has the wrong name, type, shape or value; change the call."""

    exit_code = 2


class ConfigError(InvalidArgument):
    """A configuration field is unknown or its value impossible; change the configuration."""


class RunExists(TrajstoreError, FileExistsError):
    """The target is already there; choose another one, or ask to overwrite."""

    exit_code = 2


class RunLocked(TrajstoreError, BlockingIOError):
    """Another process writes to the run; wait for it, or end it."""


class RunNotFound(TrajstoreError, FileNotFoundError):
    """There is nothing at the path; correct it."""

    exit_code = 2


class MissingExtra(TrajstoreError, ImportError):
    """An optional dependency is not installed; install the extra that the message names."""

    exit_code = 2


class FormatError(TrajstoreError, ValueError):
    """What is at the path is not a run that this version can read."""


class ObjectStoreError(TrajstoreError, OSError):
    """An object store or web server refuses, or has not answered for long; see what it says."""


class FlushedSubnormals(TrajstoreError, FloatingPointError):
    """A thread replaces subnormal numbers by 0; switch that off."""


class CorpusError(TrajstoreError, ValueError):
    """A text cannot be trained on as it is; use another one."""


class VariableNotRecorded(TrajstoreError, KeyError):
    """A question needs a variable that the run does not hold; record it."""


class StepNotFound(TrajstoreError, KeyError):
    """A step is not in the run; ask for one that is."""


class NothingToResume(TrajstoreError, RuntimeError):
    """A run cannot go on from where it is; go on where it was recorded, or record it anew."""


class RecordingError(TrajstoreError, RuntimeError):
    """The training loop does something that cannot be recorded truthfully."""


class WriterClosed(TrajstoreError, RuntimeError):
    """The writer is closed; open the run again to go on."""
