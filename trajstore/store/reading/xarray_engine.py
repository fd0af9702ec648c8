"""xarray's engine ``trajstore``: a run as a lazy Dataset, `xr.open_dataset(path)`.

xarray finds it by its entry point, and takes it for a folder that holds a run.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from xarray.backends import BackendEntrypoint, StoreBackendEntrypoint, ZarrStore

from trajstore.accessor_registration import register_accessors
from trajstore.errors import FormatError, TrajstoreError
from trajstore.schema import STEP
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.array_reader import stored_array
from trajstore.store.reading.open_group import ends, open_group
from trajstore.store.storage.remote_path import RemotePath, RunPath, location
from trajstore.threads import default_threads

__all__ = ["TrajstoreBackend", "run_dataset"]


register_accessors()


def run_dataset(
    group: zarr.Group,
    place: RunPath,
    drop_variables: str | Iterable[str] | None = None,
    *,
    reader: Callable[..., xr.Dataset] = xr.open_dataset,
) -> xr.Dataset:
    """Dataset of the group of a run, without dask.

    Its steps are read past zarr, which takes longer for each of their blocks than for a matrix. Of
    a run that is at an address, steps that follow upon each other are not read one block after
    the other: the first and the last give them all.

    Raises
    ------
    FormatError
        If steps or coordinates cannot be read, or the arrays do not make a Dataset.
    """
    dropped = {drop_variables} if isinstance(drop_variables, str) else {*(drop_variables or ())}
    try:
        return _dataset(group, place, dropped, reader)
    except (TrajstoreError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever xarray and codecs raise for what nobody wrote
        raise FormatError(
            f"{place} cannot be read: {error}; see what is wrong with: trajstore verify "
            f"{shlex.quote(str(place))}"
        ) from error


def _dataset(
    group: zarr.Group, place: RunPath, dropped: set[str], reader: Callable[..., xr.Dataset]
) -> xr.Dataset:
    store = ZarrStore(group, mode="r", consolidate_on_close=False)
    steps = None
    if STEP.name not in dropped:
        array = cast(Any, group[STEP.name])
        if isinstance(location(place), RemotePath):
            steps = _steps_by_the_ends(array)
        else:
            stored = stored_array(place, STEP.name, array)
            if stored is not None:
                steps = replace(stored, threads=default_threads()).values(())
    if steps is None:
        return reader(store, drop_variables=dropped)
    described = cast(Any, store).open_store_variable(STEP.name)
    ds = reader(store, drop_variables={*dropped, STEP.name})
    encoding = {**described.encoding, "dtype": steps.dtype}
    variable = xr.Variable(described.dims, steps, described.attrs, encoding)
    return ds.assign_coords({STEP.name: variable})


def _steps_by_the_ends(array: Any) -> npt.NDArray[np.int64] | None:
    """Steps of a run of three blocks or more, if there is none between them that was left out.

    As steps increase strictly, as many as lie from the first to the last are all of these.
    """
    (rows,), (block,) = array.shape, array.chunks
    if rows <= 2 * block:
        return None
    first, last = ends(array)
    return np.arange(first, last + 1) if last - first == rows - 1 else None


class TrajstoreBackend(BackendEntrypoint):
    """Opens runs."""

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
            See `trajstore.store.reading.open_group.open_group`.
        """
        group = open_group(filename_or_obj)
        reader = StoreBackendEntrypoint().open_dataset  # indices are made by who calls this
        return run_dataset(group, filename_or_obj, drop_variables, reader=reader)

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
