"""Speed of `verify`, as a ratio to reading the same arrays, and its peak memory.

python benchmarks/verify.py [--run RUN] [--shape Gatsby|Wordybird] [--steps N] [--rounds N]

Without --run, a run of random walks is generated, with a few spacings per step as in training. All
readers read from the page cache, so the comparison is of decoding, not of the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from measure import alternate, cache, machine, resident, save, table
from memory import SHAPES

from trajstore import RunWriter, open_run, verify
from trajstore.schema import VARIABLES

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")


def write(path: Path, shape: str, steps: int) -> None:
    """Write a run in which half of the values do not change from one step to the next."""
    tokens, hidden = SHAPES[shape]
    rng = np.random.default_rng(0)
    row = rng.normal(scale=0.02, size=(tokens, hidden)).astype(np.float32).view(np.uint32) >> 16
    bits = row.astype(np.uint16)
    moves = [rng.choice(np.array([0, 0, 1, 0xFFFF], np.uint16), size=bits.shape) for _ in range(16)]
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=hidden,
        variables=dict.fromkeys(MATRICES, "bfloat16"),
    ) as run:
        for step in range(steps):
            run.append(step=step, **dict.fromkeys(MATRICES, bits))
            bits = bits + moves[step % len(moves)]


def read_with_zarr(path: Path) -> None:
    """Read every variable, block by block, through zarr's own pipeline."""
    for name, array in zarr.open_group(path, mode="r").arrays():
        if name in VARIABLES:
            rows = (array.shards or array.chunks)[0]
            for start in range(0, array.shape[0], rows):
                array[start : start + rows]


def read_with_open_run(path: Path) -> None:
    """Read every variable, all chunks in parallel; each is discarded after reading."""
    ds = open_run(path)
    done = [
        ds[name].data.map_blocks(lambda block: np.zeros((1,) * block.ndim), dtype=float)
        for name in VARIABLES
        if name in ds
    ]
    dask.compute(*done)


def check(path: Path) -> None:
    """Verify a run, which has to be clean."""
    assert verify(path).clean


READERS: dict[str, Callable[[Path], None]] = {
    "trajstore.verify": check,
    "trajstore.open_run": read_with_open_run,
    "zarr": read_with_zarr,
}


def peak(reader: str, path: Path) -> int:
    """Return the maximum memory that a new process adds, in bytes."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", reader, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="Wordybird")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        reader, path = options.child
        before = resident("VmRSS")
        READERS[reader](Path(path))
        print(resident("VmHWM") - before)
        return
    folder = cache() / "scratch-verify"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = machine()
    if options.run:
        runs = {str(options.run): options.run}
    else:
        runs = {"random walks": folder / "run.zarr"}
        write(runs["random walks"], options.shape, options.steps)
    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    for title, path in runs.items():
        found = verify(path)
        stored = sum(zarr.open_group(path, mode="r")[name].nbytes for name in VARIABLES
                     if (path / name).exists())  # fmt: skip

        def contender(read: Callable[[Path], None], path: Path = path) -> Callable[[], Any]:
            return lambda: (read(path), (1.0, {}))[1]

        measured = alternate({n: contender(read) for n, read in READERS.items()}, options.rounds)
        seconds = {name: 1 / item.rate for name, item in measured.items()}
        peaks = {name: peak(name, path) for name in READERS}
        results[title] = {"seconds": seconds, "peak": peaks, "bytes": found.bytes}
        for name, second in seconds.items():
            rows.append(
                [title, name, f"{second:.2f}", f"{stored / second / 1e6:,.0f}",
                 f"{second / seconds['trajstore.verify']:.2f}", f"{peaks[name] / 2**20:,.0f}"]
            )  # fmt: skip
    columns = ["run", "reader", "s", "MB/s of float32", "× verify's time", "peak MiB"]
    text = table("Verifying compared with reading", columns, rows)
    save("verify", text, {"machine": facts, "runs": results})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
