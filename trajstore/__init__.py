"""Record every optimizer step of a training run into compressed Zarr arrays, and read it back.

Each name is imported at its first use: zarr loads the codec of a run through this package and does
not need xarray, dask and the rest.
"""

from __future__ import annotations

from trajstore import errors
from trajstore.installation import __version__

TYPE_CHECKING = False  # importing typing would take most of the time of this module
if TYPE_CHECKING:
    from typing import Any

    from trajstore.exchange.export import export, to_torch
    from trajstore.exchange.import_file import import_file
    from trajstore.integrity.repair import repair
    from trajstore.integrity.verify import verify
    from trajstore.sample_run import sample_run
    from trajstore.store.reading.open_run import open_run, open_runs
    from trajstore.store.writing.writer import RunWriter

__all__ = [
    "RunWriter",
    "__version__",
    "errors",
    "export",
    "import_file",
    "open_run",
    "open_runs",
    "repair",
    "sample_run",
    "to_torch",
    "verify",
]

_HOME = {
    "RunWriter": "trajstore.store.writing.writer",
    "export": "trajstore.exchange.export",
    "import_file": "trajstore.exchange.import_file",
    "open_run": "trajstore.store.reading.open_run",
    "open_runs": "trajstore.store.reading.open_run",
    "repair": "trajstore.integrity.repair",
    "sample_run": "trajstore.sample_run",
    "to_torch": "trajstore.exchange.export",
    "verify": "trajstore.integrity.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trajstore' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # so that this function is called once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
