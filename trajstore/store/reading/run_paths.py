"""Paths of runs, from names, patterns, folders, and names that several runs share."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable

from trajstore.errors import FormatError, RunNotFound
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.run_settings import attribute

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def run_paths(paths: Paths) -> list[str]:
    """Paths of runs, without duplicates. Patterns and folders of runs are expanded.

    The name of a training that recorded several matrices is replaced by the runs of these.

    Raises
    ------
    RunNotFound
        If a pattern matches nothing, or there are no paths.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in (os.fspath(one) for one in given):
        if os.path.exists(path) or "://" in path or not glob.has_magic(path):
            found += _runs_within(path) or matrix_runs(path) or [path]
            continue
        matching = sorted(filter(os.path.isdir, glob.glob(path)), key=_by_numbers)
        if not matching:
            raise RunNotFound(f"there is no run at {path}")
        found += matching
    if not found:
        raise RunNotFound("got no runs to open, expected paths or a pattern such as runs/*.zarr")
    return list(dict.fromkeys(found))


def matrix_runs(path: str | os.PathLike[str]) -> list[str]:
    """Runs of the matrices that one training recorded under a name, ``NAME.<parameter>.zarr``.

    There are none if a run has the name itself.
    """
    name = os.fspath(path).removesuffix(".zarr")
    if os.path.exists(path) or "://" in name:
        return []
    return [run for run in _extended(name) if run == f"{name}.{_parameter(run)}.zarr"]


def all_matrix_runs(path: str) -> list[str]:
    """As `matrix_runs`; none if it is uncertain that these are all.

    A run whose root is broken does not name its parameter. So each folder ``NAME.*.zarr`` has to be
    the run of a matrix.
    """
    found = matrix_runs(path)
    return found if len(found) == len(_extended(path.removesuffix(".zarr"))) > 1 else []


def _extended(name: str) -> list[str]:
    return sorted(glob.glob(f"{glob.escape(name)}.*.zarr"))


def _parameter(run: str) -> str | None:
    """Recorded parameter of a run; None if it is not a run."""
    try:
        found: str | None = attribute(open_group(run).attrs.asdict(), "recording", "parameter")
    except (FormatError, RunNotFound):
        return None
    return found


def _runs_within(path: str) -> list[str]:
    """Runs in a folder that is not a run."""
    if os.path.exists(os.path.join(path, METADATA_KEY)):
        return []
    found = glob.glob(os.path.join(glob.escape(path), "*.zarr", METADATA_KEY))
    return sorted(map(os.path.dirname, found), key=_by_numbers)


def _by_numbers(path: str) -> list[tuple[int, str]]:
    """Sort key of a name, with numbers in numeric order."""
    parts = re.findall(r"\d+|\D+", path)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
