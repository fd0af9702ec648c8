"""Runs for the tests of export and import, and how two runs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xarray as xr

from trajstore import RunWriter, import_file, open_run
from trajstore.exchange.import_file import preview_import, read_runs
from trajstore.formats.open_file import open_file

ALL = {
    "W": "bfloat16",
    "grad": "bfloat16",
    "exp_avg": "bfloat16",
    "exp_avg_sq": "bfloat16",
    "logits": "bfloat16",
    "loss": "float32",
}
"""Variables of a run as the notebooks recorded it."""

DIMS = {"W": 3, "cells": 3, "grad": 3, "exp_avg": 3, "exp_avg_sq": 3, "logits": 2}
ZERO = ("exp_avg", "exp_avg_sq")


def write_run(
    path: Path,
    variables: dict[str, str],
    *,
    rows: int,
    tokens: int,
    hidden: int,
    seed: int = 0,
    any_bits: bool = False,
    ids: np.ndarray | None = None,
    steps: np.ndarray | None = None,
    still: Mapping[int, int] = {},
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write a run and return its bits.

    With `any_bits` every bit pattern occurs anywhere; without it row 0 follows the timeline. Tokens
    that are `still` stay in their place from a row on.
    """
    rng = np.random.default_rng(seed)
    values = {}
    for name, dtype in variables.items():
        shape = (rows, tokens, hidden)[: DIMS.get(name, 1)]
        shape = (rows, hidden) if name == "hidden_mean" else shape
        kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
        if any_bits:
            values[name] = rng.integers(0, 1 << (8 * kind.itemsize), shape, kind)
            continue
        floats = rng.normal(size=shape).astype("f4")
        if (steps is None or steps[0] == 0) and name != "W":
            floats[0] = 0 if name in ZERO else np.nan
        values[name] = floats.astype(dtype).view(kind)
    for place, row in still.items():
        values["W"][row:, place] = values["W"][row, place]
    token = np.arange(tokens) if ids is None else ids
    with RunWriter.create(
        path,
        token=token,
        hidden=hidden,
        variables=variables,
        is_dead=np.arange(tokens) % 3 == 0,
        token_count=np.arange(tokens) % 3 * np.arange(tokens),
        token_text=[f"é{number}\n" for number in range(tokens)],
        **{"block_rows": 4, **options},
    ) as run:
        for row in range(rows):
            for name, place in run.next_row().items():
                place[...] = values[name][row]
            run.commit_row(row if steps is None else int(steps[row]))
    return values


def assert_same_run(a: Any, b: Any) -> None:
    """Two runs, or Datasets of them, hold the same bits, coordinates and native types."""
    one, other = (x if isinstance(x, xr.Dataset) else xr.open_zarr(x) for x in (a, b))
    assert {*one.variables} == {*other.variables}
    for name in one.variables:
        assert one[name].dims == other[name].dims
        if one[name].dtype.kind == "f":
            assert one[name].attrs["native_dtype"] == other[name].attrs["native_dtype"], name
            assert one[name].values.tobytes() == other[name].values.tobytes(), name
        else:
            assert (one[name].values == other[name].values).all(), name


WORDS = {
    "W": ("W", "embeddings", "embedding_history", "weights", "w_history", "E", "Embedding"),
    "grad": ("grad_W", "grads", "g", "gradients", "grad_history"),
    "exp_avg": ("m", "momentum", "momentum_W", "exp_avg", "first_moment"),
    "exp_avg_sq": ("v", "variance", "variance_W", "exp_avg_sq", "second_moment"),
    "logits": ("logits",),
    "loss": ("loss", "losses", "train_loss"),
    "steps": ("recorded_steps", "steps", "step"),
}
MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
FORMATS = ("safetensors", "hdf5", "npz")


@dataclass(kw_only=True)
class Truth:
    """What goes into a file: float32 values that bfloat16 holds, NaN where no step had been."""

    values: dict[str, np.ndarray]
    dead: np.ndarray
    steps: np.ndarray


def bfloat16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype("f4")


def truth(rows: int = 6, tokens: int = 7, hidden: int = 3, seed: int = 0, stride: int = 1) -> Truth:
    rng = np.random.default_rng(seed)
    shape = (rows, tokens, hidden)
    values = {name: bfloat16(rng.normal(size=shape)) for name in MATRICES}
    values["exp_avg_sq"] = np.abs(values["exp_avg_sq"])
    values["logits"] = bfloat16(rng.normal(size=shape[:2]))
    values["loss"] = bfloat16(rng.normal(size=rows) + 4)
    for name in ("exp_avg", "exp_avg_sq"):
        values[name][0] = 0
    for name in ("grad", "logits", "loss"):
        values[name][0] = np.nan
    dead = np.zeros(tokens, bool)
    dead[rng.permutation(tokens)[: tokens // 2 - 1]] = True
    return Truth(values=values, dead=dead, steps=np.arange(rows) * stride)


def stored(values: np.ndarray, kind: str, blank: float | None = 0.0) -> np.ndarray:
    """Values as a file has them: of a type, with zeros or NaN in the row that no step made."""
    made = values.copy()
    if blank is not None and np.isnan(made[0]).all():
        made[0] = blank
    if kind == "uint16":
        return made.astype(ml_dtypes.bfloat16).view("u2")
    if kind == "bfloat16":
        return made.astype(ml_dtypes.bfloat16)
    return made.astype(kind)


def write(path: Path, form: str, arrays: dict[str, Any], **attributes: Any) -> Path:
    """Write a file of one of the formats."""
    arrays = {key: np.asarray(array) for key, array in arrays.items()}
    if form == "safetensors":
        from safetensors.numpy import save_file

        metadata = {key: str(value) for key, value in attributes.items()}
        contiguous = {key: np.ascontiguousarray(a).reshape(a.shape) for key, a in arrays.items()}
        save_file(contiguous, path, metadata=metadata or None)
    elif form == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            for key, array in arrays.items():
                file.create_dataset(key, data=array)
            file.attrs.update(attributes)
    elif form == "npz":
        with path.open("wb") as opened:
            np.savez_compressed(opened, **arrays)
    else:
        raise AssertionError(form)
    return path


def read_all(path: Path) -> None:
    """Everything that an import reads of a file, but for writing the run."""
    with open_file(path) as file:
        for run in read_runs(file).runs:
            for held in run.variables:
                assert held.rows in (len(run.steps), len(run.steps) - 1)
                held.read(0, held.rows)


def imported(tmp_path: Path, arrays: dict[str, Any], form: str = "npz", **options: Any) -> Any:
    """Dataset of the one run of a file, and the result of its import, as a preview shows it."""
    file = write(tmp_path / "file", form, arrays, **options.pop("attributes", {}))
    done = import_file(file, tmp_path / "run.zarr", overwrite=True, **options)
    assert done.others == ()
    assert preview_import(file, **options) == replace(done, path=None)
    return open_run(done.path).load(), done
