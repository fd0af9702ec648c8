"""How fast a history comes out: one token, one step, everything; against HDF5 and safetensors."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr
from history import wordybird
from measure import alternate, cache, machine, save, table
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import save_file

from trajstore import RunWriter, open_run

TOKEN, STEP, ROWS = 1234, 77, 16


def write(folder: Path, bits: np.ndarray, block_rows: int | None) -> dict[str, Path]:
    """The same W in each format."""
    paths = {name: folder / name for name in ("run.zarr", "run.h5", "run.safetensors")}
    with RunWriter.create(
        paths["run.zarr"],
        token=np.arange(bits.shape[1]),
        hidden=bits.shape[2],
        variables={"W": "bfloat16"},
        block_rows=block_rows,
    ) as run:
        for step in range(len(bits)):
            run.append(step=step, W=np.array(bits[step]))
    with h5py.File(paths["run.h5"], "w") as file:
        data = file.create_dataset("W", bits.shape, "u2", chunks=(1, *bits.shape[1:]))
        for step in range(len(bits)):
            data[step] = bits[step]
    save_file({"W": np.asarray(bits).view(bfloat16)}, paths["run.safetensors"])
    return paths


def widened(bits: np.ndarray) -> np.ndarray:
    """Float32 of bfloat16 bits, as HDF5's users do it."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-rows", type=int)
    options = parser.parse_args()
    bits = wordybird()["W"][:200]
    folder = cache() / "scratch-read"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = machine()
    paths = write(folder, bits, options.block_rows)
    file = h5py.File(paths["run.h5"])["W"]
    safe = safe_open(paths["run.safetensors"], "np").get_slice("W")
    ours, plain = open_run(paths["run.zarr"]).W, xr.open_zarr(paths["run.zarr"]).W

    def blocks(read: Callable[[slice], Any]) -> Any:
        for start in range(0, len(bits), ROWS):
            read(slice(start, min(start + ROWS, len(bits))))

    readers: dict[str, Callable[[Any], np.ndarray]] = {
        "trajstore.open_run": lambda key: ours[key].values,
        "xr.open_zarr": lambda key: plain[key].values,
        "h5py uint16, widened": lambda key: widened(file[key]),
        "safetensors, widened": lambda key: safe[key].astype(np.float32),
    }
    everything = slice(None)
    questions: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
        "one token, all steps": lambda read: read((everything, TOKEN)),
        "one step": lambda read: read(STEP),
        "everything, to float32": blocks,
    }
    results: dict[str, dict[str, float]] = {}
    rows = []
    for question, ask in questions.items():

        def contender(read: Callable[[Any], Any], ask: Any = ask) -> Callable[[], Any]:
            return lambda: (ask(read), (1.0, {}))[1]

        # Safetensors reads a token of every row by copying all rows; once is enough to see.
        measured = alternate({n: contender(read) for n, read in readers.items()}, options.rounds)
        seconds = {name: 1 / item.rate for name, item in measured.items()}
        results[question] = seconds
        base = seconds["h5py uint16, widened"]
        rows += [
            [question, name, f"{second * 1e3:,.1f}", f"{base / second:.2f}"]
            for name, second in seconds.items()
        ]
    text = table(
        "Reading W of 200 Wordybird steps", ["question", "reader", "ms", "× h5py's speed"], rows
    )
    save("read", text, {"machine": facts, "seconds": results})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
