"""Arrays of a run that are not stored as a recorder stores them: zarr reads these."""

from __future__ import annotations

from typing import Any

import zarr

from trajstore.documents import Problem
from trajstore.inspection import Inspection

__all__ = ["open_foreign"]


def open_foreign(
    inspection: Inspection, name: str, problems: list[Problem], notes: list[str]
) -> zarr.Array[Any] | None:
    """Open an array with zarr, from its own document.

    Parameters
    ----------
    inspection : Inspection
    name : str
    problems, notes : list
        Take why it cannot be opened, and what is not checked of it.

    Returns
    -------
    zarr.Array or None
        None if it cannot be opened.
    """
    if inspection.own[name] is None:
        return None  # which is a problem of its own
    notes.append(
        f"{name} is not stored as a recorder stores it; it is read through zarr, and only what its "
        "own codecs check is checked"
    )
    path = inspection.path / name
    try:
        return zarr.open_array(path, mode="r", zarr_format=3)
    except Exception as error:  # whatever zarr raises for a document that nobody wrote
        problems.append(Problem(array=name, path=path, message=f"cannot be read ({error})"))
        return None
