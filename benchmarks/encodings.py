"""The encodings `delta` and `compact` of one history: sizes, times to write and read, and memory.

    python benchmarks/encodings.py RUN.zarr [--rounds 5] [--rows 200]

Compared with uncompressed HDF5 in chunks of one step, which holds the same bits: float32, or uint16
that the reader widens, as users of HDF5 do. Rounds alternate. The page cache holds all files.
Computed rows are not kept from one round to the next. The peak of memory above the imports is
measured in a separate process. Loops are compiled if numba is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr
from measure import alternate, back_memory, cache, machine, resident, save, table

from trajstore import RunWriter, open_run
from trajstore.codec.computed_rows import cache as computed
from trajstore.store.reading.run_info import information
from trajstore.values.native_types import NATIVE_TYPES, narrow

# A script in this folder has the name of the package `analysis`, and must not be imported first.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent]

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
ENCODINGS = ("delta", "compact")
MEMORY = 1 << 30  # of a scan, with all copies

Ask = Callable[[Any], Any]
Contender = Callable[[], tuple[float, dict[str, Any]]]

READERS: dict[str, Callable[[Path], xr.Dataset]] = {
    "open_run": open_run,
    "open_run, chunks=None": partial(open_run, chunks=None),
    "xr.open_zarr": xr.open_zarr,
}


def widened(values: Any) -> Any:
    """Convert bfloat16 bits to float32; leave other values."""
    bits = values.dtype == np.uint16
    return (values.astype(np.uint32) << 16).view(np.float32) if bits else values


def questions(shape: tuple[int, ...]) -> dict[str, tuple[int, Ask, Ask | None]]:
    """Return the number of answers of each question, and functions for a dataset and for HDF5."""
    rows = range(shape[0])
    tokens = [shape[1] * part // 100 for part in (1, 23, 51, 79, 99)]
    steps = [shape[0] * part // 100 for part in (3, 17, 38, 49, 60, 79, 94)]

    def scan(name: str) -> tuple[int, Ask, Ask]:
        return (
            1,
            lambda ds: ds[name].max().compute(),
            lambda file: max(widened(file[name][row]).max() for row in rows),
        )

    return {
        "all of W": scan("W"),
        "all of grad": scan("grad"),
        "one token, all steps": (
            len(tokens),
            lambda ds: [ds.W[:, token].values for token in tokens],
            lambda file: [widened(file["W"][:, token]) for token in tokens],
        ),
        "one step": (
            len(steps),
            lambda ds: [ds.W[step].values for step in steps],
            lambda file: [widened(file["W"][step]) for step in steps],
        ),
        "norms of gradients": (1, lambda ds: ds.traj.grad_norms().compute(), None),
    }


def native_rows(run: str, most: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows of a run in their native types, as a recorder passes them; and its facts."""
    ds = open_run(run, chunks=None)
    names = [str(name) for name in ds.data_vars if "example" not in ds[name].dims]
    natives = {name: ds[name].attrs["native_dtype"] for name in names}
    rows: list[dict[str, Any]] = []
    for first in range(0, min(most, ds.sizes["step"]), 16):
        part = ds.isel(step=slice(first, min(first + 16, most))).load()
        rows += [{"step": int(step)} for step in part.step]
        for name in names:
            values, native = part[name].values, NATIVE_TYPES[natives[name]]
            for at, row in enumerate(narrow(values, native) if native.itemsize == 2 else values):
                rows[first + at][name] = row
    facts = {
        "token": ds.token.values,
        "is_dead": ds.is_dead.values,
        "hidden": ds.sizes["hidden"],
        "variables": natives,
        "attributes": {"optimizer": ds.attrs["optimizer"]},
    }
    return rows, facts


def write_run(path: Path, rows: Any, facts: dict[str, Any], encoding: str) -> tuple[float, Any]:
    """Write rows as a run; return the bytes in native types."""
    with RunWriter.create(path, encoding=encoding, overwrite=True, fsync=False, **facts) as run:
        for row in rows:
            run.append(**row)
        return float(run.bytes_recorded), {}


def write_hdf5(path: Path, rows: Any) -> tuple[float, Any]:
    """Write the matrices; return their bytes."""
    path.unlink(missing_ok=True)
    with h5py.File(path, "w") as file:
        for name in MATRICES:
            one = rows[0][name]
            file.create_dataset(name, (len(rows), *one.shape), one.dtype, chunks=(1, *one.shape))
        for at, row in enumerate(rows):
            for name in MATRICES:
                file[name][at] = row[name]
    return float(sum(row[name].nbytes for row in rows for name in MATRICES)), {}


def print_peak(run: str, *what: str) -> None:
    """Print the bytes that writing, or a question, takes above the imports and the rows."""
    from trajstore import analysis  # noqa: F401

    if what[0] == "write":
        rows, facts = native_rows(run, int(what[2]))
        Path("/proc/self/clear_refs").write_text("5")  # the peak of reading the rows does not count
        before = resident("VmRSS")
        write_run(Path(run).with_name("peak.zarr"), rows, facts, what[1])
    else:
        before = resident("VmRSS")
        ds = READERS[what[1]](Path(run))
        questions(ds.W.shape)[what[0]][1](ds)
    print(json.dumps(resident("VmHWM") - before))


def peak(run: Path | str, *what: str) -> str:
    """Return the same in MB, from a separate process."""
    command = [sys.executable, __file__, str(run), "--peak", *what]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return f"{int(json.loads(done.stdout)) / 1e6:,.0f}"


def ingest(folder: Path, run: str, rows: Any, facts: dict[str, Any], rounds: int) -> Any:
    """Return lines of a table, and the seconds of each contender."""
    paths = {each: folder / f"{each}.zarr" for each in ENCODINGS}
    writers: dict[str, Contender] = {
        each: partial(write_run, path, rows, facts, each) for each, path in paths.items()
    }
    base = "h5py, uncompressed"
    writers[base] = partial(write_hdf5, folder / "run.h5", rows)
    for _ in range(3):  # compiles loops, of small runs after the first two
        writers["compact"]()
    found = alternate(writers, rounds, memory=MEMORY)
    lines = []
    for name, each in found.items():
        taken = peak(run, "write", name, str(len(rows))) if name in ENCODINGS else ""
        ratio = each.rate / found[base].rate
        lines.append(["write", name, f"{each.rate / 1e6:,.0f} MB/s", f"{ratio:.2f}", taken])
    return lines, {name: each.seconds for name, each in found.items()}


def reading(folder: Path, shape: tuple[int, ...], rounds: int) -> Any:
    """Return lines of a table, and the seconds of each question and contender."""
    file = h5py.File(folder / "run.h5")
    opened = {
        f"{each}, {name}": (read(folder / f"{each}.zarr"), each, name)
        for each in ENCODINGS
        for name, read in READERS.items()
    }

    def answer(ask: Ask, given: Any) -> tuple[float, dict[str, Any]]:
        ask(given)
        return 1.0, {}

    lines, seconds = [], {}
    for question, (count, ask, of_file) in questions(shape).items():
        lazy = question not in ("one token, all steps", "one step")
        asked = {
            key: partial(answer, ask, ds)
            for key, (ds, _, name) in opened.items()
            if not (lazy and "None" in name)
        }
        base = next(iter(asked))
        if of_file is not None:
            base = "h5py"
            asked[base] = partial(answer, of_file, file)
        for each in asked.values():  # compiles loops
            each()
        computed.clear()
        found = alternate(
            asked, rounds, memory=MEMORY if lazy else 0, after=lambda _: computed.clear()
        )
        seconds[question] = {key: each.seconds for key, each in found.items()}
        for key, each in found.items():
            _, encoding, reader = opened.get(key, (None, "", ""))
            path = folder / f"{encoding}.zarr"
            taken = peak(path, question, reader) if encoding == "compact" else ""
            ratio = each.rate / found[base].rate
            time = f"{1e3 / each.rate / count:,.1f} ms"
            lines.append([question, key, time, f"{ratio:.2f}", taken])
    return lines, seconds


def main() -> None:
    """Print a table of sizes, and one of times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--peak", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print_peak(given.run, *given.peak)
        return
    facts_of_machine = machine()
    rows, facts = native_rows(given.run, given.rows)
    folder = cache() / "scratch-encodings"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    back_memory(MEMORY)
    try:
        lines, written = ingest(folder, given.run, rows, facts, given.rounds)
        sizes = {each: information(folder / f"{each}.zarr")["arrays"] for each in ENCODINGS}
        more, read = reading(folder, (len(rows), *rows[0]["W"].shape), given.rounds)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(Path(given.run).with_name("peak.zarr"), ignore_errors=True)
    native = sum(sizes["delta"][name]["bytes_native"] for name in MATRICES)
    totals = [sum(sizes[each][name]["bytes_on_disk"] for name in MATRICES) for each in ENCODINGS]
    ratios = [
        [name, *(f"{sizes[each][name]['ratio']:.2f}" for each in ENCODINGS)] for name in MATRICES
    ]
    ratios.append(["all", *(f"{native / total:.2f}" for total in totals)])
    text = table("Times smaller than native", ["array", *ENCODINGS], ratios)
    columns = ["", "", "time", "× h5py's speed", "peak, MB"]
    text += "\n" + table(f"{len(rows)} rows", columns, lines + more)
    results = {"machine": facts_of_machine, "sizes": sizes, "written": written, "read": read}
    save(f"encodings-{Path(given.run).stem}", text, results)


if __name__ == "__main__":
    main()
