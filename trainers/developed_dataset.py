"""The whole model at every step of a run with keyframes, as a lazy Dataset.

A *stretch* is what lies between two keyframes. It is developed when one of its values is first
read, and kept in a cache beside the run: ``NAME.developed/FIRST-LAST.zarr``, an ordinary run. A
stretch of the cache is used if its steps have the digests of the run. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xarray as xr
from dask.tokenize import tokenize
from xarray.core import indexing

from trajstore import errors
from trajstore.cli.output import StepsProgress
from trajstore.provenance import RunAttributes
from trajstore.schema import KEPT, KEYFRAMES, STEP, VARIABLES
from trajstore.store.metadata.block_plan import plan
from trajstore.store.metadata.zarr_json import recorded_attributes
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.reading.open_run import StoredReader, open_run
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.storage.atomic import PARTIAL_SUFFIX, make_folder, sweep
from trajstore.store.storage.lock import RunLock, is_written_to
from trajstore.store.storage.remote_path import METADATA_KEY, RunPath, location
from trajstore.units import format_bytes, parse_bytes

Array = npt.NDArray[Any]

Train = Callable[[int, int, Path], None]
"""Writes the first to the last step as a run, or raises why they cannot be trained."""

_COUNT = "params_count"
_DIGESTS = ("params_digest", "step_digest")
_OPENED = 64  # stretches whose metadata stay in memory
_POLL = 0.2  # seconds
_training = threading.RLock()
"""One training at a time in this process, of whatever run."""


def open_developed(
    path: RunPath,
    chunks: str | None,
    cache_size: int | str,
    developed: bool | Callable[[], tuple[Any, ...]],
) -> xr.Dataset:
    """Open a run with keyframes. `trajstore.open_run` describes it."""
    place, recorded = location(path), open_run(path, chunks=None)
    if not RunAttributes.of(recorded.attrs).keyframe_every:
        raise errors.VariableNotRecorded(
            f"{path} has no keyframes, so no steps can be developed; record it with "
            "variables='keyframes'"
        )
    if not isinstance(place, Path) or not place.is_dir():
        raise errors.InvalidArgument(
            f"{path} is not a local folder, so developed steps cannot be kept beside it; copy the "
            "run into one"
        )
    train = partial(train_in_child, place.absolute())
    if callable(developed):
        from trajstore.trainers.develop_own_loop import train_own

        train = partial(train_own, place.absolute(), developed)
    elif not recorded.attrs.get("config"):
        raise errors.InvalidArgument(
            f"{path} was recorded from your own loop, which trains its steps again; give "
            "developed=build, a function that returns a new (model, optimizer, step) as for "
            "trainers.develop"
        )
    return developed_dataset(place.absolute(), chunks, parse_bytes(cache_size), train)


def developed_dataset(run: Path, chunks: str | None, limit: int, train: Train) -> xr.Dataset:
    """Dataset of the recorded variables, and of all others of the tier ``everything``.

    Parameters
    ----------
    run : Path
    chunks : 'blocks' or None
        As of `trajstore.open_run`.
    limit : int
        Largest size of the cache in bytes.
    train : callable
        Called with the first and the last step, and the path of the run to write.
    """
    recorded, keyframes = (open_run(each, chunks=None) for each in (run, run / KEYFRAMES))
    like = {str(name): each.variable for name, each in keyframes.items() if name not in recorded}
    if "params" in like:  # a model may have the matrix only
        native = like["params"].attrs["native_dtype"]
        like["params_grad"] = like["params"].copy(deep=False)
        like["params_grad"].attrs = recorded_attributes("params_grad", native)
    every = {str(name): each.variable for name, each in recorded.items()} | like
    layout = plan(
        {name: each.attrs["native_dtype"] for name, each in every.items()},
        tokens=recorded.sizes["token"],
        hidden=recorded.sizes["hidden"],
        lengths={str(dim): n for each in every.values() for dim, n in each.sizes.items() if n},
        memory=parse_bytes(attribute(recorded.attrs, "config", "recording", "memory") or "1GiB"),
        buffers=1,  # as `develop_run` writes it
    )
    # A keyframe ends a stretch; that of the first row is in the first stretch.
    ends = np.searchsorted(recorded["step"].values, keyframes["step"].values, side="right")
    stretches = Stretches(
        run=run,
        recorded=recorded,
        keyframes=keyframes,
        edges=np.unique([0, *ends[ends > 1], recorded.sizes["step"]]),
        row_bytes=sum(array.row_bytes for array in layout.arrays.values()),
        limit=limit,
        train=train,
    )
    pieces, token = stretches.pieces(layout.block_rows), tokenize(str(run), recorded.attrs)
    variables: dict[str, Any] = {}
    for name in sorted(every, key=[*VARIABLES, *every].index):
        variable: Any = every[name]
        if name in like:
            reader: Any = DevelopedReader(stretches, name, variable)
            lazy: Any = indexing.LazilyIndexedArray(reader)
            lazy = indexing.CopyOnWriteArray(lazy)
            variable = xr.Variable(variable.dims, lazy, variable.attrs)
        if chunks is not None:
            shape = (pieces, *layout.arrays[name].shard[1:])
            shapes = dict(zip(variable.dims, shape, strict=True))
            variable = variable.chunk(shapes, name=f"{name}-developed-{token}")
        variables[name] = variable
    attributes = keyframes.attrs | recorded.attrs | {"optimizer": keyframes.attrs["optimizer"]}
    ds = xr.Dataset(variables, recorded.coords, attributes)
    ds.encoding = recorded.encoding
    return ds


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """The stretches of a run, and the cache that holds them.

    Attributes
    ----------
    run : Path
    recorded, keyframes : Dataset
        Without dask.
    edges : ndarray of int
        The first row of each stretch, and the number of rows.
    row_bytes : int
        Native bytes of one developed row.
    limit : int
    train : callable
        See `developed_dataset`.
    """

    run: Path
    recorded: xr.Dataset
    keyframes: xr.Dataset
    edges: npt.NDArray[np.int64]
    row_bytes: int
    limit: int
    train: Train

    def pieces(self, most: int) -> tuple[int, ...]:
        """Lengths of consecutive pieces of at most so many rows, each inside one stretch."""
        lengths = np.diff(self.edges).tolist()
        pieces = (min(most, n - at) for n in lengths for at in range(0, n, most))
        return tuple(pieces) or (0,)

    @property
    def cache(self) -> Path:
        """Folder of the developed stretches."""
        return self.run.with_name(f"{self.run.name.removesuffix('.zarr')}.developed")

    def rows(self, number: int) -> slice:
        """Rows of a stretch in the run."""
        return slice(int(self.edges[number]), int(self.edges[number + 1]))

    def path(self, number: int) -> Path:
        """Path of a stretch in the cache."""
        first, last = self.recorded["step"].values[self.rows(number)][[0, -1]]
        return self.cache / f"{first}-{last}.zarr"

    def values(self, name: str, number: int, window: tuple[slice, ...]) -> Array:
        """Values of a variable in a window of a stretch, which is developed if necessary."""
        told = self._told(name, number)
        if told is not None:
            return told[window]
        stored = self._found(number)
        if stored is not None:
            with suppress(PermissionError, FileNotFoundError):
                os.utime(self.path(number))  # the last use
            with suppress(errors.FormatError, FileNotFoundError):  # damaged, or removed meanwhile
                return stored[name].values(window)
        with self._alone():  # so no other reader removes it before it is read
            again = self._found(number)
            if again is None or again is stored:
                again = self._developed(number)
            return again[name].values(window)

    def _told(self, name: str, number: int) -> Array | None:
        """Counts and marks that follow from the keyframes at both ends of a stretch, or None.

        A parameter that was counted in all steps that were taken, or in none, has known counts.
        """
        if name not in (_COUNT, KEPT.name):
            return None
        rows, steps = self.rows(number), self.recorded["step"].values
        begin = max(rows.start - 1, 0)
        ends = np.isin(self.keyframes["step"].values, steps[[begin, rows.stop - 1]])
        if np.count_nonzero(ends) != 2:
            return None
        before, after = self.keyframes.variables[name].load().values[ends]
        taken = np.ones(rows.stop - begin - 1)
        if "skipped" in self.recorded:
            taken -= self.recorded["skipped"].values[begin + 1 : rows.stop]
        known = (0, taken.sum()) if name == _COUNT else (0,)
        if not np.isin(after - before, known).all():
            return None
        counted = np.append(0, np.cumsum(taken))[:, None] * (after > before)
        return cast(Array, (before + counted)[rows.start - begin :])

    def _found(self, number: int) -> Mapping[str, StoredArray] | None:
        try:
            root = (self.path(number) / METADATA_KEY).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _proven(self, number, (root.st_ino, root.st_mtime_ns))

    def _developed(self, number: int) -> Mapping[str, StoredArray]:
        rows, path = self.rows(number), self.path(number)
        first, last = (int(step) for step in self.recorded["step"].values[rows][[0, -1]])
        needed = (rows.stop - rows.start) * self.row_bytes
        what = f"steps {first} to {last} of {self.run}"
        if needed > self.limit:
            raise errors.InvalidArgument(
                f"{what} take up to {format_bytes(needed)} when all {rows.stop - rows.start} are "
                f"developed, but the cache may take {format_bytes(self.limit)}; raise it with "
                f"cache_size='{-(-needed >> 20)}MiB'"
            )
        self._make_room(needed, path)
        try:
            self.train(first, last, path)
        except errors.TrajstoreError as error:
            raise type(error)(f"{what} cannot be developed: {error}") from error
        found = self._found(number)
        if found is None:
            raise errors.FormatError(
                f"{what} were developed as {path}, which cannot be used; remove it"
            )
        return found

    def _make_room(self, needed: int, path: Path) -> None:
        """Remove what a killed development left, the present stretch, and the oldest-used ones."""
        for left in self.cache.glob(f".*{PARTIAL_SUFFIX}"):
            sweep(self.cache / f"{left.name[1:].partition('.')[0]}.zarr")
        shutil.rmtree(path, ignore_errors=True)
        used = sorted(self.cache.glob("*.zarr"), key=lambda each: each.stat().st_mtime_ns)
        sizes = [sum(file.stat().st_size for file in each.rglob("*")) for each in used]
        while used and sum(sizes) + needed > self.limit:
            shutil.rmtree(used.pop(0))
            del sizes[0]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other thread or process develops steps of the run."""
        with _training:
            make_folder(self.cache)
            while True:
                try:
                    lock = RunLock.acquire(self.cache)
                    break
                except errors.RunLocked:
                    if is_written_to(self.cache) is None:  # by another machine, perhaps a dead one
                        raise
                    time.sleep(_POLL)
            with lock:
                yield


@lru_cache(maxsize=_OPENED)
def _proven(
    stretches: Stretches, number: int, root: tuple[int, int]
) -> Mapping[str, StoredArray] | None:
    """Arrays of a stretch of the cache; None if it is damaged, or belongs to another run.

    `root` changes if the stretch is replaced.
    """
    path, recorded = stretches.path(number), stretches.recorded
    expected = recorded.isel(step=stretches.rows(number))
    try:
        group: Any = open_group(path)
        origin = RunAttributes.of(group.attrs.asdict()).developed.get("created")
        stored = {name: stored_array(path, name, array) for name, array in group.arrays()}
        same = origin == recorded.attrs["created"] and all(
            np.array_equal(whole(path, group, name), expected[name].values)
            for name in (STEP.name, *_DIGESTS)
        )
    except (errors.FormatError, errors.RunNotFound, KeyError):
        return None
    return {name: array for name, array in stored.items() if array} if same else None


class DevelopedReader(StoredReader):
    """A variable of the developed steps, for xarray and dask.

    Parameters
    ----------
    stretches : Stretches
    name : str
    like : Variable
        The variable in the keyframes.
    """

    def __init__(self, stretches: Stretches, name: str, like: xr.Variable) -> None:
        self._stretches, self._name = stretches, name
        self.shape = (int(stretches.edges[-1]), *like.shape[1:])
        self.dtype = like.dtype

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, indexing.ExplicitIndexer):
            return self._outer(key)
        support = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._outer)

    def _outer(self, key: tuple[Any, ...]) -> Any:
        rows = np.arange(self.shape[0])[key[0]]
        others = [_window(item, n) for item, n in zip(key[1:], self.shape[1:], strict=True)]
        windows = [window for window, _ in others]
        lengths = [window.stop - window.start for window in windows]
        values = np.empty((rows.size, *lengths), self.dtype)
        numbers = np.searchsorted(self._stretches.edges, rows.ravel(), side="right") - 1
        for number in np.unique(numbers) if values.size else ():
            at = np.flatnonzero(numbers == number)
            local = rows.ravel()[at] - self._stretches.edges[number]
            span, within = _window(local, 0)
            part = self._stretches.values(self._name, int(number), (span, *windows))
            values[at] = part[within]
        selected = [slice(None) if rows.ndim else 0, *(within for _, within in others)]
        for axis in reversed(range(values.ndim)):
            values = values[(slice(None),) * axis + (selected[axis],)]
        return values


def _window(item: Any, length: int) -> tuple[slice, Any]:
    """Shortest slice that holds the selected positions, and their selection in it."""
    if not isinstance(item, slice):
        item = np.asarray(item)
        first, last = int(item.min(initial=length)), int(item.max(initial=-1))
        return slice(first, max(first, last + 1)), item - first
    chosen = range(length)[item]
    first, last = (min(chosen[0], chosen[-1]), max(chosen)) if chosen else (0, -1)
    return slice(first, last + 1), slice(None, None, item.step)


_PROGRAM = """
import json, sys
sys.path[:], run, first, last, target = json.loads(sys.argv[1])
try:
    from trajstore.trainers import develop_run
    tell = lambda step, last: print(step, flush=True)
    develop_run(run, target, steps=slice(first, last + 1), on_retrain=tell)
except Exception as error:
    sys.exit(print(type(error).__name__, *str(error).split()) or 1)
"""


def train_in_child(run: Path, first: int, last: int, target: Path) -> None:
    """Develop steps of a run of `trainers.record` in a process of its own."""
    task = json.dumps([sys.path, str(run), first, last, str(target)])
    command, reason = [sys.executable, "-c", _PROGRAM, task], ""
    quiet: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with StepsProgress("developing") as bar, subprocess.Popen(command, **quiet) as child:
        try:
            for line in child.stdout or ():
                reason = line.strip()
                if reason.isdecimal():
                    bar.show(int(reason) - first + 1, last - first + 1)
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        kind, _, why = reason.partition(" ")
        if not why or reason.isdecimal():
            why = f"the process ended with status {child.returncode}"
        raise getattr(errors, kind, errors.TrajstoreError)(
            f"{why}; to develop them by hand, with options: trajstore develop {run} --select "
            f"step={first}:{last + 1} -o {target}"
        )
