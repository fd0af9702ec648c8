"""A real history of Wordybird's shape, recorded once and stored as plain arrays in the cache."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
from measure import cache

from trajstore import RunWriter

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")


def wordybird(steps: int = 200) -> dict[str, npt.NDArray[np.uint16]]:
    """Return the bits of a Wordybird run, memory-mapped: each (step, token, hidden), uint16.

    The first call trains, which takes about 2 s per step on two cores.
    """
    folder = cache() / f"wordybird-{steps}"
    if not (folder / "done").exists():
        _record(folder, steps)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in MATRICES}


def record(path: str | Path, rows: Mapping[str, Any], **options: Any) -> None:
    """Record rows, each matrix (step, token, hidden), as fast as the writer takes them."""
    count, tokens, hidden = rows["W"].shape
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=hidden,
        variables=dict.fromkeys(rows, "bfloat16"),
        **options,
    ) as run:
        for step in range(count):
            run.append(step=step, **{name: rows[name][step] for name in rows})


def _record(folder: Path, steps: int) -> None:
    from trajstore import trainers

    run = folder / "run.zarr"
    if not run.exists():
        config = trainers.preset("wordybird-1b").with_values([f"training.steps={steps}"])
        trainers.record(config, run)
    ds = xr.open_zarr(run)
    rows = ds.attrs["block_rows"]
    for name in MATRICES:
        out = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", "u2", ds[name].shape)
        for start in range(0, ds.sizes["step"], rows):
            values = ds[name][start : start + rows].values
            out[start : start + rows] = values.view("u4") >> 16
        out.flush()
    (folder / "done").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    print({name: array.shape for name, array in wordybird(parser.parse_args().steps).items()})
