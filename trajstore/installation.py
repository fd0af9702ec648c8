"""The installed version, other packages, and the accessors of Datasets that those add.

Accessors, such as ``ds.traj``, are entry points of the group ``trajstore.accessors``:
`trajstore.analysis` registers ``traj``; other packages add theirs in the same way. The value of the
entry point is a class that takes a Dataset.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would take most of the time of this module
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.4.0"

_registered = False


def version_of(package: str) -> str | None:
    """Return the version of an installed package, which is not imported; None if it is missing."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def imported(module: str, name: str) -> Any:
    """Return a class or function of a module that this process has imported, otherwise ().

    A value can be of a class only after its import, so nothing is imported to ask for it.

    >>> isinstance(1, imported("numbers", "Real")), isinstance(1, imported("no_module", "Real"))
    (True, False)
    """
    return getattr(sys.modules.get(module), name, ())


def register_accessors() -> None:
    """Register the installed accessors, once, if this process has imported xarray.

    The codec of runs calls this function when zarr opens an array, since `xr.open_zarr` imports
    nothing else of this package. ``ds.NAME`` imports the class of an accessor at its first use.
    """
    global _registered  # noqa: PLW0603
    xarray: Any = sys.modules.get("xarray")
    if _registered or not hasattr(xarray, "register_dataset_accessor"):
        return
    from importlib.metadata import entry_points

    for point in entry_points(group="trajstore.accessors"):
        if not hasattr(xarray.Dataset, point.name):
            xarray.register_dataset_accessor(point.name)(lambda ds, point=point: point.load()(ds))
    _registered = True
