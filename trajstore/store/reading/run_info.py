"""Facts about a run, which `trajstore info` prints, and the paths that a pattern or name means."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import (
    FormatError,
    RunNotFound,
)
from trajstore.optimizer_advice import advise_run
from trajstore.provenance import RunAttributes
from trajstore.schema import (
    COORDINATES,
    POPULATION,
    STEP,
    VARIABLES,
    along_token,
)
from trajstore.store.metadata.metadata_form import NOTES
from trajstore.store.metadata.zarr_json import notes_of
from trajstore.store.reading.array_reader import block_form
from trajstore.store.reading.open_group import ends, open_group, root_attributes, whole
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    Location,
    RemotePath,
    RunPath,
    location,
)
from trajstore.values.native_types import NATIVE_TYPES


def information(path: RunPath) -> dict[str, Any]:
    """Facts about a run at its last commit, as JSON values.

    Parameters
    ----------
    path : path-like or str

    Returns
    -------
    dict
        The attributes of the root, and:

        - ``steps``: first and last; None without rows
        - ``arrays``: by name, shape, chunk, shard, native_dtype, kind (of its codec; None for a
          coordinate), bytes_native, bytes_on_disk, ratio
        - ``bytes_native``, ``bytes_on_disk``, ``ratio``, ``files`` of the whole run
        - ``written_to``: True if a process writes to the run (`is_written_to`)
        - ``notes``: what the recording could not see, each with ``note``, ``first_step``,
          ``last_step`` and the ``count`` of steps, and the ranges of ``unproven`` steps, if any
        - ``advice``: limits of the numeric types of the optimizer state and of W, for all
          recorded learning rates
          (`trajstore.optimizer_advice.Advice`)
        - ``populations``: number of tokens of each population named during the recording

        Bytes on disk may include a block that is being written. On a web server, which cannot list
        objects, they are None, and so are ratios and files.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`.
    """
    # Before the root is read: a writer first sets the final status there, then releases the lock.
    written_to = is_written_to(path)
    group = open_group(path)
    place = location(path)
    sizes = object_sizes(place) if _lists_sizes(place) else None
    arrays: dict[str, dict[str, Any]] = {}
    for name, array in sorted(group.arrays(), key=lambda item: _order(item[0])):
        native = str(array.attrs.get("native_dtype", array.dtype))
        itemsize = NATIVE_TYPES[native].itemsize if native in NATIVE_TYPES else array.dtype.itemsize
        raw = math.prod(array.shape) * itemsize
        stored = _stored(sizes, f"{name}/")
        form = block_form(array)
        arrays[name] = {
            "shape": list(array.shape),
            "chunk": list(array.chunks if form is None else form.chunk),
            "shard": list(array.shards or array.chunks),
            "native_dtype": native,
            "kind": None if form is None else form.chain.kind,
            "bytes_native": raw,
            "bytes_on_disk": stored,
            "ratio": raw / stored if stored else None,
        }
    step: Any = group[STEP.name]
    first_last = ends(step) if step.shape[0] else None
    total = _stored(sizes, "")
    raw = sum(array["bytes_native"] for array in arrays.values())
    attributes = dict(group.attrs)
    types = {name: arrays[name]["native_dtype"] for name in arrays}
    advice = advise_run(attributes, types)
    if "lr" in arrays and advice:  # it depends on the rates and the hyperparameters
        numbers = {}
        if {"hyperparameters", "hyperparameter"} <= arrays.keys():
            names, values = (whole(path, group, f"hyperparameter{end}") for end in ("", "s"))
            numbers = dict(zip(names.tolist(), values.T, strict=True))
        advice = advise_run(attributes, types, whole(path, group, "lr"), numbers)
    return {
        **attributes,
        "steps": first_last and dict(zip(("first", "last"), first_last, strict=True)),
        "arrays": arrays,
        "bytes_native": raw,
        "bytes_on_disk": total,
        "ratio": raw / total if total else None,
        "files": None if sizes is None else len(sizes),
        "written_to": written_to,
        NOTES: notes_of(attributes),
        "advice": [sentence.facts() for sentence in advice],
        "populations": {
            name.removeprefix(POPULATION): int(np.count_nonzero(whole(path, group, name)))
            for name in along_token(arrays)
            if name not in COORDINATES
        },
    }


def run_status(facts: Mapping[str, Any]) -> str:
    """Status of a run, with a remark if its process died."""
    dead = facts["status"] == "recording" and facts["written_to"] is False
    return f"{facts['status']}, but its process is gone" if dead else str(facts["status"])


def _lists_sizes(place: Location) -> bool:
    return isinstance(place, Path) or place.listed


def _stored(sizes: Mapping[str, int] | None, prefix: str) -> int | None:
    """Bytes of the objects whose keys begin with `prefix`; None if `sizes` is None."""
    if sizes is None:
        return None
    return sum(size for key, size in sizes.items() if key.startswith(prefix))


def _order(name: str) -> tuple[int, str]:
    known = [*VARIABLES, STEP.name]
    return (known.index(name) if name in known else len(known), name)


def object_sizes(run: Location) -> dict[str, int]:
    """Bytes of all objects of a run, by key, including a block that is being written."""
    if isinstance(run, RemotePath):
        return {path.key[len(run.key) + 1 :]: size for path, size in run.below().items()}
    sizes = {}
    for parent, _, names in os.walk(run):
        for name in names:
            file = os.path.join(parent, name)
            try:
                sizes[os.path.relpath(file, run)] = os.stat(file).st_size
            except FileNotFoundError:  # a temporary file that was renamed meanwhile
                continue
    return sizes


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def run_paths(paths: Paths) -> list[str]:
    """Paths of runs, without duplicates. Patterns and folders of runs are expanded.

    The name of a training that recorded several matrices is replaced by the runs of these.

    Raises
    ------
    RunNotFound
        If a pattern matches nothing, or there are no paths.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    runs: list[str] = []
    for path in [os.fspath(path) for path in given]:
        if os.path.exists(path) or "://" in path or not glob.has_magic(path):
            runs += _runs_within(path) or matrix_runs(path) or [path]
            continue
        matching = sorted(filter(os.path.isdir, glob.glob(path)), key=_by_numbers)
        if not matching:
            raise RunNotFound(f"there is no run at {path}")
        runs += matching
    if not runs:
        raise RunNotFound("got no runs to open, expected paths or a pattern such as runs/*.zarr")
    return list(dict.fromkeys(runs))


def matrix_runs(path: str | os.PathLike[str]) -> list[str]:
    """Runs of the matrices that one training recorded under a name, ``NAME.<parameter>.zarr``.

    There are none if a run has the name itself.
    """
    name = os.fspath(path).removesuffix(".zarr")
    if os.path.exists(path) or "://" in name:
        return []
    return [run for run in _extended(name) if run == f"{name}.{_parameter(run)}.zarr"]


def all_matrix_runs(path: str) -> list[str]:
    """As `matrix_runs`; none if it is uncertain that these are all.

    A run whose root is broken does not name its parameter. So each folder ``NAME.*.zarr`` has to be
    the run of a matrix.
    """
    runs = matrix_runs(path)
    return runs if len(runs) == len(_extended(path.removesuffix(".zarr"))) > 1 else []


def _extended(name: str) -> list[str]:
    return sorted(glob.glob(f"{glob.escape(name)}.*.zarr"))


def _parameter(run: str) -> str | None:
    """Recorded parameter of a run; None if it is not a run."""
    try:
        return RunAttributes.of(root_attributes(run)).parameter
    except (FormatError, RunNotFound):
        return None


def _runs_within(path: str) -> list[str]:
    """Runs in a folder that is not a run."""
    if os.path.exists(os.path.join(path, METADATA_KEY)):
        return []
    roots = glob.glob(os.path.join(glob.escape(path), "*.zarr", METADATA_KEY))
    return sorted(map(os.path.dirname, roots), key=_by_numbers)


def _by_numbers(path: str) -> list[tuple[int, str]]:
    """Sort key of a name, with numbers in numeric order."""
    parts = re.findall(r"\d+|\D+", path)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
