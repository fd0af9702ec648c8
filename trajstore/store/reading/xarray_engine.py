"""xarray's engine ``trajstore``: a run as a lazy Dataset, `xr.open_dataset(path)`.

xarray finds the engine by its entry point, and uses it for folders of runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.backends import BackendEntrypoint, StoreBackendEntrypoint, ZarrStore

from trajstore.codec.block_codec import local_folder, register_accessors
from trajstore.schema import STEP
from trajstore.store.reading.array_reader import stored_array
from trajstore.store.reading.open_group import ends, is_run, named_errors, open_group
from trajstore.store.storage.remote_path import RemotePath, RunPath, location
from trajstore.threads import default_threads

register_accessors()


def run_dataset(
    group: zarr.Group,
    place: RunPath,
    drop_variables: str | Iterable[str] | None = None,
    *,
    reader: Callable[..., xr.Dataset] = xr.open_dataset,
) -> xr.Dataset:
    """Dataset of the group of a run, without dask.

    The variables have no encoding but their preferred chunks, because the blocks of a run cannot
    store other shapes, such as a selection that the user writes with ``to_zarr``. Steps are read
    without zarr, whose overhead for their small blocks is large. In an object store, only the first
    and last step are read, if they show that all steps between them were recorded.

    Raises
    ------
    FormatError
        If steps or coordinates cannot be read, or the arrays do not form a Dataset.
    """
    dropped = {drop_variables} if isinstance(drop_variables, str) else {*(drop_variables or ())}
    with named_errors(place):
        ds = _dataset(group, place, dropped, reader)
        for variable in ds.variables.values():
            chunks = variable.encoding.get("preferred_chunks")
            variable.encoding = {} if chunks is None else {"preferred_chunks": chunks}
        return ds


def _dataset(
    group: zarr.Group, place: RunPath, dropped: set[str], reader: Callable[..., xr.Dataset]
) -> xr.Dataset:
    store = ZarrStore(group, mode="r", consolidate_on_close=False)
    steps = None
    if STEP.name not in dropped:
        array = cast(Any, group[STEP.name])
        if isinstance(location(place), RemotePath):
            steps = _steps_from_ends(array)
        else:
            stored = stored_array(place, STEP.name, array)
            if stored is not None and local_folder(group.store) is not None:
                steps = replace(stored, threads=default_threads()).values(())
    if steps is None:
        return reader(store, drop_variables=dropped)
    described = cast(Any, store).open_store_variable(STEP.name)
    ds = reader(store, drop_variables={*dropped, STEP.name})
    variable = xr.Variable(described.dims, steps, described.attrs, described.encoding)
    return ds.assign_coords({STEP.name: variable})


def _steps_from_ends(array: Any) -> npt.NDArray[np.int64] | None:
    """Steps of a run of three blocks or more, if they are consecutive; otherwise None.

    Steps increase strictly. So they are consecutive if their number equals last − first + 1.
    """
    (rows,), (block,) = array.shape, array.chunks
    if rows <= 2 * block:
        return None
    first, last = ends(array)
    return np.arange(first, last + 1) if last - first == rows - 1 else None


class TrajstoreBackend(BackendEntrypoint):
    """The engine ``trajstore``."""

    description = "Runs recorded by trajstore"
    open_dataset_parameters = ("filename_or_obj", "drop_variables")

    def open_dataset(  # type: ignore[override]
        self,
        filename_or_obj: str | os.PathLike[str],
        *,
        drop_variables: str | Iterable[str] | None = None,
    ) -> xr.Dataset:
        """Open a run without dask. Each selection is read when its values are accessed.

        Raises
        ------
        RunNotFound, FormatError, MissingExtra
            See `trajstore.store.reading.open_group.open_group`.
        """
        group = open_group(filename_or_obj, zipped=True)
        reader = StoreBackendEntrypoint().open_dataset  # the caller creates the indices
        return run_dataset(group, filename_or_obj, drop_variables, reader=reader)

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """True for the folder of a run."""
        return isinstance(filename_or_obj, str | os.PathLike) and is_run(Path(filename_or_obj))
