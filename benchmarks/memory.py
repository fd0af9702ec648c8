"""Peak memory of a writer by number of steps; it must not grow."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
from measure import cache, machine, resident, save, table

SHAPES = {"Gatsby": (128, 64), "Wordybird": (50_257, 64)}
MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")


def child(shape: str, steps: int, memory: str) -> None:
    """Append random rows, and print the memory that the writer added."""
    from trajstore import RunWriter

    tokens, hidden = SHAPES[shape]
    path = cache() / "scratch-memory.zarr"
    shutil.rmtree(path, ignore_errors=True)
    row = np.random.default_rng(0).integers(0, 1 << 16, (tokens, hidden), dtype=np.uint16)
    with RunWriter.create(  # loads what every writer needs once
        path, token=[0], hidden=1, variables={"W": "bfloat16"}
    ) as run:
        run.append(step=0, W=np.zeros((1, 1), np.float32))
    before = resident("VmRSS")
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=hidden,
        variables=dict.fromkeys(MATRICES, "bfloat16"),
        memory=memory,
        overwrite=True,
    ) as run:
        for step in range(steps):
            row += 1
            run.append(step=step, **dict.fromkeys(MATRICES, row))
        planned = run.layout.memory
    print(json.dumps({"added": resident("VmHWM") - before, "planned": planned}))
    shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, metavar=("SHAPE", "STEPS", "MEMORY"))
    options = parser.parse_args()
    if options.child:
        shape, steps, memory = options.child
        child(shape, int(steps), memory)
        return
    cases = [("Gatsby", steps, "1GiB") for steps in (500, 1000, 4000)]
    cases += [("Wordybird", steps, "1GiB") for steps in (20, 40, 80, 160)]
    cases += [("Wordybird", 80, "512MiB"), ("Gatsby", 4000, "8MiB")]
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for shape, steps, memory in cases:
        done = subprocess.run(
            [sys.executable, __file__, "--child", shape, str(steps), memory],
            capture_output=True,
            text=True,
            check=True,
        )
        facts = json.loads(done.stdout)
        results.append({"shape": shape, "steps": steps, "memory": memory, **facts})
        rows.append(
            [shape, f"{steps:,}", memory, f"{facts['planned'] / 2**20:,.0f}",
             f"{facts['added'] / 2**20:,.0f}"]
        )  # fmt: skip
    text = table(
        "Memory of the writer", ["rows of", "steps", "budget", "planned MiB", "peak MiB"], rows
    )
    save("memory", text, {"machine": machine(), "cases": results})


if __name__ == "__main__":
    main()
