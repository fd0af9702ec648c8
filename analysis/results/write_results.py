"""Write analysis results block by block: Zarr, NetCDF, safetensors or CSV, by the extension."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection
from math import inf, nan
from pathlib import Path
from typing import Any

import dask
import dask.array
import numpy as np
import xarray as xr

from trajstore.analysis.scan.block_tasks import Report, compute_all
from trajstore.analysis.scan.result_variables import flags_of, is_category
from trajstore.errors import InvalidArgument, RunExists, needs_extra
from trajstore.formats.safetensors import begin_safetensors
from trajstore.installation import __version__
from trajstore.store.storage.atomic import check_writable
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import move_into_place, staged_folder

ENDINGS = (".zarr", ".nc", ".csv", ".safetensors")

_WRITTEN_BY = "written_by_trajstore"
"""Attribute of a Zarr that marks it as a result, not a run or a file of another program."""

# Values per part of a table; each takes about 100 bytes as text.
_CSV_VALUES = 1 << 19

_IN_MEMORY = 1 << 20
"""Maximum values of a variable that is described in one task, with all values in memory."""

_MOST_COUNTS = 1000
"""Maximum values of a table that is shown completely."""


def describe(result: xr.Dataset, *, report: Report | None = None) -> dict[str, dict[str, Any]]:
    """Sizes and statistics of each variable of a result, computed block by block.

    Parameters
    ----------
    result : Dataset
        A lazy numeric result.
    report : callable, optional
        Called with the numbers of finished and of all tasks.

    Returns
    -------
    dict
        Per variable: ``sizes``, ``units``, ``long_name``, ``flags`` (the count of each category or
        special value, by meaning), ``nan`` (the count of NaN), and ``min``, ``mean`` and ``max`` of
        the other values, NaN if there are none. A variable along population also has
        ``populations``, with the same for each population. A small table of counts, or of the first
        by rank, also has ``values``, and ``labels`` along each dimension; one of numbers of tokens
        ``texts``, if the result has them.
    """
    facts = {
        str(name): _facts(array) if array.size > _IN_MEMORY else dask.delayed(_facts)(array)
        for name, array in result.data_vars.items()
    }
    (descriptions,) = compute_all([facts], report)
    return {name: _computed(facts) for name, facts in descriptions.items()}


def _facts(array: xr.DataArray) -> dict[str, Any]:
    """Facts about a variable, of which the numbers are lazy."""
    parts: dict[str, xr.DataArray] = {}
    if "population" in array.dims and "population" in array.coords:
        names = array["population"].values.tolist()
        parts = {str(name): array.isel(population=at) for at, name in enumerate(names)}
    facts = {
        "sizes": {str(dim): size for dim, size in array.sizes.items()},
        "units": str(array.attrs.get("units", "")),
        "long_name": str(array.attrs.get("long_name", array.name)),
        **_numbers(array),
        "populations": {name: _numbers(part) for name, part in parts.items()},
    }
    if array.size <= _MOST_COUNTS and (_are_counts(array) or _are_ranked(array)):
        labels = {str(dim): [str(label) for label in array[dim].values] for dim in array.dims}
        facts |= {"values": array, "labels": labels}
        texts = [c for c in array.coords.values() if c.dims == array.dims and c.dtype.kind in "UTO"]
        if texts and array.dtype.kind in "iu":
            facts["texts"] = texts[0]
    return facts


def _numbers(array: xr.DataArray) -> dict[str, Any]:
    flags = flags_of(array)
    counts = {
        meaning: (array == value).sum() if array.size else 0 for value, meaning in flags.items()
    }
    numbers: dict[str, Any] = {"min": nan, "mean": nan, "max": nan, "nan": 0}
    # Along rank, whole numbers are names, such as tokens.
    is_name = is_category(array) or (_are_ranked(array) and array.dtype.kind in "iu")
    if array.size and not is_name:
        known = array.where(~array.isin([*flags])) if flags else array
        numbers |= _statistics(known.data)
        if flags:
            numbers["nan"] = 0
    return {**numbers, "size": array.size, "flags": counts}


def _statistics(values: Any) -> dict[str, Any]:
    """Statistics of a NumPy or dask array, lazy if it is; of floats also the number of NaN.

    `DataArray.min` turns the warning about values that are all NaN off and on again for the whole
    process, so that threads that do so at the same time still warn.
    """
    if values.dtype.kind != "f":
        found = {"min": values.min(), "mean": values.mean(dtype="f8"), "max": values.max()}
    else:
        there = ~np.isnan(values)
        count = there.sum()
        found = {
            "min": np.where(count > 0, np.where(there, values, inf).min(), nan),
            "mean": np.where(there, values, 0).sum(dtype="f8") / np.where(count > 0, count, nan),
            "max": np.where(count > 0, np.where(there, values, -inf).max(), nan),
            "nan": values.size - count,
        }
    return {name: xr.DataArray(number) for name, number in found.items()}


def _computed(facts: Any) -> Any:
    """Facts with computed arrays as numbers and lists."""
    if isinstance(facts, dict):
        return {name: _computed(fact) for name, fact in facts.items()}
    return facts.values.tolist() if isinstance(facts, xr.DataArray) else facts


def _are_counts(array: xr.DataArray) -> bool:
    """True for a table of counts whose dimensions all have text labels."""
    labelled = all(dim in array.coords and array[dim].dtype.kind in "UTO" for dim in array.dims)
    return array.dtype.kind in "iu" and array.ndim > 1 and labelled


def _are_ranked(array: xr.DataArray) -> bool:
    """True for the first of a ranking, such as the nearest tokens; statistics have populations."""
    return "rank" in array.dims and "population" not in array.dims


def write_result(
    result: xr.Dataset,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    report: Report | None = None,
) -> list[Path]:
    """Compute a result and write it, with a few blocks in memory at a time.

    Parameters
    ----------
    result : Dataset
        A lazy result of any dimensions.
    path : path-like
        Path with the extension ``.zarr``, ``.nc``, ``.csv`` or ``.safetensors``. CSV writes one
        file per set of dimensions, such as ``NAME.token.csv`` and ``NAME.step.population.csv``.
        A safetensors file holds the variables and numeric coordinates; dimensions, attributes and
        text coordinates are JSON in its metadata.
    overwrite : bool
        Replace an existing result.
    report : callable, optional
        Called with the numbers of finished and of all tasks.

    Returns
    -------
    list of Path
        Written files. Each is written completely or not at all.

    Raises
    ------
    InvalidArgument
        For another extension.
    RunExists
        If `path` exists and `overwrite` is not set, or if it is a folder that is not a result.
    MissingExtra
        For NetCDF if h5netcdf is not installed.
    """
    target = check_result_target(path, overwrite=overwrite)
    parts = {target: result}
    if target.suffix == ".csv":
        parts = _tables(result, target)
        _check_parts(parts, overwrite=overwrite)
    write = {
        ".zarr": _write_zarr,
        ".nc": _write_netcdf,
        ".csv": _write_csv,
        ".safetensors": _write_safetensors,
    }[target.suffix]
    with staged_folder(target) as scratch:
        for number, (part, ds) in enumerate(parts.items()):
            new = scratch / f"{number}{target.suffix}"
            compute_all([write(ds, new)], report)
            move_into_place(new, part, old=scratch / f"{number}.old", overwrite=overwrite)
    return list(parts)


def check_result_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Check the target of a result before the computation.

    Raises
    ------
    InvalidArgument, RunExists, MissingExtra
        As for `write_result`. The files of several CSV tables are checked later.
    """
    target = local_path(path)
    if target.suffix not in ENDINGS:
        raise InvalidArgument(
            f"got {target}, expected a file name with one of the extensions {', '.join(ENDINGS)}"
        )
    if target.suffix == ".nc":
        with needs_extra("a NetCDF file", "hdf5", "write .zarr or .csv"):
            import h5netcdf  # noqa: F401
    if target.suffix != ".csv":
        _check_parts([target], overwrite=overwrite)
    return target


def _check_parts(parts: Collection[Path], *, overwrite: bool) -> None:
    taken = [str(part) for part in parts if part.exists()]
    if taken and not overwrite:
        raise RunExists(
            f"{', '.join(taken)} already exists; choose another name, or replace it with "
            "overwrite=True"
        )
    for part in parts:
        check_writable(part)
        _check_replaceable(part)


def _check_replaceable(path: Path) -> None:
    """Raise for a folder that is not a result of an analysis.

    Raises
    ------
    RunExists
    """
    if not path.is_dir():
        return
    try:
        metadata = json.loads((path / "zarr.json").read_bytes())
        ours = _WRITTEN_BY in metadata["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours or path.is_symlink():
        raise RunExists(
            f"{path} is a folder but not an analysis result, so it is not replaced; choose another "
            "name"
        )


def _plain(ds: xr.Dataset, text: Any) -> xr.Dataset:
    """Dataset without the encoding of its run, with even chunks and one text type."""
    ds = ds.drop_encoding()
    largest: dict[Any, int] = {}
    for array in ds.variables.values():
        for dim, sizes in array.chunksizes.items():
            largest[dim] = max(largest.get(dim, 0), *sizes)
    texts = {name: array for name, array in ds.coords.items() if array.dtype.kind in "TUO"}
    ds = ds.chunk(largest)
    for name, array in texts.items():
        values = np.asarray(array.values).astype(object).astype(text)
        ds = ds.assign_coords({name: (array.dims, values, array.attrs)})
    return ds


def _write_zarr(ds: xr.Dataset, path: Path) -> Any:
    # The Zarr specification has variable-length text, but no text of fixed length.
    plain = _plain(ds, np.dtypes.StringDType()).assign_attrs({_WRITTEN_BY: __version__})
    with warnings.catch_warnings():
        # Some readers expect consolidated metadata; the others ignore it.
        warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
        return plain.to_zarr(path, mode="w-", zarr_format=3, consolidated=True, compute=False)


def _write_netcdf(ds: xr.Dataset, path: Path) -> Any:
    return _plain(ds, object).to_netcdf(path, engine="h5netcdf", compute=False)


def _write_safetensors(ds: xr.Dataset, path: Path) -> Any:
    texts = {str(name): array for name, array in ds.coords.items() if array.dtype.kind in "TUO"}
    arrays = {
        str(name): dask.array.asarray(array.data)
        for name, array in ds.variables.items()
        if name not in texts
    }
    metadata = {name: json.dumps([str(text) for text in array.values.ravel()])
                for name, array in texts.items()}  # fmt: skip
    metadata["dims"] = json.dumps({name: ds[name].dims for name in (*arrays, *texts)})
    metadata["attributes"] = json.dumps(
        {str(name): array.attrs for name, array in ds.variables.items()}, default=_as_json
    )
    path.touch()
    kinds = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    targets = begin_safetensors(path, kinds, metadata)
    return dask.array.store(
        [*arrays.values()],
        [targets[name] for name in arrays],
        lock=False,
        compute=False,
    )


def _as_json(value: Any) -> Any:
    """Plain form of a NumPy value in attributes."""
    return value.tolist()


def _tables(result: xr.Dataset, path: Path) -> dict[Path, xr.Dataset]:
    """Files and variables of the tables, one per set of dimensions."""
    shapes: dict[tuple[Any, ...], list[Any]] = {}
    for name, array in result.data_vars.items():
        shapes.setdefault(array.dims, []).append(name)
    if len(shapes) == 1:
        return {path: result}
    return {
        path.with_suffix("." + ".".join(map(str, dims or ("scalar",))) + ".csv"): result[names]
        for dims, names in shapes.items()
    }


def _write_csv(ds: xr.Dataset, path: Path) -> Any:
    ds = ds.drop_attrs()
    dims = next(iter(ds.data_vars.values())).dims
    if "step" not in dims:
        return dask.delayed(_append_rows)(_arrays(ds), path, None)
    row = int(np.prod([ds.sizes[dim] for dim in dims if dim != "step"], dtype=np.int64))
    size = max(1, _CSV_VALUES // max(1, row * len(ds.data_vars)))
    written = None
    for start in range(0, max(ds.sizes["step"], 1), size):
        # Each part depends on the previous one, so that they run in order and few at a time.
        part = ds.isel(step=slice(start, start + size))
        written = dask.delayed(_append_rows)(_arrays(part), path, written)
    return written


def _arrays(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """Variables one by one: dask loses one that another of the same Dataset is computed from."""
    return {str(name): array for name, array in ds.data_vars.items()}


def _append_rows(arrays: dict[str, xr.DataArray], path: Path, after: None) -> None:
    ds, first = xr.Dataset(arrays), not path.exists()
    dims = next(iter(ds.data_vars.values())).dims
    frame = ds.to_dataframe(dim_order=dims) if dims else ds.to_pandas().to_frame().T
    # With both line ends as the end, a text that holds one of them, as a token may, is quoted.
    frame.to_csv(path, mode="a", header=first, index=bool(dims), lineterminator="\r\n")
