"""Costs that grow with the number of rows: commit, opening, resuming, scan, the root.

    python benchmarks/rows.py [--rows 1000 10000 100000]

A tiny run (4 tokens × 2) of each number of rows, and the metadata of a run of Wordybird's shape
with 10,000 steps: the time to open it, and the graph of a scan.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from measure import cache, machine, save, table

from trajstore import RunWriter, open_run


def milliseconds(work: Callable[[], Any], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * sorted(taken)[times // 2]


def tiny(path: Path, rows: int) -> list[str]:
    """Record rows; return the times of the last commits and of reading."""
    values = np.zeros((4, 2), "float32")
    with RunWriter.create(
        path, token=np.arange(4), hidden=2, variables={"W": "float32"}, commit_every=None
    ) as run:
        begun = time.perf_counter()
        for step in range(rows):
            values += 1
            run.append(step=step, W=values)
    seconds = time.perf_counter() - begun
    commits = []
    with RunWriter.resume(path, commit_every=None) as run:
        for extra in range(16 * run.layout.block_rows):
            run.append(step=rows + extra, W=values)
            if run.rows % run.layout.block_rows == 0:
                start = time.perf_counter()
                run._blocks.finish("recording")
                commits.append(time.perf_counter() - start)
    size = (path / "zarr.json").stat().st_size
    return [
        f"tiny, {rows:,} rows",
        f"{1e6 * seconds / rows:.1f}",
        f"{1e3 * sorted(commits)[len(commits) // 2]:.1f}",
        f"{milliseconds(lambda: xr.open_zarr(path)):.1f}",
        f"{milliseconds(lambda: open_run(path)):.1f}",
        f"{milliseconds(lambda: RunWriter.resume(path, rows=rows).close(), 1):.0f}",
        f"{milliseconds(lambda: open_run(path).W.max().compute(), 3):.0f}",
        f"{size:,}",
    ]


def large(path: Path, rows: int) -> list[str]:
    """Write only the metadata of a run of Wordybird's shape."""
    RunWriter.create(
        path,
        token=np.arange(50_257),
        hidden=64,
        variables={"W": "bfloat16", "grad": "bfloat16"},
    ).close()
    metadata = json.loads((path / "zarr.json").read_bytes())
    metadata["attributes"]["committed_rows"] = rows
    for name in ("W", "grad"):
        metadata["consolidated_metadata"]["metadata"][name]["shape"][0] = rows
    (path / "zarr.json").write_text(json.dumps(metadata))
    opened = {}

    def graph() -> None:
        opened["tasks"] = len(dict(xr.open_zarr(path).W.max().__dask_graph__()))

    return [
        f"Wordybird, {rows:,} rows, metadata only",
        "",
        "",
        f"{milliseconds(lambda: xr.open_zarr(path)):.1f}",
        f"{milliseconds(lambda: open_run(path)):.1f}",
        "",
        f"{milliseconds(graph, 3):.0f} (graph of {opened.get('tasks', 0):,} tasks)",
        f"{(path / 'zarr.json').stat().st_size:,}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    options = parser.parse_args()
    folder = cache() / "scratch-rows"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = machine()
    lines = [tiny(folder / f"{rows}.zarr", rows) for rows in options.rows]
    lines.append(large(folder / "large.zarr", 10_000))
    columns = [
        "run", "µs per row", "last block and commit, ms", "xr.open_zarr, ms", "open_run, ms",
        "resume, ms", "scan, ms", "root, bytes",
    ]  # fmt: skip
    text = table("Costs that grow with the rows", columns, lines)
    save("rows", text, {"machine": facts, "lines": lines})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
