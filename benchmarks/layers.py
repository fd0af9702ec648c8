"""Metrics of every layer at every step, against a loop over checkpoints.

python benchmarks/layers.py [--steps N] [--rounds N]

Trains a GPT-2 with 4 layers, hidden size 128 and 128 tokens on tiny batches, once. Each step is
recorded with ``everything``, and its weights are saved with `torch.save`. Then each contender reads
all steps, in a new process: `analysis.layers`, and a loop that loads each checkpoint and calls
`torch.linalg.svdvals` for each matrix. Prints the median of wall and processor time, and the peak
memory, of which importing takes a part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONTENDERS = {
    "layers, spectral": "spectral",
    "layers, five metrics of singular values": (
        "spectral,effective_rank,effective_rank_share,stable_rank,condition_number"
    ),
    "layers, all metrics": "",
    "checkpoints, svdvals in float32": "float32",
    "checkpoints, svdvals in float64": "float64",
}


def record(folder: Path, steps: int) -> None:
    """Train, record each step, and save the weights of each step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from trajstore.trainers import capture

    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 128, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, optimizer, folder / "run.zarr", variables="everything"):
        for step in range(steps + 1):
            torch.save(model.state_dict(), folder / f"{step:04}.pt")
            if step < steps:
                ids = torch.randint(128, (2, 32))
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def measure(folder: Path, name: str) -> None:
    """Measure one contender, and print its seconds and its memory."""
    option = CONTENDERS[name]
    start, before = time.perf_counter(), time.process_time()
    if name.startswith("layers"):
        import trajstore
        from trajstore import analysis

        metrics = option.split(",") if option else None
        analysis.layers(trajstore.open_run(folder / "run.zarr"), metrics=metrics).compute()
    else:
        import torch

        for path in sorted(folder.glob("*.pt")):
            named = torch.load(path)
            named.pop("lm_head.weight")
            for value in named.values():
                if value.ndim > 1:
                    torch.linalg.svdvals(value.to(getattr(torch, option)))
    spent = {
        "wall": time.perf_counter() - start,
        "processor": time.process_time() - before,
        "memory": peak_memory(),
    }
    print(json.dumps(spent))


def peak_memory() -> float:
    """Largest resident memory of this process, MiB; `getrusage` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    """Record, measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.one:
        measure(Path(options.one[0]), options.one[1])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, options.steps)
        found: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
        for _ in range(options.rounds):
            for contender, spent in found.items():
                command = [sys.executable, __file__, "--one", name, contender]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, env=environment, check=True)
                spent.append(json.loads(done.stdout))
        print("| contender | wall, s | processor, s | peak, MiB |\n| --- | --- | --- | --- |")
        for contender, spent in found.items():
            row = [
                statistics.median(one[key] for one in spent)
                for key in ("wall", "processor", "memory")
            ]
            print(f"| {contender} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.0f} |")
        for files in ("run.zarr", "*.pt"):
            paths = [one for path in folder.glob(files) for one in (path, *path.rglob("*"))]
            size = sum(path.stat().st_size for path in paths if path.is_file())
            print(f"{files}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
