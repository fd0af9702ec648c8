"""The exception tree. One class per reaction of the code that catches it."""

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
        Exit code of the command line: 1 for a fault of the run or the data, 2 for one of the call.
    """

    exit_code = 1

    def __str__(self) -> str:
        # KeyError would print the repr of its argument instead of the sentence.
        return " ".join(str(arg) for arg in self.args)


class InvalidArgument(TrajstoreError, ValueError):
    """An argument has the wrong name, type, shape or value; change the call."""

    exit_code = 2


class ConfigError(InvalidArgument):
    """A field of the configuration is unknown or has an invalid value; change it."""


class RunExists(TrajstoreError, FileExistsError):
    """The target exists; choose another one, or overwrite it."""

    exit_code = 2


class RunLocked(TrajstoreError, BlockingIOError):
    """Another process writes to the run; wait for it, or end it."""


class RunNotFound(TrajstoreError, FileNotFoundError):
    """The path does not exist; correct it."""

    exit_code = 2


class MissingExtra(TrajstoreError, ImportError):
    """An optional dependency is not installed; install the extra that the message names.

    Parameters
    ----------
    needing : str
        What needs the extra, as the subject of a sentence.
    extra : str
        Name of the extra.
    otherwise : str
        What the user can do instead, if anything.
    """

    exit_code = 2

    def __init__(self, needing: str, extra: str, otherwise: str = "") -> None:
        super().__init__(needing, extra, otherwise)

    def __str__(self) -> str:
        needing, extra, otherwise = self.args
        command = f"pip install -c constraints.txt '.[{extra}]'"
        return f"{needing} needs the extra {extra}: {command}" + (otherwise and f"; or {otherwise}")


class FormatError(TrajstoreError, ValueError):
    """The data at the path are not a run that this version can read."""


class ObjectStoreError(TrajstoreError, OSError):
    """An object store or web server refused a request or did not answer; see its message."""


class FlushedSubnormals(TrajstoreError, FloatingPointError):
    """A thread replaces subnormal numbers by 0; switch that off."""


class CorpusError(TrajstoreError, ValueError):
    """A text cannot be used for training; use another text."""


class VariableNotRecorded(TrajstoreError, KeyError):
    """A quantity needs a variable that the run does not hold; record it."""


class StepNotFound(TrajstoreError, KeyError):
    """A step is not in the run; choose one that is."""


class NothingToResume(TrajstoreError, RuntimeError):
    """A run cannot be resumed here; resume it where it was recorded, or record it again."""


class RecordingError(TrajstoreError, RuntimeError):
    """The training loop does something that cannot be recorded correctly."""


class WriterClosed(TrajstoreError, RuntimeError):
    """The writer is closed; open the run again to continue."""
