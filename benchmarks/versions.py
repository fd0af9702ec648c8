"""Times of two checkouts, in turns: one step, cold and warm, beside h5py; token, scans, files.

    python benchmarks/versions.py BEFORE AFTER [--rounds 5] [--folder RUN.zarr] [--rows 32]

Every measurement is a process of its own, with one of the checkouts in PYTHONPATH. Each round has
one of each. Other programs disturb wall times more than processor times, so the table has both:
medians, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = (262, 1_234, 11_111, 27_001, 50_256)
QUESTIONS = (
    "cold step, xr.open_zarr",
    "cold step, open_run",
    "cold step, open_run, chunks=None",
    "cold step, h5py",
    "step, xr.open_zarr",
    "step, open_run",
    "step, open_run, chunks=None",
    "step, h5py",
    "token, xr.open_zarr",
    "token, open_run, chunks=None",
    "scan, xr.open_zarr",
    "scan, open_run",
    "verify",
    "export",
    "import",
    "ingest",
)
OPENERS: dict[str, Callable[[Any, Path], Any]] = {
    "xr.open_zarr": lambda _, path: __import__("xarray").open_zarr(path),
    "open_run": lambda trajstore, path: trajstore.open_run(path),
    "open_run, chunks=None": lambda trajstore, path: trajstore.open_run(path, chunks=None),
}


def make(folder: Path, rows: int) -> None:
    """Write a run of Wordybird's size, and W in HDF5."""
    import h5py
    from exchange import record

    record(folder / "run.zarr", rows, 50_257)
    write_hdf5(folder, h5py)


def write_hdf5(folder: Path, h5py: Any) -> None:
    from trajstore import open_run

    W = open_run(folder / "run.zarr").W
    with h5py.File(folder / "W.h5", "w") as file:
        data = file.create_dataset("W", W.shape, "u2", chunks=(1, *W.shape[1:]))
        for step in range(len(W)):
            data[step] = W[step].values.view("u4") >> 16


def work_of(question: str, folder: Path) -> tuple[Callable[[], Any], int, int]:
    """Return a function that answers, its number of answers, and how often it is called before."""
    import trajstore

    run, scratch = folder / "run.zarr", folder / "scratch"
    kind, _, reader = question.partition(", ")
    steps = [1, 8, 14, 19, 24, 29, 30]
    if reader == "h5py":
        import h5py

        W = h5py.File(folder / "W.h5")["W"]
        read = lambda step: (W[step].astype(np.uint32) << 16).view(np.float32)  # noqa: E731
        if kind == "cold step":
            return lambda: read(9), 1, 0
        return lambda: [read(step) for step in steps], len(steps), 2
    if reader:
        ds = OPENERS[reader](trajstore, run)
        if kind == "cold step":
            return lambda: ds.W[9].values, 1, 0
        if kind == "step":
            ds.W.max().compute()  # loads numba
            return lambda: [ds.W[step].values for step in steps], len(steps), 2
        if kind == "token":
            return lambda: [ds.W[:, token].values for token in TOKENS], len(TOKENS), 2
        return lambda: ds.W.max().compute(), 1, 2
    if kind == "verify":
        return lambda: trajstore.verify(run), 1, 0
    if kind == "export":
        return lambda: trajstore.export(run, scratch / "W.safetensors"), 1, 0
    if kind == "import":
        trajstore.export(run, scratch / "W.safetensors")
        return lambda: trajstore.import_file(scratch / "W.safetensors", scratch / "back"), 1, 0
    rows = trajstore.open_run(run).W[:16].values

    def ingest() -> None:
        types = {"W": "bfloat16"}
        with trajstore.RunWriter.create(
            scratch / "new.zarr", token=range(rows.shape[1]), hidden=rows.shape[2], variables=types
        ) as writer:
            for step, row in enumerate(rows):
                writer.append(step=step, W=row)

    return ingest, 1, 0


def print_times(question: str, folder: Path) -> None:
    (folder / "scratch").mkdir()
    work, answers, before = work_of(question, folder)
    for _ in range(before):
        work()
    times = []
    for _ in range(5 if before else 1):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        times.append([(time.perf_counter() - wall) / answers,
                      (time.process_time() - processor) / answers])  # fmt: skip
    print(json.dumps([statistics.median(each) for each in zip(*times, strict=True)]))


def measured(checkout: str, question: str, folder: Path, numba: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, __file__, "--ask", question, "--folder", folder],
        env=os.environ
        | {
            "PYTHONPATH": f"{checkout}/src",
            "NUMBA_DISABLE_JIT": numba,
            "PYTHONDONTWRITEBYTECODE": "",
        },
        stdout=subprocess.PIPE,
        check=True,
    )
    shutil.rmtree(folder / "scratch")
    found: list[float] = json.loads(done.stdout)
    return found


def compare(checkouts: list[str], folder: Path, rounds: int, asked: list[str]) -> None:
    from measure import machine, save, table

    lines, results = [], {}
    for question in asked:
        fast = question.startswith(("step", "cold step", "scan")) and "h5py" not in question
        for numba in ("1", "0") if fast else ("0",):
            found = [[measured(c, question, folder, numba) for c in checkouts]
                     for _ in range(rounds)]  # fmt: skip
            values = np.array(found) * 1e3
            ratios = np.median(values[:, 1] / values[:, 0], axis=0)
            before, after = np.median(values, axis=0)
            name = question + (", numba" if fast and numba == "0" else "")
            results[name] = values.tolist()
            lines.append([name, *(f"{a:,.1f}, {b:,.1f}" for a, b in (before, after)),
                          f"{ratios[0]:.2f}", f"{ratios[1]:.2f}"])  # fmt: skip
            print(*lines[-1], sep=" | ", flush=True)
    columns = ["question", "before: wall, processor ms", "after", "wall ratio", "processor ratio"]
    facts = machine()
    save("versions", table("Two checkouts", columns, lines), {"machine": facts, **results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="of run.zarr and W.h5; made if it is missing")
    parser.add_argument("--only", nargs="*", default=QUESTIONS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from measure import cache

    folder = options.folder or cache() / "versions"
    if options.ask:
        print_times(options.ask, folder)
        return
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    if not (folder / "W.h5").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, options.rows)
    compare(options.checkouts, folder, options.rounds, list(options.only))


if __name__ == "__main__":
    main()
