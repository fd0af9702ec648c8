"""Paths of runs, from names, patterns and folders of sweeps."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable

from trajstore.errors import RunNotFound
from trajstore.store.metadata.object_keys import DOCUMENT

__all__ = ["Paths", "run_paths"]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def run_paths(paths: Paths) -> list[str]:
    """Paths of runs, without duplicates. Patterns and folders of runs, as of a sweep, are expanded.

    Raises
    ------
    RunNotFound
        If a pattern matches nothing, or there are no paths.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in (os.fspath(one) for one in given):
        if os.path.exists(path) or "://" in path or not glob.has_magic(path):
            found += _runs_within(path) or [path]
            continue
        matching = sorted(filter(os.path.isdir, glob.glob(path)), key=_by_numbers)
        if not matching:
            raise RunNotFound(f"there is no run at {path}")
        found += matching
    if not found:
        raise RunNotFound("got no runs to open, expected paths or a pattern such as runs/*.zarr")
    return list(dict.fromkeys(found))


def _runs_within(path: str) -> list[str]:
    """Runs in a folder that is not a run, such as that of a sweep."""
    if os.path.exists(os.path.join(path, DOCUMENT)):
        return []
    documents = glob.glob(os.path.join(glob.escape(path), "*.zarr", DOCUMENT))
    return sorted(map(os.path.dirname, documents), key=_by_numbers)


def _by_numbers(path: str) -> list[tuple[int, str]]:
    """Sort key of a name, with numbers in numeric order."""
    parts = re.findall(r"\d+|\D+", path)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
