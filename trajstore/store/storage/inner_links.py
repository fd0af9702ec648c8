"""Links inside a run: they are read through, and never written, removed or repaired through."""

from __future__ import annotations

import os
from pathlib import Path

from trajstore.errors import FormatError
from trajstore.store.storage.remote_path import Location, RemotePath

__all__ = ["inner_links", "refuse_links"]


def inner_links(run: Location) -> list[Path]:
    """Links among what is in the folder of a run, and in the folders of its arrays.

    An object store has none.
    """
    found: list[Path] = []
    if isinstance(run, RemotePath):
        return found
    for folder in [run, *sorted(entry for entry in run.iterdir() if entry.is_dir())]:
        if folder != run and folder.is_symlink():
            continue
        with os.scandir(folder) as entries:
            found += sorted(Path(entry.path) for entry in entries if entry.is_symlink())
    return found


def refuse_links(run: Location) -> None:
    """Insist that whatever is written to a run, or removed from it, is in its own folder.

    Raises
    ------
    FormatError
        If there is a link in it.
    """
    links = inner_links(run)
    if links:
        raise FormatError(
            f"{links[0]} is a link to {os.readlink(links[0])}, and nothing is written or removed "
            "through a link inside a run; put what it leads to in its place, or make a copy of the "
            f"run without links (cp -rL {run.name} COPY)"
        )
