"""Several runs followed together: given runs, and the runs of a sweep's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trajstore.errors import FormatError
from trajstore.store.reading.run_paths import run_paths
from trajstore.watching.run_follower import Look, RunFollower

SWEEP = "sweep.json"
"""File in a sweep's folder with the names of its runs and their common settings."""


class FollowedRuns:
    """Reads the state of several runs repeatedly, including runs that are created later.

    Parameters
    ----------
    runs : sequence of str
        Runs (which may not exist yet), patterns, and folders of sweeps.

    Examples
    --------
    >>> [(run, look.status) for run, look in FollowedRuns(["gatsby.zarr"]).look().items()]
    [('gatsby.zarr', 'complete')]
    """

    def __init__(self, runs: Sequence[str]) -> None:
        self._runs = runs
        self._followers: dict[str, RunFollower] = {}

    def look(self) -> dict[str, Look]:
        """Read the state of each run at its last commit.

        Raises
        ------
        RunNotFound, InvalidArgument, MissingExtra
            If a pattern matches nothing, or an address cannot be read.
        FormatError
            If a path is not a run, or the run is damaged.
        """
        paths = dict.fromkeys(path for run in self._runs for path in _paths(run))
        for path in paths:
            if path not in self._followers:
                self._followers[path] = RunFollower(path)
        return {path: self._followers[path].look() for path in paths}


def _paths(run: str) -> list[str]:
    names = swept_names(Path(run))
    planned = run_paths(os.path.join(run, name) for name in names) if names else []
    there = run_paths([run]) if not planned or any(map(os.path.exists, planned)) else []
    return planned + [path for path in there if path not in planned]


def swept_names(folder: Path) -> list[str]:
    """Names of the runs of a sweep's folder; empty if the folder holds no sweep.

    Raises
    ------
    FormatError
        If the file of the sweep is invalid.
    """
    file = folder / SWEEP
    try:
        names = json.loads(file.read_text()).get("runs", [])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, AttributeError) as error:
        raise FormatError(f"{file} is not a valid sweep file: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{file}: got runs={names!r}, expected a list of names")
    return names
