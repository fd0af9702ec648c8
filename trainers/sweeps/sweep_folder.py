"""The folder of a sweep: which of its runs are done, and the threads that all are trained with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.atomic import make_folder, put
from trajstore.trainers.config import MAY_CHANGE, RunConfig
from trajstore.watching.followed_runs import SWEEP, swept_names

__all__ = [
    "committed_rows",
    "is_done",
    "keep_names",
    "planned_rows",
    "settle_threads",
    "threads_of",
]


def is_done(run: Path, config: RunConfig, *, steps_given: bool) -> bool:
    """Whether a run is complete, of this configuration, and has all its steps.

    Parameters
    ----------
    run : Path
        Which need not be there.
    config : RunConfig
    steps_given : bool
        Whether its ``training.steps`` was asked for; a run goes on to its own number otherwise.
    """
    attributes = _attributes(run)
    if attributes.get("status") != "complete" or not attributes.get("config"):
        return False
    recorded = RunConfig.parse(attributes["config"])
    if _essence(recorded) != _essence(config):
        return False
    wanted = config.training.steps if steps_given else recorded.training.steps
    steps: Any = open_group(run)["step"]
    return bool(steps.shape[0]) and int(steps[-1]) >= wanted


def committed_rows(run: Path) -> int:
    """Rows of a run that are committed; 0 where there is none yet."""
    return int(_attributes(run).get("committed_rows", 0))


def planned_rows(config: RunConfig) -> int:
    """Rows that a run of this configuration has in the end."""
    return -(-config.training.steps // config.recording.every) + 1


def threads_of(folder: Path) -> int | None:
    """Threads that the runs of a folder are trained with; None if there is no sweep yet.

    Raises
    ------
    FormatError
        If its file cannot be read.
    """
    file = folder / SWEEP
    try:
        return int(json.loads(file.read_text())["threads"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{file} does not say how many threads the runs are trained with ({error}); write "
            '{"threads": N} to it, with the N that `trajstore info` shows of a run'
        ) from error


def settle_threads(folder: Path, jobs: int, given: int | None, *, keep: bool) -> int:
    """Threads of each process of a sweep: the same for all its runs, whenever they go on.

    The bits of a training depend on how many threads share its sums, so those that the first call
    settles on hold for all that follow, also with other `jobs`: as given, or as OMP_NUM_THREADS
    says, or else the processors divided by `jobs`.

    Parameters
    ----------
    folder : Path
    jobs : int
        Processes at once.
    given : int, optional
    keep : bool
        Write it down.

    Raises
    ------
    InvalidArgument
        If another number has been settled on.
    """
    settled = threads_of(folder)
    if settled is not None:
        if given not in (None, settled):
            raise InvalidArgument(
                f"the runs of {folder} are trained with {settled} threads each, and bits depend on "
                f"that, so they cannot go on with {given}; leave it out, or sweep into another "
                "folder"
            )
        return settled
    threads = given or _from_environment() or max(1, _processors() // jobs)
    if keep:
        make_folder(folder)
        _write(folder, {"threads": threads})
    return threads


def keep_names(folder: Path, names: Iterable[str]) -> None:
    """Write down which runs a sweep has, so that who watches the folder waits for all of them.

    Parameters
    ----------
    folder : Path
        Of which the threads are settled; the names of earlier sweeps stay.
    names : iterable of str
    """
    known = swept_names(folder)
    every = [*known, *(name for name in names if name not in known)]
    if every != known:
        _write(folder, {"threads": threads_of(folder), "runs": every})


def _write(folder: Path, facts: dict[str, Any]) -> None:
    put(folder / SWEEP, [json.dumps(facts).encode() + b"\n"])


def _from_environment() -> int | None:
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) else None


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _attributes(run: Path) -> dict[str, Any]:
    """Attributes of a run; none where it is not there yet, or not whole."""
    try:
        return open_group(run).attrs.asdict()
    except (RunNotFound, FormatError):
        return {}


def _essence(config: RunConfig) -> dict[str, Any]:
    """What a run that goes on must share."""
    free = {*MAY_CHANGE, "training.device"}
    return {field: value for field, value in config.flat().items() if field not in free}
