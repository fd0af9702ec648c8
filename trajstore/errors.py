"""The exception tree, and parts of messages: suggestions, missing extras.

There is one class per reaction of the code that catches it. A message names an argument as Python
spells it, such as ``overwrite=True``; `trajstore.cli.output.in_command` makes an option of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would take most of the time of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

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


_SYNONYMS = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "weight": "w",
    "weights": "w",
}
"""Names of other programs that are spelled too differently for a search by similarity."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, as the continuation of an error message.

    Parameters
    ----------
    name : str
        The typed name.
    known : iterable of str
        The valid names.

    Returns
    -------
    str
        `` (did you mean 'NAME'?)``; empty if no name is near.

    Examples
    --------
    >>> f"there is no preset 'gatsbi'{did_you_mean('gatsbi', ['gatsby', 'duckling'])}"
    "there is no preset 'gatsbi' (did you mean 'gatsby'?)"
    >>> did_you_mean("learning_rate", ["name", "lr"])
    " (did you mean 'lr'?)"
    >>> did_you_mean("weights", ["W", "grad"])
    " (did you mean 'W'?)"
    >>> did_you_mean("moby-dick", ["gatsby", "duckling"])
    ''
    """
    import difflib

    folded = {_folded(known_name): known_name for known_name in known}
    typed = _folded(name)
    nearest = [_SYNONYMS[typed]] if _SYNONYMS.get(typed) in folded else []
    nearest += difflib.get_close_matches(typed, folded, n=1)
    # difflib misses half of all swapped letters: to it, rl is not near lr.
    nearest += [known_name for known_name in folded if sorted(known_name) == sorted(typed)]
    nearest += [known_name for known_name in folded if typed and typed == _initials(known_name)]
    nearest += [
        known_name for known_name in folded if known_name and known_name == _initials(typed)
    ]
    return f" (did you mean {folded[nearest[0]]!r}?)" if nearest else ""


def _initials(name: str) -> str:
    """Initials of a name of several words: lr for learning_rate. Otherwise empty."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


class needs_extra:  # noqa: N801  # used like a function
    """Replace the error of a missing package by one that names its extra.

    A context manager, or a decorator of a function.

    Parameters
    ----------
    needing, extra, otherwise : str
        As for `MissingExtra`.

    Raises
    ------
    MissingExtra
        If an import in the block fails because a package is not installed.

    Examples
    --------
    >>> with needs_extra("a figure", "plot"):
    ...     import no_such_package
    Traceback (most recent call last):
    trajstore.errors.MissingExtra: a figure needs the extra plot: pip install -c ...
    """

    def __init__(self, needing: str, extra: str, otherwise: str = "") -> None:
        self._missing = needing, extra, otherwise

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, ModuleNotFoundError):
            return
        if (error.name or "").partition(".")[0] != "trajstore":
            raise MissingExtra(*self._missing) from error

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        import functools

        @functools.wraps(function)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            with self:
                return function(*arguments, **options)

        return checked
