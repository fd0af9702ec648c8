"""Several runs followed together: those that are named, and those of a sweep's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trajstore.errors import FormatError
from trajstore.store.reading.run_paths import run_paths
from trajstore.watching.run_follower import Look, RunFollower

__all__ = ["SWEEP", "FollowedRuns", "swept_names"]

SWEEP = "sweep.json"
"""File in which a sweep's folder says what is the same for all its runs, and their names."""


class FollowedRuns:
    """Looks at several runs again and again, also at those that come later.

    Parameters
    ----------
    runs : sequence of str
        Runs that need not be there yet, patterns, and folders of sweeps.

    Examples
    --------
    >>> [(run, look.standing) for run, look in FollowedRuns(["gatsby.zarr"]).look().items()]
    [('gatsby.zarr', 'complete')]
    """

    def __init__(self, runs: Sequence[str]) -> None:
        self._runs = runs
        self._followers: dict[str, RunFollower] = {}

    def look(self) -> dict[str, Look]:
        """Look at each run, at its last commit.

        Raises
        ------
        RunNotFound, InvalidArgument, MissingExtra
            If a pattern matches nothing; if an address cannot be read.
        FormatError
            If what is there is not a run, or damaged.
        """
        paths = dict.fromkeys(path for run in self._runs for path in _paths(run))
        for path in paths:
            if path not in self._followers:
                self._followers[path] = RunFollower(path)
        return {path: self._followers[path].look() for path in paths}


def _paths(run: str) -> list[str]:
    planned = [os.path.join(run, name) for name in swept_names(Path(run))]
    there = run_paths([run]) if not planned or any(map(os.path.exists, planned)) else []
    return planned + [path for path in there if path not in planned]


def swept_names(folder: Path) -> list[str]:
    """Names of the runs that sweeps into a folder have; none where there was no sweep.

    Raises
    ------
    FormatError
        If its file cannot be read.
    """
    file = folder / SWEEP
    try:
        names = json.loads(file.read_text()).get("runs", [])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, AttributeError) as error:
        raise FormatError(f"{file} is not what a sweep wrote: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{file} does not name its runs: got {names!r}, expected a list of names")
    return names
