"""Time and memory of a run with keyframes that is opened with developed=True.

python benchmarks/developed.py [--steps N] [--every K]

Trains Lil Gatsby twice with the same seed, with the tiers `keyframes` and `everything`. Then it
reads the first run with an empty cache, and compares all values with those of the second.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import shutil
import time
from typing import Any

import numpy as np
from measure import cache, machine, save, table

from trajstore import open_run
from trajstore.trainers import preset, record

LAYER = "transformer.h.0.attn.c_attn.weight"


def main() -> None:
    """Print the seconds of each read, and the peak memory of this process and its children."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    folder = cache() / f"keyframes-{options.steps}-bfloat16"
    runs = {tier: folder / f"{tier}.zarr" for tier in ("keyframes", "everything")}
    changes = [f"training.steps={options.steps}", f"recording.keyframe_every={options.every}"]
    for tier, path in runs.items():
        if not path.exists():
            config = preset("gatsby").with_values([*changes, f"recording.variables={tier}"])
            record(config, path)
    shutil.rmtree(folder / "keyframes.developed", ignore_errors=True)
    step = options.steps * 2 // 5 + 34
    rows: list[list[str]] = []

    def read(what: str, of: Any) -> None:
        """Read from both runs, and compare the bits."""
        cells, bits = [what], set()
        for path, developed in ((runs["keyframes"], True), (runs["everything"], False)):
            began = time.perf_counter()
            values = of(open_run(path, developed=developed)).values
            cells.append(f"{time.perf_counter() - began:.2f} s")
            bits.add(hashlib.sha256(values.tobytes()).digest())
        assert len(bits) == 1, what
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            cells.append(f"{resource.getrusage(who).ru_maxrss / 1e3:,.0f} MB")
        rows.append(cells)
        print(*cells, flush=True)

    read(f"all parameters of step {step}", lambda ds: ds.params.sel(step=step))
    read(f"those of step {step + 1}", lambda ds: ds.params.sel(step=step + 1))
    for what in ("norm of one layer at all steps", "the same again"):
        read(what, lambda ds: np.square(ds.traj.parameter(LAYER).W).sum(["row", "column"]))
    for name in open_run(runs["everything"]).data_vars:
        read(f"all of {name}", lambda ds, name=name: ds[name])
    titles = ["read", "developed", "`everything`", "peak, this process", "peak, a training"]
    size = sum(file.stat().st_size for file in (folder / "keyframes.developed").rglob("*"))
    text = table("Developed steps", titles, rows)
    save("developed", text, {"machine": machine(), "rows": rows, "cache": size})


if __name__ == "__main__":
    main()
