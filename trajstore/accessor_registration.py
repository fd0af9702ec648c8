"""Accessors of Datasets, such as ``ds.traj``: entry points of the group ``trajstore.accessors``.

`trajstore.analysis` gives ``traj``; other packages add theirs in the same way. The value of the
entry point is a class that takes a Dataset.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # of typing, whose import would take most of the time that this one takes
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from typing import Any

__all__ = ["register_accessors"]

_registered = False


def register_accessors() -> None:
    """Register the installed accessors, once, if this process has imported xarray.

    The codec of runs calls it when zarr opens an array: `xr.open_zarr` imports nothing else of this
    package. The class of an accessor is imported when ``ds.NAME`` is first used.
    """
    global _registered  # noqa: PLW0603
    xarray: Any = sys.modules.get("xarray")
    if _registered or not hasattr(xarray, "register_dataset_accessor"):
        return
    from importlib.metadata import entry_points

    for point in entry_points(group="trajstore.accessors"):
        if not hasattr(xarray.Dataset, point.name):
            xarray.register_dataset_accessor(point.name)(_loading(point))
    _registered = True


def _loading(point: EntryPoint) -> Any:
    def accessor(ds: Any) -> Any:
        return point.load()(ds)

    return accessor
