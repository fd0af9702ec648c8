"""Space of a run with keyframes, and the time to develop its steps.

python benchmarks/keyframes.py [--steps N] [--every K] [--developed N] [--dtype TYPE]

Trains Lil Gatsby twice with the same seed, with the tiers `keyframes` and `everything`. Then it
develops random steps of the first run, and compares all their values with those of the second.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
import xarray as xr
from measure import cache, machine, save, table

from trajstore.store.reading.run_info import information
from trajstore.trainers import develop_run, preset, record


def main() -> None:
    """Print the bytes of both runs, and the seconds of each developed step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--developed", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    folder = cache() / f"keyframes-{options.steps}-{options.dtype}"
    runs = {tier: folder / f"{tier}.zarr" for tier in ("keyframes", "everything")}
    changes = [f"training.steps={options.steps}", f"recording.keyframe_every={options.every}",
               f"model.dtype={options.dtype}"]  # fmt: skip
    for tier, path in runs.items():
        config = preset("gatsby").with_values([*changes, f"recording.variables={tier}"])
        record(config, path, resume=True)
    facts = {tier: information(path) for tier, path in runs.items()}
    group = information(runs["keyframes"] / "keyframes")
    native = facts["everything"]["bytes_native"]
    sizes = {tier: each["bytes_on_disk"] for tier, each in facts.items()}
    sizes |= {"of which keyframes": group["bytes_on_disk"]}
    rows = [[name, f"{size / 1e6:,.1f}", f"{size / native:.2%}"] for name, size in sizes.items()]
    whole = xr.open_zarr(runs["everything"])
    seconds = {}
    for step in sorted(random.Random(1).sample(range(1, options.steps + 1), options.developed)):
        began = time.perf_counter()
        develop_run(runs["keyframes"], folder / "part.zarr", steps=step, overwrite=True)
        seconds[step] = time.perf_counter() - began
        part, recorded = xr.open_zarr(folder / "part.zarr"), whole.sel(step=[step])
        for name in recorded:
            assert np.array_equal(part[name].values, recorded[name].values, equal_nan=True), name
        rows.append([f"step {step}", f"{seconds[step]:.1f} s", ""])
    text = table("Keyframes", ["", "MB on disk, or time", "of native bytes"], rows)
    save("keyframes", text, {"machine": machine(), "bytes": sizes, "seconds": seconds})


if __name__ == "__main__":
    main()
