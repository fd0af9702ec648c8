"""The encodings `delta` and `replay` of one history: sizes, and times to write and read.

python benchmarks/encodings.py RUN.zarr [--rounds 5] [--no-h5py]

Both encodings, and uncompressed HDF5 if h5py is installed, hold the same bits. Rounds alternate.
The page cache holds all files.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import alternate, machine, save, table

from trajstore import RunWriter, open_run
from trajstore.store.reading.run_info import information

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
ENCODINGS = ("delta", "replay")

Rows = dict[str, Any]
Contender = Callable[[], tuple[float, dict[str, Any]]]


def written(folder: Path, encoding: str, rows: Rows, facts: dict[str, Any]) -> tuple[float, Any]:
    """Write all rows as a run; bytes in native types."""
    path = folder / f"{encoding}.zarr"
    with RunWriter.create(path, encoding=encoding, overwrite=True, fsync=False, **facts) as run:
        for row, step in enumerate(rows["step"]):
            run.append(step=int(step), **{name: rows[name][row] for name in facts["variables"]})
        return float(run.bytes_recorded), {}


def written_by_h5py(folder: Path, rows: Rows) -> tuple[float, Any]:
    """Write the matrices as h5py writes them by default, contiguous; bytes."""
    import h5py

    size = 0
    with h5py.File(folder / "raw.h5", "w") as file:
        for name in MATRICES:
            data = file.create_dataset(name, rows[name].shape, "u2")
            for row, values in enumerate(rows[name]):
                data[row] = values.view(np.uint32) >> 16
                size += values.nbytes // 2
    return float(size), {}


def readers(folder: Path, encoding: str, shape: tuple[int, ...]) -> dict[str, Contender]:
    """Ways of reading: all of W, one token's history, one step."""
    whole = float(np.prod(shape) * 2)

    def read(key: Any) -> tuple[float, dict[str, Any]]:
        ds = open_run(folder / f"{encoding}.zarr", chunks=None)
        return whole, {"sum": float(ds.W[key].values.sum(dtype=np.float64))}

    keys = {"all of W": ..., "a token": np.s_[:, shape[1] // 2], "a step": np.s_[shape[0] // 2 + 1]}
    return {f"{encoding}: {name}": partial(read, key) for name, key in keys.items()}


def main() -> None:
    """Print a table of sizes, and one of times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-h5py", action="store_true")
    given = parser.parse_args()
    ds = open_run(given.run).load()
    names = [str(name) for name in ds.data_vars if "example" not in ds[name].dims]
    rows: Rows = {name: ds[name].values for name in names} | {"step": ds.step.values}
    facts = {
        "token": ds.token.values,
        "hidden": ds.sizes["hidden"],
        "variables": {name: ds[name].attrs["native_dtype"] for name in names},
        "attributes": {"optimizer": ds.attrs["optimizer"]},
    }
    folder = Path(tempfile.mkdtemp())
    try:
        writers = {each: partial(written, folder, each, rows, facts) for each in ENCODINGS}
        if not given.no_h5py:
            writers["uncompressed HDF5"] = partial(written_by_h5py, folder, rows)
        ingest = alternate(writers, given.rounds)
        sizes = {each: information(folder / f"{each}.zarr")["arrays"] for each in ENCODINGS}
        reading: dict[str, Contender] = {}
        for each in ENCODINGS:
            reading |= readers(folder, each, ds.W.shape)
        read = alternate(reading, given.rounds)
    finally:
        shutil.rmtree(folder)
    native = sum(sizes["delta"][name]["bytes_native"] for name in MATRICES)
    lines = [
        [name, *(f"{sizes[each][name]['ratio']:.2f}" for each in ENCODINGS)] for name in MATRICES
    ]
    totals = [sum(sizes[each][name]["bytes_on_disk"] for name in MATRICES) for each in ENCODINGS]
    lines.append(["all", *(f"{native / total:.2f}" for total in totals)])
    text = table("Times smaller than native", ["array", *ENCODINGS], lines)
    taken = ingest | read
    text += "\n" + table(
        "MB of native values a second",
        ["", "MB/s"],
        [[name, f"{found.rate / 1e6:,.0f}"] for name, found in taken.items()],
    )
    results = {name: {"seconds": found.seconds} for name, found in taken.items()}
    save("encodings", text, {"machine": machine(), "sizes": sizes, "times": results})


if __name__ == "__main__":
    main()
