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

ROWS = 16
# Of every kind: frequent and rare, and in all places of a block.
TOKENS = (262, 1_234, 11_111, 27_001, 50_256)
STEPS = (5, 34, 41, 50, 60, 18, 27)
MEMORY = 1 << 30  # that a scan takes at a time, with all copies


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
    bits = wordybird()["W"]
    folder = cache() / "scratch-read"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = machine()
    paths = write(folder, bits, options.block_rows)
    file = h5py.File(paths["run.h5"])["W"]
    safe = safe_open(paths["run.safetensors"], "np").get_slice("W")
    ours = open_run(paths["run.zarr"], chunks=None).W
    dask, plain = open_run(paths["run.zarr"]).W, xr.open_zarr(paths["run.zarr"]).W

    def blocks(read: Callable[[slice], Any]) -> Any:
        for start in range(0, len(bits), ROWS):
            read(slice(start, min(start + ROWS, len(bits))))

    readers: dict[str, Callable[[Any], np.ndarray]] = {
        "open_run, chunks=None": lambda key: ours[key].values,
        "open_run": lambda key: dask[key].values,
        "xr.open_zarr": lambda key: plain[key].values,
        "h5py uint16, widened": lambda key: widened(file[key]),
        "safetensors, widened": lambda key: safe[key].astype(np.float32),
    }
    everything = slice(None)

    def each(keys: list[Any]) -> Callable[[Callable[[Any], Any]], None]:
        def ask(read: Callable[[Any], Any]) -> None:
            for key in keys:
                read(key)

        return ask

    # How often a question is asked in a round, and how.
    questions: dict[str, tuple[int, Callable[[Callable[[Any], Any]], Any]]] = {
        "one token, all steps": (len(TOKENS), each([(everything, token) for token in TOKENS])),
        "one step": (len(STEPS), each(list(STEPS))),
        "everything, to float32": (1, blocks),
    }
    results: dict[str, dict[str, float]] = {}
    rows = []
    for question, (count, ask) in questions.items():

        def contender(read: Callable[[Any], Any], ask: Any = ask) -> Callable[[], Any]:
            return lambda: (ask(read), (1.0, {}))[1]

        measured = alternate(
            {name: contender(read) for name, read in readers.items()},
            options.rounds,
            memory=MEMORY if question.startswith("everything") else 0,
        )
        seconds = {name: 1 / item.rate / count for name, item in measured.items()}
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
