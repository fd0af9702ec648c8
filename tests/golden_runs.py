"""Small runs of each version, which every later version reads: tests/data/runs-VERSION.zip.

tools/write_golden_runs.py writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

DATA = Path(__file__).parent / "data"
LOOPS = {"sharded": "float32", "killed": "float16"}
"""Type of the weights, by the name of the run."""


def train(path: Path, dtype: str, steps: range, *, resume: bool = False) -> None:
    """Record a loop, in one process or, with ``RANK`` set, as one of several processes."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from trajstore import open_run
    from trajstore.trainers import capture

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(11, 4)
    head = torch.nn.Linear(4, 11, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(4, 4), head)
    model.to(getattr(torch, dtype))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    if resume:
        last = open_run(path).W.values[-1]
        embedding.weight.data.copy_(torch.from_numpy(last))
    options = {"parameter": "0.weight", "block_rows": 3, "resume": resume}
    with capture(model, optimizer, path, first_step=steps.start - 1, **options):
        for step in steps:
            ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        if path.name == "killed.zarr" and not resume:
            time.sleep(600)  # until the tool kills the process
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


def golden_metadata(run: str = "delta.zarr", version: str = "0.3.0") -> Any:
    """The root's zarr.json."""
    with zipfile.ZipFile(DATA / f"runs-{version}.zip") as archive:
        return json.loads(archive.read(f"{run}/zarr.json"))


def unpack(folder: Path, version: str = "0.3.0", run: str = "") -> Path:
    """Unpack a run of a version with its checkpoints, or all runs, and return its path."""
    with zipfile.ZipFile(DATA / f"runs-{version}.zip") as archive:
        wanted = f"{Path(run).stem}." if run else ""
        names = [name for name in archive.namelist() if name.startswith(wanted)]
        archive.extractall(folder / version, names)
    return folder / version / run


def digests(ds: xr.Dataset) -> dict[str, str]:
    """SHA-256 of the bytes of every variable and coordinate; of texts, of their JSON."""
    found = {}
    for name, array in sorted(ds.variables.items()):
        values = array.values
        data = (
            json.dumps(values.tolist()).encode()
            if values.dtype.kind in "OUT"
            else np.ascontiguousarray(values).tobytes()
        )
        found[str(name)] = hashlib.sha256(data).hexdigest()
    return found
