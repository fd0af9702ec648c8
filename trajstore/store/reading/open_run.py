"""Opening runs lazily: `open_run`, `open_runs`, and xarray's engine ``trajstore``.

They return the Dataset of `xr.open_zarr`, with checks; `open_runs` one Dataset along ``run``.
xarray finds the engine by its entry point, and uses it for folders of runs.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr
import zarr
from dask.tokenize import tokenize
from xarray.backends import BackendArray, BackendEntrypoint, StoreBackendEntrypoint, ZarrStore
from xarray.core import indexing

from trajstore.arguments import checks_types
from trajstore.codec.block_codec import local_folder
from trajstore.errors import InvalidArgument
from trajstore.installation import register_accessors
from trajstore.schema import (
    OF_RUN,
    STEP,
)
from trajstore.store.metadata.block_plan import LARGEST_TASK
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_group import ends, is_run, named_errors, open_group
from trajstore.store.reading.run_attributes import (
    SEED,
    differing_settings,
    known_settings,
    setting_text,
    short_names,
)
from trajstore.store.reading.run_info import Paths, run_paths, run_status
from trajstore.store.storage.remote_path import RemotePath, RunPath, location
from trajstore.threads import default_threads
from trajstore.units import format_bytes

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


_MATRIX = 3  # dimensions of the arrays that are read without zarr


@checks_types
def open_run(
    path: RunPath,
    *,
    chunks: Literal["blocks"] | None = "blocks",
    developed: bool | Callable[[], tuple[Any, ...]] = False,
    cache_size: int | str = "16GiB",
) -> xr.Dataset:
    """Open a run lazily. It may still be recorded.

    `xr.open_dataset` with ``engine="trajstore"`` and `xr.open_zarr` return the same values. The
    errors of this function state why a run cannot be opened. Coordinates of `xr.open_zarr` are dask
    arrays: call ``ds.is_dead.load()`` before ``ds.groupby("is_dead")`` or
    ``ds.where(ds.is_dead, drop=True)``, or pass ``chunks=None``.

    Parameters
    ----------
    path : path-like or str
        A local folder, an address such as ``s3://bucket/run.zarr``, with the extra ``s3``, or a
        zip file of the content of a run, ``run.zarr.zip``.
    chunks : 'blocks' or None
        With ``'blocks'``, the default, variables are dask arrays, for computations over many steps
        and tokens. A dask chunk is one block along ``step``, and one stored object along ``token``,
        or half of it; an object decodes to at most 30 MiB. With None, dask is not used, and each
        selection is read when its values are accessed. This reads the history of a single token
        several times faster.
    developed : bool or callable
        Also open what a run with ``variables="keyframes"`` stores in its keyframes only: the
        Dataset has the variables of the tier ``everything`` at every step. The
        steps between two keyframes are trained again, in another process, when a value of them is
        first read, and compared with the recorded digests. They stay in the folder
        ``NAME.developed`` beside the run, which can be removed at any time. To train them needs the
        extra ``train``. If it is not possible here, reading the value raises the error of
        `trainers.develop_run`, with the steps and the reason. For a run of your own loop, a
        function without arguments that returns a new model, its optimizer, the step, and the
        gradient scaler if there is one, each as for `trainers.develop`; it is called in this
        process for the steps between two keyframes.
    cache_size : int or str
        Largest size of that folder. The steps that were not read for the longest time are removed.
        Steps that need more are not trained: reading their values raises `InvalidArgument`.

    Returns
    -------
    Dataset
        Dimensions ``step``, ``token``, ``hidden``. The values are float32, which represents each
        native value exactly.

    Raises
    ------
    RunNotFound
        If `path` does not exist.
    FormatError
        If it is not a run, or has another format.
    MissingExtra
        If `path` is an address, and the extra that reads it is not installed.
    InvalidArgument
        If `chunks` has another value; or, with `developed`, if the run is not in a local folder, or
        was recorded from an own loop and `developed` is True.
    VariableNotRecorded
        With `developed`, if the run has no keyframes.

    Examples
    --------
    >>> ds = open_run("gatsby.zarr")
    >>> ds.W.dims, ds.W.shape, ds.W.attrs["native_dtype"]
    (('step', 'token', 'hidden'), (21, 128, 4), 'bfloat16')
    >>> ds.W.sel(step=20, token=ord("e")).values
    array([1.6015625, 1.6015625, 1.3984375, 1.6015625], dtype=float32)
    >>> history = open_run("gatsby.zarr", chunks=None).W.sel(token=ord("e"))  # without dask
    """
    if developed:
        (installed,) = entry_points(group="trajstore.readers", name="developed")
        return cast(xr.Dataset, installed.load()(path, chunks, cache_size, developed))
    group = open_group(path, zipped=True)
    # Coordinates are not dask arrays, as xarray could not group by or look up values in these.
    ds = run_dataset(group, path)
    ds.encoding["source"] = str(path)  # as xarray's own readers set it
    local = local_folder(group.store) is not None
    if chunks is None and not local:
        return ds
    data = {}
    token = tokenize(str(path), ds.attrs)  # once for all arrays
    for name, array in group.arrays():
        variable = ds.data_vars.get(name)
        if variable is None:
            continue
        stored = None
        if local and (variable.ndim == _MATRIX or "element" in variable.dims):
            stored = stored_array(path, name, array)
        if stored is not None and stored.shape != variable.shape:  # it grew a moment ago
            stored = None
        if chunks is None:
            reader = StoredReader(array, stored and replace(stored, threads=default_threads()))
            lazy: Any = indexing.LazilyIndexedArray(reader)
            data[name] = indexing.CopyOnWriteArray(lazy)
        else:
            data[name] = da.from_array(
                cast(Any, StoredReader(array, stored)),  # its keys may be those of xarray
                _dask_chunks(stored) if stored else _preferred_chunks(variable),
                name=f"{name}-{token}",
                meta=np.empty((0,) * variable.ndim, variable.dtype),
            )
    return ds.copy(data=data)


def _dask_chunks(stored: StoredArray) -> tuple[int, ...]:
    rows, tokens, *rest = stored.shard
    size = rows * tokens * math.prod(rest) * stored.chain.native.stored.itemsize
    if size > LARGEST_TASK and stored.form.grid[1] % 2 == 0:  # whole inner chunks
        tokens //= 2
    return rows, tokens, *rest


def _preferred_chunks(variable: xr.DataArray) -> tuple[int, ...]:
    chunks = variable.encoding["preferred_chunks"]
    return tuple(chunks[dim] for dim in variable.dims)


class StoredReader(BackendArray):
    """An array of a run, for xarray and dask.

    `stored` reads plain selections, and zarr reads all others. Without zarr's copy a scan takes a
    fifth less time, and without its event loop the history of a token takes half the time.

    Parameters
    ----------
    array : zarr.Array
    stored : StoredArray or None
        None if only zarr can read the array.
    """

    def __init__(self, array: zarr.Array[Any], stored: StoredArray | None) -> None:
        self._array = array
        self.stored = stored
        self.shape = array.shape
        self.dtype = array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, indexing.ExplicitIndexer):
            return self._outer(key)
        read = self._points if isinstance(key, indexing.VectorizedIndexer) else self._outer
        support = indexing.IndexingSupport.VECTORIZED
        return indexing.explicit_indexing_adapter(key, self.shape, support, read)

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read in a thread, for xarray's `load_async`."""
        return await asyncio.to_thread(self.__getitem__, key)

    def _outer(self, key: tuple[Any, ...]) -> Any:
        if self.stored is None or not all(map(_is_plain, key)):
            return self._array.oindex[key]
        slices = [item if isinstance(item, slice) else slice(item, item + 1) for item in key]
        values = self.stored.values(tuple(slices))
        return values[tuple(slice(None) if isinstance(item, slice) else 0 for item in key)]

    def _points(self, key: tuple[Any, ...]) -> Any:
        return self._array.vindex[key]


def _is_plain(item: Any) -> bool:
    if isinstance(item, slice):
        return item.step in (None, 1)
    return isinstance(item, int | np.integer) and bool(item >= 0)


_SHOWN = 5  # differing names that a message lists


@checks_types
def open_runs(paths: Paths, *, join: Literal["exact", "inner"] = "exact") -> xr.Dataset:
    """Open many runs as one lazy Dataset, along the dimension ``run``.

    Parameters
    ----------
    paths : path-like or iterable of path-like
        Runs, patterns such as ``"runs/*.zarr"``, or a folder of runs. The
        runs of a pattern or folder are sorted by name, with numbers in numeric order.
    join : {'exact', 'inner'}
        Treatment of runs with different steps or variables. ``'exact'`` raises an error;
        ``'inner'`` keeps the steps and variables that all runs have.

    Returns
    -------
    Dataset
        The first dimension is ``run``: ``W`` is (run, step, token, hidden). The coordinate ``run``
        holds the names of the folders. Every setting in which the configurations differ is a
        coordinate along ``run``, with its short name (``sigma``), or with its full name if the
        short one is ambiguous (``optimizer.name``). Token coordinates that differ between runs,
        such as ``is_dead`` for different texts, have the dimension ``run``, too. Coordinates that
        some runs lack are left out. The attributes
        are those that all runs share. ``of_run`` holds the other attributes of each run, which the
        functions of `analysis` use.

    Raises
    ------
    RunNotFound
        If a path does not exist, or no run matches a pattern.
    InvalidArgument
        If tokens or hidden dimensions differ, or, with ``'exact'``, steps or variables. The message
        states the difference.
    FormatError, MissingExtra
        See `trajstore.open_run`.

    Examples
    --------
    >>> import shutil
    >>> _ = shutil.copytree("gatsby.zarr", "other.zarr")
    >>> runs = open_runs("*.zarr")
    >>> runs.run.values.tolist(), runs.W.dims
    (['gatsby', 'other'], ('run', 'step', 'token', 'hidden'))
    >>> runs.traj.freeze().last_motion.sel(token=ord("e")).values
    array([13, 13])
    """
    opened = {path: open_run(path) for path in run_paths(paths)}
    names = _names(list(opened))
    runs = dict(zip(names, opened.values(), strict=True))
    _check_same(runs, "token")
    _check_same(runs, "hidden")
    runs = _with_common(runs, join)
    combined = xr.concat(
        [run.drop_attrs(deep=False) for run in runs.values()],
        "run",
        data_vars="all",
        coords="different",
        compat="equals",
        join="exact",
        combine_attrs="drop_conflicts",
    )
    shared = _shared([run.attrs for run in runs.values()])
    of_run = {name: _distinct(run, shared, combined) for name, run in runs.items()}
    combined = combined.assign_coords(run=("run", np.array(names)))
    return combined.assign_coords(_swept(combined, list(runs.values()))).assign_attrs(
        {**shared, OF_RUN: of_run}
    )


def _names(paths: Sequence[str]) -> list[str]:
    """Names of the folders, or full paths if two names are equal."""
    short = [Path(path.rstrip("/")).name.removesuffix(".zarr") for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _check_same(runs: dict[str, xr.Dataset], dim: str) -> None:
    """Raise an error unless all runs have the same coordinate along a dimension."""
    (first, reference), *others = runs.items()
    for name, run in others:
        if run.sizes.get(dim) != reference.sizes.get(dim):
            what = f"lengths {run.sizes.get(dim)} and {reference.sizes.get(dim)} along {dim}"
        elif dim in run.coords and not np.array_equal(run[dim].values, reference[dim].values):
            what = f"different {dim}s"
        else:
            continue
        raise InvalidArgument(
            f"the runs {name} and {first} have {what}, so they cannot be opened together; open "
            "each one alone, and select what they share"
        )


def _with_common(runs: dict[str, xr.Dataset], join: str) -> dict[str, xr.Dataset]:
    """Runs, reduced to common steps, variables and coordinates."""
    (first, reference), *others = runs.items()
    steps, variables = reference["step"].values, set(reference.variables)
    for name, run in others:
        if join == "exact":
            _refuse_others(name, run, first, reference)
        steps = np.intersect1d(steps, run["step"].values)
        variables &= set(run.variables)
    if not steps.size or variables.isdisjoint(reference.data_vars):
        what = "variable" if steps.size else "step"
        raise InvalidArgument(f"these runs have no {what} in common; open each one alone")
    common = {name: run.drop_vars(set(run.variables) - variables) for name, run in runs.items()}
    return {
        name: run
        if np.array_equal(run["step"].values, steps)
        else run.isel(step=np.flatnonzero(np.isin(run["step"].values, steps)))
        for name, run in common.items()
    }


def _refuse_others(name: str, run: xr.Dataset, first: str, reference: xr.Dataset) -> None:
    differing = set(map(str, run.data_vars)) ^ set(map(str, reference.data_vars))
    if differing:
        what = f"{_listed(sorted(differing))} {'is' if len(differing) == 1 else 'are'} in only one"
    elif not np.array_equal(run["step"].values, reference["step"].values):
        what = f"{name} has {_span(run)}, {first} {_span(reference)}"
    else:
        return
    raise InvalidArgument(
        f"the runs {name} and {first} differ: {what}; to use what all runs have, open them "
        "with join='inner'"
    )


def _span(run: xr.Dataset) -> str:
    steps = run["step"].values
    if not steps.size:
        return "no steps"
    return f"{steps.size:,} steps from {steps[0]} to {steps[-1]}"


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shared(attributes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Attributes that are equal in all runs."""
    first, *others = attributes
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def _distinct(run: xr.Dataset, shared: dict[str, Any], combined: xr.Dataset) -> dict[str, Any]:
    """Source, attributes and attributes of variables that belong to this run only."""
    variables = {
        str(name): dict(variable.attrs)
        for name, variable in run.variables.items()
        if variable.attrs != combined.variables[name].attrs
    }
    return {
        "source": run.encoding.get("source"),
        "attributes": {key: value for key, value in run.attrs.items() if key not in shared},
        "variables": variables,
    }


def _swept(combined: xr.Dataset, runs: Sequence[xr.Dataset]) -> dict[str, Any]:
    """Coordinates along run: the settings in which the configurations differ."""
    attributes = [run.attrs for run in runs]
    differing = differing_settings(attributes)
    coordinates = {}
    for field, short in short_names(attributes, differing).items():
        whole = field.partition(".")[2]
        name = whole if short in combined.variables or short in combined.dims else short
        coordinates[name] = ("run", _values(differing[field]), {"long_name": whole})
    return coordinates


def _values(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Numbers as numbers, other values as text."""
    if all(isinstance(value, int | float) for value in values):
        return np.array(values)
    return np.array([setting_text(value) for value in values])


_MOST = 4  # columns of settings


def final_loss(run: RunPath) -> float | None:
    """Loss of the last row; None if there is none, or if it is not finite.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at the path.
    """
    ds = open_run(run, chunks=None)
    if "loss" not in ds or not ds.sizes["step"]:
        return None
    loss = float(ds["loss"][-1])
    return loss if math.isfinite(loss) else None


def run_table(information: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs.

    Parameters
    ----------
    information : mapping
        For the name of each run, `trajstore.store.reading.run_info.information` and
        ``final_loss``.

    Returns
    -------
    columns : list of str
        Run, status, rows, last step, seed if one is known, up to four settings that differ, loss,
        size on disk.
    rows : list of list of str
    """
    runs = list(information.values())
    differing = differing_settings(runs)
    shown = [name for name in differing if name != SEED][:_MOST]
    values = {name: [setting_text(value) for value in differing[name]] for name in shown}
    seeds = [values.get(SEED) for values in known_settings(runs)]
    seeded = any(seed is not None for seed in seeds)
    titles = list(short_names(runs, shown).values())
    rows = [
        [
            name,
            run_status(facts),
            f"{facts['committed_rows']:,}",
            f"{facts['steps']['last']:,}" if facts["steps"] else "",
            *(["" if seed is None else str(seed)] if seeded else []),
            *(values[setting][at] for setting in shown),
            "" if facts["final_loss"] is None else f"{facts['final_loss']:.4f}",
            format_bytes(facts["bytes_on_disk"]),
        ]
        for at, ((name, facts), seed) in enumerate(zip(information.items(), seeds, strict=True))
    ]
    first = ["run", "status", "rows", "last step", *(["seed"] if seeded else [])]
    return [*first, *titles, "final loss", "on disk"], rows
