"""The folder of a sweep: its complete runs and the number of threads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.atomic import make_folder, put
from trajstore.store.storage.remote_path import Location
from trajstore.threads import threads_of_each
from trajstore.trainers.config import MAY_CHANGE, RunConfig
from trajstore.trainers.runs.matrix_runs import existing_runs, planned_runs
from trajstore.watching.followed_runs import SWEEP, swept_names


def is_done(run: Path, config: RunConfig, *, steps_given: bool) -> bool:
    """Return True if a run is complete, has this configuration and has all its steps.

    Parameters
    ----------
    run : Path
        It need not exist.
    config : RunConfig
    steps_given : bool
        True if ``training.steps`` was set; otherwise a run keeps its recorded number of steps.
    """
    if existing_runs(run) != planned_runs(run, config):
        return False
    found = [_attributes(one) for one in existing_runs(run)]
    attributes = found[0]
    if {one.get("status") for one in found} != {"complete"} or not attributes.get("config"):
        return False
    recorded = RunConfig.parse(attributes["config"])
    if config.training.products == "auto":  # the run has what was chosen
        config = config.with_values([f"training.products={recorded.training.products}"])
    if _fixed_fields(recorded) != _fixed_fields(config):
        return False
    wanted = config.training.steps if steps_given else recorded.training.steps
    steps: Any = open_group(existing_runs(run)[0])["step"]
    return bool(steps.shape[0]) and int(steps[-1]) >= wanted


def committed_rows(run: Path) -> int:
    """Return the committed rows of a run; 0 if it does not exist yet."""
    found = (_attributes(one) for one in existing_runs(run))
    return min((int(each.get("committed_rows", 0)) for each in found), default=0)


def planned_rows(config: RunConfig) -> int:
    """Return the number of rows of a complete run with this configuration."""
    return -(-config.training.steps // config.recording.every) + 1


def threads_of(folder: Path) -> int | None:
    """Return the number of threads of each run in a folder; None if there is no sweep yet.

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
            f"{file} has no valid number of threads ({error}); write "
            '{"threads": N} to it, with the N that `trajstore info` prints for a run'
        ) from error


def choose_threads(folder: Path, jobs: int, given: int | None, *, keep: bool) -> int:
    """Return the number of threads of each process of a sweep, the same for all its calls.

    The bits of the training depend on the number of threads. So the first call fixes the number for
    all later ones, also with another `jobs`. It is `given`, else OMP_NUM_THREADS, else the number
    of processors divided by `jobs`.

    Parameters
    ----------
    folder : Path
    jobs : int
        Simultaneous processes.
    given : int, optional
    keep : bool
        Write the number to the folder.

    Raises
    ------
    InvalidArgument
        If `given` differs from the fixed number.
    """
    settled = threads_of(folder)
    if settled is not None:
        if given not in (None, settled):
            raise InvalidArgument(
                f"got {given} threads, but the runs of {folder} have {settled} threads each, on "
                "which their bits depend; leave out --threads, or sweep into another folder"
            )
        return settled
    threads = given or threads_of_each(jobs)
    if keep:
        make_folder(folder)
        _write(folder, {"threads": threads})
    return threads


def save_names(folder: Path, names: Iterable[str]) -> None:
    """Write the names of the runs of a sweep, so that `watch` waits for all of them.

    Parameters
    ----------
    folder : Path
        Its number of threads is fixed already. The names of earlier sweeps are kept.
    names : iterable of str
    """
    known = swept_names(folder)
    every = [*known, *(name for name in names if name not in known)]
    if every != known:
        _write(folder, {"threads": threads_of(folder), "runs": every})


def _write(folder: Path, facts: dict[str, Any]) -> None:
    put(folder / SWEEP, [json.dumps(facts).encode() + b"\n"])


def _attributes(run: Location) -> dict[str, Any]:
    """Return the attributes of a run; none if it does not exist or is incomplete."""
    try:
        return open_group(run).attrs.asdict()
    except (RunNotFound, FormatError):
        return {}


def _fixed_fields(config: RunConfig) -> dict[str, Any]:
    """Return the fields that must not change when a run is resumed."""
    free = {*MAY_CHANGE, "training.device"}
    return {field: value for field, value in config.flat().items() if field not in free}
