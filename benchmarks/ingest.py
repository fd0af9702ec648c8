"""Speed of writing rows, compared with other libraries, on a real Wordybird history.

Timed are the end of writing, when the page cache has the bytes, and the end of the flush to disk.
The files of each contender are flushed and removed before the next one starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorstore
import xarray as xr
import zarr
from history import MATRICES, record, wordybird
from measure import alternate, cache, machine, save, table
from ml_dtypes import bfloat16
from safetensors.numpy import save_file


class Passes:
    """An array that is repeated row by row: a long history of few rows."""

    def __init__(self, array: np.ndarray, passes: int) -> None:
        self._array = array
        self.shape = (len(array) * passes, *array.shape[1:])
        self.dtype = array.dtype
        self.nbytes = array.nbytes * passes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, step: int) -> np.ndarray:
        return self._array[step % len(self._array)]


Rows = Mapping[str, Any]  # arrays, or passes over them

BASE = "h5py uint16, uncompressed"


def size_of(path: Path) -> int:
    """Return the bytes below a path."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def fresh(name: str) -> Path:
    """Return a scratch path that does not exist."""
    path = cache() / "scratch" / name
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    return path


def trajstore_writer(rows: Rows, **options: Any) -> Path:
    path = fresh("trajstore.zarr")
    record(path, rows, **options)
    return path


def hdf5(rows: Rows, **options: Any) -> Path:
    path = fresh("run.h5")
    with h5py.File(path, "w") as file:
        sets = {
            name: file.create_dataset(name, a.shape, a.dtype, chunks=(1, *a.shape[1:]), **options)
            for name, a in rows.items()
        }
        for step in range(len(rows["W"])):
            for name, dataset in sets.items():
                dataset[step] = rows[name][step]
    return path


def xarray_append(rows: Rows) -> Path:
    path = fresh("xarray.zarr")
    for step in range(len(rows["W"])):
        ds = xr.Dataset(
            {name: (("step", "token", "hidden"), a[step : step + 1]) for name, a in rows.items()}
        )
        ds.to_zarr(path, consolidated=False, **({"append_dim": "step"} if step else {}))
    return path


def zarr_chunk_a_step(rows: Rows) -> Path:
    path = fresh("plain.zarr")
    root = zarr.create_group(path)
    arrays = {
        name: root.create_array(name, shape=a.shape, dtype=a.dtype, chunks=(1, *a.shape[1:]))
        for name, a in rows.items()
    }
    for step in range(len(rows["W"])):
        for name, array in arrays.items():
            array[step] = rows[name][step]
    return path


def tensorstore_zarr3(rows: Rows) -> Path:
    path = fresh("tensorstore.zarr")
    stores = {
        name: tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": f"file://{path}/{name}",
                "metadata": {
                    "shape": a.shape,
                    "data_type": "uint16",
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": (1, *a.shape[1:])},
                    },
                    "codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {
                            "name": "blosc",
                            "configuration": {
                                "cname": "lz4",
                                "clevel": 5,
                                "shuffle": "bitshuffle",
                                "typesize": 2,
                                "blocksize": 0,
                            },
                        },
                    ],
                },
                "create": True,
            }
        ).result()
        for name, a in rows.items()
    }
    pending = []
    for step in range(len(rows["W"])):
        pending += [store[step].write(rows[name][step]) for name, store in stores.items()]
        while len(pending) > 16:
            pending.pop(0).result()
    for write in pending:
        write.result()
    return path


def memmap(rows: Rows) -> Path:
    path = fresh("memmap")
    path.mkdir()
    maps = {
        name: np.lib.format.open_memmap(path / f"{name}.npy", "w+", a.dtype, a.shape)
        for name, a in rows.items()
    }
    for step in range(len(rows["W"])):
        for name, out in maps.items():
            out[step] = rows[name][step]
    return path


def list_then_save(rows: Rows) -> Path:
    """Copy every row to a list, and stack and save it at the end, as the notebooks do."""
    path = fresh("run.safetensors")
    lists: dict[str, list[np.ndarray]] = {name: [] for name in rows}
    for step in range(len(rows["W"])):
        for name, items in lists.items():
            items.append(rows[name][step].copy())
    save_file({name: np.stack(items).view(bfloat16) for name, items in lists.items()}, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=160, help="rows for the fast contenders")
    parser.add_argument("--first", type=int, default=40, help="first row of the history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=1, help="passes of the fast contenders")
    parser.add_argument("--quick", action="store_true", help="skip the slow contenders")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names to include")
    options = parser.parse_args()
    history = wordybird()

    def loaded(count: int) -> Rows:
        span = slice(options.first, options.first + count)
        return {name: np.array(history[name][span]) for name in MATRICES}

    many: Rows = {
        name: Passes(array, options.passes) for name, array in loaded(options.rows).items()
    }
    few = loaded(8)
    fast: dict[str, Callable[[Rows], Path]] = {
        "trajstore": trajstore_writer,
        "trajstore, 1 thread": lambda rows: trajstore_writer(rows, threads=1),
        BASE: hdf5,
        "np.memmap, uncompressed": memmap,
        "list, then save_file": list_then_save,
        "TensorStore zarr3, lz4": tensorstore_zarr3,
    }
    slow: dict[str, Callable[[Rows], Path]] = {
        "h5py uint16, gzip-1": lambda rows: hdf5(rows, compression="gzip", compression_opts=1),
        "zarr-python, one chunk per step": zarr_chunk_a_step,
        "xarray to_zarr, append per step": xarray_append,
    }

    flushing: dict[str, list[float]] = {}

    def flush(name: str) -> None:
        start = time.perf_counter()
        os.sync()
        flushing.setdefault(name, []).append(time.perf_counter() - start)
        shutil.rmtree(cache() / "scratch")
        os.sync()

    def chosen(writers: dict[str, Callable[[Rows], Path]]) -> dict[str, Callable[[Rows], Path]]:
        return {
            name: write
            for name, write in writers.items()
            if name == BASE or any(part in name for part in options.only)
        }

    def contender(write: Callable[[Rows], Path], rows: Rows) -> Callable[[], Any]:
        raw = sum(array.nbytes for array in rows.values())

        def run() -> tuple[float, dict[str, Any]]:
            path = write(rows)
            return raw, {"ratio": raw / size_of(path)}

        return run

    facts = machine()
    size = sum(array.nbytes for array in many.values())
    shutil.rmtree(cache() / "scratch", ignore_errors=True)
    os.sync()
    results = alternate(
        {name: contender(f, many) for name, f in chosen(fast).items()},
        options.rounds,
        memory=size,
        after=flush,
    )
    if not options.quick:
        results |= alternate(
            {name: contender(f, few) for name, f in chosen(slow).items()}, 2, after=flush
        )

    def on_disk(name: str) -> float:
        """Return the bytes per second until they are on disk, of the median round."""
        measured = results[name]
        pairs = zip(measured.seconds, flushing[name], strict=True)
        return measured.work / statistics.median(map(sum, pairs))

    base = results[BASE].rate
    gzip = results.get("h5py uint16, gzip-1")
    rows = [
        [
            name,
            f"{measured.rate / 1e6:,.0f}",
            f"{measured.rate / base:.2f}",
            f"{on_disk(name) / 1e6:,.0f}",
            f"{on_disk(name) / on_disk(BASE):.2f}",
            f"{measured.rate / gzip.rate:.1f}" if gzip else "",
            f"{measured.facts['ratio']:.2f}",
        ]
        for name, measured in results.items()
    ]
    title = f"Ingest: Wordybird rows ({sum(a[0].nbytes for a in many.values()) / 1e6:.1f} MB each)"
    columns = [
        "writer",
        "MB/s",
        "× h5py raw",
        "MB/s to disk",
        "× h5py raw",
        "× gzip-1",
        "smaller by",
    ]
    text = table(title, columns, rows)
    save(
        "ingest",
        text,
        {
            "machine": facts,
            "rates": {name: measured.rate for name, measured in results.items()},
            "seconds": {name: measured.seconds for name, measured in results.items()},
            "flushing": flushing,
        },
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
