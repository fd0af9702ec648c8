"""xarray's engine ``trajstore``: a run as a lazy Dataset, `xr.open_dataset(path)`.

xarray finds it by its entry point, and takes it for a folder that holds a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import xarray as xr
import zarr
from xarray.backends import BackendEntrypoint, StoreBackendEntrypoint, ZarrStore

from trajstore.store.block_view import as_blocks
from trajstore.store.object_keys import DOCUMENT
from trajstore.store.open_group import open_group

__all__ = ["TrajstoreBackend", "run_store"]


def run_store(group: zarr.Group) -> ZarrStore:
    """What `xr.open_dataset` takes, of the group of a run."""
    return ZarrStore(group, mode="r", consolidate_on_close=False)


class TrajstoreBackend(BackendEntrypoint):
    """Opens runs, each array by one codec: also those of format 1, and of ``portable``."""

    description = "Histories of training that trajstore has recorded"
    open_dataset_parameters = ("filename_or_obj", "drop_variables")

    def open_dataset(  # type: ignore[override]
        self,
        filename_or_obj: str | os.PathLike[str],
        *,
        drop_variables: str | Iterable[str] | None = None,
    ) -> xr.Dataset:
        """Dataset of a run, without dask: each selection is read when its values are asked for.

        Raises
        ------
        RunNotFound, FormatError, MissingExtra
            See `trajstore.store.open_group.open_group`.
        """
        store = run_store(as_blocks(open_group(filename_or_obj)))
        return StoreBackendEntrypoint().open_dataset(store, drop_variables=drop_variables)

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Whether it is the folder of a run."""
        if not isinstance(filename_or_obj, str | os.PathLike):
            return False
        try:
            with open(os.path.join(filename_or_obj, DOCUMENT), "rb") as file:
                attributes = json.loads(file.read())["attributes"]
            return "trajstore_format" in attributes
        except (OSError, ValueError, KeyError, TypeError):
            return False
