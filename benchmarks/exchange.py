"""Export compared with decoding, and import compared with recording, at Wordybird's size.

    python benchmarks/exchange.py [--store RUN.zarr] [--rounds 3] [--rows 201] [--folder DIR]

Uses a recorded run, or generates one of that size (5 GB of values for 201 rows, about 12 GB of disk
in all) whose values imitate a training: weights that move less and less, gradients of which half
are tiny, moments that follow from them. For each operation it prints the ratio of speeds and the
peak memory of its process. Every measurement is a separate process; each round has one of each.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import back_memory, machine, resident, save, table

VARIABLES = {
    "W": "bfloat16",
    "grad": "bfloat16",
    "exp_avg": "bfloat16",
    "exp_avg_sq": "bfloat16",
    "logits": "bfloat16",
    "loss": "float32",
}
HIDDEN = 64
EXPORTS: dict[str, dict[str, Any]] = {
    "native": {},
    "15.1a": {"layout": "15.1a"},
    "hdf5": {"format": "hdf5"},
    "zarr": {"format": "zarr"},
}


def rows_of_training(rows: int, tokens: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the bits of one row after another."""
    rng = np.random.default_rng(0)

    def bits(values: np.ndarray) -> np.ndarray:
        return (values.astype("f4", copy=False).view("u4") >> 16).astype("u2")

    shape = (tokens, HIDDEN)
    W = rng.normal(0, 0.02, shape).astype("f4")
    m, v = np.zeros(shape, "f4"), np.zeros(shape, "f4")
    for row in range(rows):
        grad = rng.standard_normal(shape, "f4") * np.float32(1e-3)
        grad[rng.integers(0, tokens, tokens // 2)] *= np.float32(1e-3)
        if row:
            m = np.float32(0.9) * m + np.float32(0.1) * grad
            v = np.float32(0.999) * v + np.float32(0.001) * grad * grad
            W = W - np.float32(1e-3 * np.exp(-row / 40)) * m / (np.sqrt(v) + np.float32(1e-8))
        nan = np.uint16(0x7FC0)
        yield {
            "W": bits(W),
            "grad": bits(grad) if row else np.full(shape, nan),
            "exp_avg": bits(m),
            "exp_avg_sq": bits(v),
            "logits": bits(rng.standard_normal(tokens, "f4")) if row else np.full(tokens, nan),
            "loss": np.float32(10 - row / 100 if row else np.nan),
        }


def ingest(run: Path, rows: int, tokens: int) -> float:
    """Return the seconds that the writer takes for the rows, without generating them."""
    from trajstore import RunWriter

    spent = 0.0
    begun = time.perf_counter()
    with RunWriter.create(
        run,
        token=np.arange(tokens),
        hidden=HIDDEN,
        variables=VARIABLES,
        is_dead=np.arange(tokens) % 3 == 0,
        memory="448MiB",
    ) as writer:
        spent += time.perf_counter() - begun
        made = list(rows_of_training(min(rows, 32), tokens))
        for row in range(rows):
            # A few rows repeatedly: their generation must not be timed, nor run in parallel.
            begun = time.perf_counter()
            writer.append(row, **made[row % len(made)])
            spent += time.perf_counter() - begun
        begun = time.perf_counter()
    return spent + time.perf_counter() - begun


def record(run: Path, rows: int, tokens: int) -> float:
    """Write the run to export."""
    from trajstore import RunWriter

    begun = time.perf_counter()
    with RunWriter.create(
        run,
        token=np.arange(tokens),
        hidden=HIDDEN,
        variables=VARIABLES,
        is_dead=np.arange(tokens) % 3 == 0,
    ) as writer:
        for row, values in enumerate(rows_of_training(rows, tokens)):
            writer.append(row, **values)
    return time.perf_counter() - begun


def decode(run: Path) -> float:
    """Return the seconds to decode every array through `open_run`, keeping nothing."""
    from trajstore import open_run

    begun = time.perf_counter()
    ds = open_run(run)
    for name in VARIABLES:
        data = ds[name].data
        data.map_blocks(
            lambda block: np.empty((1,) * block.ndim, "u1"),
            chunks=tuple((1,) * len(lengths) for lengths in data.chunks),
            dtype="u1",
            meta=np.empty((0,) * data.ndim, "u1"),
        ).compute()
    return time.perf_counter() - begun


def export_run(run: Path, file: Path, options: dict[str, Any]) -> float:
    """Return the seconds of an export."""
    from trajstore import export

    begun = time.perf_counter()
    export(run, file, **options)
    return time.perf_counter() - begun


def import_run(file: Path, run: Path) -> float:
    """Return the seconds of an import."""
    from trajstore import import_file

    begun = time.perf_counter()
    import_file(file, run)
    return time.perf_counter() - begun


def measured(call: str) -> dict[str, float]:
    """Run one of the functions above in a process; return its seconds and peak memory in MB."""
    code = f"import exchange; exchange.report({call!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    if done.returncode:
        sys.exit(f"{call}\n{done.stderr}")
    facts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return facts


def report(call: str) -> None:
    """Evaluate a call and print its cost."""
    seconds = eval(call)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": resident("VmHWM") / 1e6}))


def main() -> None:
    """Measure all operations, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=201)
    parser.add_argument("--tokens", type=int, default=50_257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--store", type=Path, help="recorded run in place of an imitation")
    arguments = parser.parse_args()
    rows, tokens = arguments.rows, arguments.tokens
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        run, other = arguments.store or folder / "run.zarr", folder / "other.zarr"

        def path(name: Path) -> str:
            return f"Path({str(name.absolute())!r})"

        if not arguments.store:
            measured(f"record({path(run)}, {rows}, {tokens})")
        file, back = folder / "file", folder / "back.zarr"
        several: dict[str, list[dict[str, float]]] = {}

        def measure(name: str, call: str, *made: Path) -> None:
            subprocess.run(["rm", "-rf", *made], check=True)
            # For a result in the page cache, and for the process that writes it.
            back_memory(rows * tokens * HIDDEN * 4 * 2 + (1 << 30))
            several.setdefault(name, []).append(measured(call))

        for _ in range(arguments.rounds):
            measure("decode", f"decode({path(run)})")
            for name, options in EXPORTS.items():
                export = f"export_run({path(run)}, {path(file)}, {options!r})"
                measure(f"export {name}", export, file)
                if name != "zarr":
                    measure(f"import {name}", f"import_run({path(file)}, {path(back)})", back)
                subprocess.run(["rm", "-rf", file, back], check=True)
            measure("ingest", f"ingest({path(other)}, {rows}, {tokens})", other)
    results = {
        name: {
            "seconds": statistics.median(facts["seconds"] for facts in rounds),
            "cpu": statistics.median(facts["cpu"] for facts in rounds),
            "peak": max(facts["peak"] for facts in rounds),
        }
        for name, rounds in several.items()
    }
    native = rows * tokens * (4 * HIDDEN + 1) * 2 / 1e6
    lines = []
    for name, facts in results.items():
        base = "decode" if name.startswith(("decode", "export")) else "ingest"
        facts["MB/s"] = native / facts["seconds"]
        facts["ratio"] = statistics.median(
            reference["seconds"] / one["seconds"]
            for reference, one in zip(several[base], several[name], strict=True)
        )
        lines.append(
            [
                name,
                f"{facts['seconds']:.1f}",
                f"{facts['MB/s']:.0f}",
                f"{facts['ratio']:.2f} × {base}",
                f"{facts['peak']:.0f}",
            ]
        )
    text = table("Export and import", ["operation", "s", "MB/s", "speed", "peak MB"], lines)
    save("exchange", text, {"machine": machine(), "store": str(arguments.store), **results})


if __name__ == "__main__":
    main()
