"""Runs as safetensors files, streamed: the header first, then block by block.

A file is written beside its target and moved into place when it is whole. Memory does not grow
with the run: at most one block of one variable is held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.bits import narrow, native_type
from trajstore.errors import FormatError, InvalidArgument, RunExists, VariableNotRecorded
from trajstore.objects import put
from trajstore.reader import open_run
from trajstore.schema import COORDINATES, VARIABLES

__all__ = ["LAYOUTS", "export"]

_SAFETENSORS_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor to be: what the header says of it, and its bytes when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype in ("bfloat16", "float16") else np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize


def export(
    run: str | os.PathLike[str] | xr.Dataset,
    file: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    layout: str = "native",
    overwrite: bool = False,
) -> Path:
    """Write a run as one file.

    Parameters
    ----------
    run : path-like or Dataset
        A run, or a Dataset with its variables (a subset, say).
    file : path-like
    format : {'safetensors'}
    layout : {'native', '15.1a'}
        ``native`` keeps names and native types, attributes in the file's metadata; ``15.1a`` is
        that of the notebook of this number: float32, its key names, zeros in row 0.
    overwrite : bool
        Replace a file that is there.

    Returns
    -------
    Path
        Of the file.

    Raises
    ------
    RunExists
        If there is a file and `overwrite` is not set.
    InvalidArgument
        For an unknown format or layout.
    VariableNotRecorded, FormatError
        If the run lacks what the layout needs.

    Examples
    --------
    >>> export("gatsby.zarr", "gatsby.safetensors", layout="15.1a")   # doctest: +SKIP
    """
    if format != "safetensors":
        raise InvalidArgument(f"cannot export to {format!r}; choose safetensors")
    if layout not in LAYOUTS:
        raise InvalidArgument(f"there is no layout {layout!r}; choose from {', '.join(LAYOUTS)}")
    target = Path(file)
    if target.is_dir() or (target.exists() and not overwrite):
        raise RunExists(f"{file} is already there; choose another path, or overwrite it")
    ds = run if isinstance(run, xr.Dataset) else open_run(run)
    tensors, metadata = LAYOUTS[layout](ds)
    put(target, _safetensors(tensors, metadata))
    return target


def _safetensors(tensors: list[_Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Parts of a safetensors file.

    Source: the format's specification. An 8-byte little-endian length, a JSON header padded with
    spaces to a multiple of 8, then the tensors; widest types first, so that each is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in ordered:
        written = 0
        for block in tensor.blocks():
            yield np.ascontiguousarray(block).data
            written += block.nbytes
        assert written == tensor.size, f"{tensor.name}: {written} bytes, {tensor.size} announced"


def _constant(name: str, dtype: str, value: npt.ArrayLike) -> _Tensor:
    array = np.asarray(value, dtype)
    return _Tensor(name=name, dtype=dtype, shape=array.shape, blocks=lambda: [array])


def _blocks(da: xr.DataArray) -> Iterator[npt.NDArray[Any]]:
    """Values of consecutive rows, a dask chunk of steps at a time."""
    lengths = da.chunksizes["step"] if da.chunks is not None else (da.sizes["step"],)
    start = 0
    for length in lengths:
        yield da.isel(step=slice(start, start + length)).values
        start += length


def _native(ds: xr.Dataset) -> tuple[list[_Tensor], dict[str, str]]:
    """Every variable under its own name in its own type."""
    tensors = [_constant("step", "int64", ds["step"].values)]
    attributes: dict[str, Any] = {}
    for name in (name for name in VARIABLES if name in ds):
        tensors.append(_native_tensor(ds[name]))
        attributes[name] = ds[name].attrs
    texts = None
    for entry in (entry for name, entry in COORDINATES.items() if name in ds.coords):
        if entry.dtype == "string":
            texts = [str(text) for text in ds[entry.name].values]
        else:
            tensors.append(_constant(entry.name, entry.dtype, ds[entry.name].values))
    metadata = {
        "format": "trajstore",
        "attributes": json.dumps(ds.attrs),
        "variables": json.dumps(attributes),
    }
    if texts is not None:
        metadata["token_text"] = json.dumps(texts)
    return tensors, metadata


def _native_tensor(da: xr.DataArray) -> _Tensor:
    native = native_type(da.attrs.get("native_dtype", str(da.dtype)))
    return _Tensor(
        name=str(da.name),
        dtype=native.name,
        shape=da.shape,
        blocks=lambda: (narrow(block, native) for block in _blocks(da)),
    )


def _notebook_15_1a(ds: xr.Dataset) -> tuple[list[_Tensor], dict[str, str]]:
    """All as float32, row 0 of what a step makes as zeros; the loss alone has NaN there."""
    names = {
        "embeddings": "W",
        "grads": "grad",
        "momentum": "exp_avg",
        "variance": "exp_avg_sq",
        "logits": "logits",
        "losses": "loss",
    }
    missing = [name for name in (*names.values(), "is_dead") if name not in ds.variables]
    if missing:
        raise VariableNotRecorded(
            f"layout 15.1a needs {', '.join(missing)}, which the run does not hold; "
            "record it with --record all, or export the native layout"
        )

    def series(key: str, da: xr.DataArray) -> _Tensor:
        zero_first = VARIABLES[str(da.name)].row0 == "nan" and key != "losses"

        def blocks() -> Iterator[npt.NDArray[Any]]:
            first_step = int(da["step"][0]) if da.sizes["step"] else -1
            for number, block in enumerate(_blocks(da)):
                values = block.astype(np.float32, copy=False)
                if zero_first and number == 0 and first_step == 0:
                    values = values.copy()
                    values[0] = 0
                yield values

        return _Tensor(name=key, dtype="float32", shape=da.shape, blocks=blocks)

    dead = ds["is_dead"].values.astype(bool)
    ids = ds["token"].values
    optimizer = _attribute(ds, "optimizer", "hyperparameters")
    initialisation = _attribute(ds, "config", "initialisation")
    scalars = {
        "init_sigma": initialisation["sigma"],
        "learning_rate": optimizer.get("initial_lr", optimizer["lr"]),
        "weight_decay": optimizer["weight_decay"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
    }
    return [
        _constant("recorded_steps", "int64", ds["step"].values),
        _constant("dead_token_ids", "int64", ids[dead]),
        _constant("live_token_ids", "int64", ids[~dead]),
        *(series(key, ds[name]) for key, name in names.items()),
        *(_constant(key, "float32", value) for key, value in scalars.items()),
        _constant("init_method_code", "int32", 0),  # drawn in float32, then rounded
    ], {}


def _attribute(ds: xr.Dataset, *path: str) -> dict[str, Any]:
    value: Any = ds.attrs
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, dict):
        raise FormatError(
            f"the run does not say {'.'.join(path)} in its attributes, which this layout needs; "
            "export the native layout"
        )
    return value


LAYOUTS: dict[str, Callable[[xr.Dataset], tuple[list[_Tensor], dict[str, str]]]] = {
    "native": _native,
    "15.1a": _notebook_15_1a,
}
