"""Speed and memory of the analysis, compared with whole tensors in RAM.

    python benchmarks/analysis.py [--rows 50 200] [--cache FOLDER] [--store RUN.zarr] [--json FILE]
    python benchmarks/analysis.py --store RUN.zarr --quantities clusters pca inertia

Without --store, generates histories of Wordybird's shape (50,257 tokens × 64, bfloat16, W and
grad): a random walk with the step sizes of Adam under a decaying learning rate. One token after the
other stops moving, as in real runs. Every measurement is a separate process: wall time and
processor time (which depends less on other programs) without imports, and the peak of its resident
memory with them.

``notebook`` is the earlier method: load the tensors from a safetensors file (in the page cache) and
compute on all of them with torch. ``read`` only decodes the chunks, which is the minimum.
``--store`` adds the sums of both exact moments; the goal is three times the time of the sum of
``grad``. ``--quantities`` measures only these, with all their variables summed, and reading W.
Options follow a name, as in ``"adjacency steps=0,100,200"``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import resident

# This file has the name of the package; its folder must not be searched first.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent]

TOKENS, HIDDEN, DEAD = 50_257, 64, 19_667


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_store(path: Path, rows: int) -> None:
    from trajstore import RunWriter

    rng = np.random.default_rng(42)
    W = rng.normal(0, 0.02, (TOKENS, HIDDEN)).astype(np.float32)
    bits = bfloat16_bits(W)
    is_dead = np.zeros(TOKENS, bool)
    is_dead[rng.permutation(TOKENS)[:DEAD]] = True
    direction = rng.choice([-1.0, 1.0], HIDDEN).astype(np.float32)
    rest = np.where(is_dead, rng.normal(55, 12, TOKENS), rng.normal(90, 40, TOKENS))
    moment = np.zeros_like(W)
    with RunWriter.create(
        path,
        token=np.arange(TOKENS),
        hidden=HIDDEN,
        variables={"W": "bfloat16", "grad": "bfloat16"},
        is_dead=is_dead,
    ) as run:
        run.append(0, W=bits, grad=np.full(bits.shape, 0x7FC0, np.uint16))
        for step in range(1, rows):
            noise = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
            grad = 1e-4 / step * (direction + np.where(is_dead[:, None], 0.1, 1.0) * noise)
            moment = 0.9 * moment + 0.1 * noise
            pace = 1e-3 * (1 - step / rows) * np.where(step < rest, 1.0, 1e-3)
            change = pace[:, None] * np.clip(direction + moment, -1, 1)
            W = (bits.astype(np.uint32) << 16).view(np.float32) + change.astype(np.float32)
            bits = bfloat16_bits(W)
            run.append(step, W=bits, grad=bfloat16_bits(grad))


def make_safetensors(path: Path, store: Path) -> None:
    import torch
    import xarray as xr
    from safetensors.torch import save_file

    ds = xr.open_zarr(store)
    tensors = {}
    for name in ("W", "grad"):
        whole = torch.empty(ds[name].shape, dtype=torch.bfloat16)
        for row in range(0, ds.sizes["step"], 8):
            whole[row : row + 8] = torch.from_numpy(ds[name][row : row + 8].values)
        tensors[name] = whole
    tensors["is_dead"] = torch.from_numpy(ds["is_dead"].values)
    save_file(tensors, path)


def in_notebook(path: Path, question: str) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        dead = file.get_tensor("is_dead")
        name = "grad" if question == "grad_norms" else "W"
        tensor = file.get_tensor(name)
    if question == "grad_norms":
        for chosen in (dead, ~dead):
            torch.linalg.vector_norm(tensor[:, chosen].float(), dim=-1).mean(1)
    elif question == "freeze":
        moved = (tensor[1:] != tensor[:-1]).any(-1)
        last = moved.shape[0] - torch.argmax(moved.flip(0).int(), 0)
        last[~moved.any(0)] = -1
    else:
        for row in range(1, tensor.shape[0]):
            before, after = tensor[row - 1].float(), tensor[row].float()
            power = (before.view(torch.int32) & 0x7F800000).view(torch.float32)
            hops = (after - before) / (power.clamp(min=2.0**-126) * 2.0**-7)
            hops.abs().sum(-1), hops.norm(dim=-1), hops.abs().amax(-1)


def corner(block: np.ndarray) -> np.ndarray:
    return block[:1, :1, :1].copy()  # a view would keep the block


def in_trajstore(path: Path, question: str) -> None:
    import dask

    import trajstore
    from trajstore import analysis
    from trajstore.analysis import accessor

    ds = trajstore.open_run(path)
    ds = ds.drop_vars([name for name in ds if name not in ("W", "grad", "clip_coef")])
    if question.startswith("read"):
        names = ["W", "grad"] if question == "read" else [question.partition(" ")[2]]
        corners = [ds[name].data.map_blocks(corner, chunks=(1, 1, 1)) for name in names]
        dask.compute(*corners)
    elif question == "sum of grad":
        ds.grad.sum().compute()
    elif question == "sum of exact moments":
        analysis.exact_moments(ds).sum().compute()
    elif question == "all three":
        analysis.compute(ds, ["grad_norms", "freeze", "regimes"]).compute()
    elif question.startswith("sum of "):
        name, *options = question.removeprefix("sum of ").split()
        accessor.compute_named(ds, [name], options).sum().compute()
    else:
        analysis.compute(ds, [question]).compute()


def child(way: str, path: Path, question: str) -> None:
    # Imports are paid once per session, not once per question.
    for name in (
        ("torch", "safetensors") if way == "notebook" else ("dask", "trajstore", "analysis")
    ):
        importlib.import_module(name)
    wall, cpu = time.perf_counter(), time.process_time()
    (in_notebook if way == "notebook" else in_trajstore)(path, question)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak_bytes": resident("VmHWM")}))


def measure(way: str, path: Path, question: str, repeat: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, str(path), question]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(repeat)
    ]
    return {
        "wall_s": min(run["wall_s"] for run in runs),
        "cpu_s": min(run["cpu_s"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def compare_with_reading(
    store: Path, quantities: list[str], repeat: int, results: dict[str, Any]
) -> None:
    print(f"{store}\n{'':<28}{'wall s':>8}{'ratio':>8}{'cpu s':>8}{'ratio':>8}{'peak MB':>9}")
    for question in ["read W", *(f"sum of {name}" for name in quantities)]:
        got = results[question] = measure("trajstore", store, question, repeat)
        floor = results["read W"]
        ratios = {way: got[way] / floor[way] for way in ("wall_s", "cpu_s")}
        print(
            f"{question:<28}{got['wall_s']:8.2f}{ratios['wall_s']:8.2f}"
            f"{got['cpu_s']:8.2f}{ratios['cpu_s']:8.2f}{got['peak_bytes'] / 1e6:9.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--store", type=Path, help="recorded run in place of synthetic ones")
    parser.add_argument("--quantities", nargs="+", help="quantities of --store to measure")
    parser.add_argument("--repeat", type=int, default=2, help="repetitions; the fastest counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]), given.child[2])
        return
    results: dict[str, Any] = {}
    if given.quantities:
        compare_with_reading(given.store, given.quantities, given.repeat, results)
        if given.json:
            given.json.write_text(json.dumps(results, indent=2))
        return
    questions = ["grad_norms", "freeze", "regimes"]
    # Synthetic histories have no optimizer.
    moments = ["sum of grad", "sum of exact moments"] if given.store else []
    for rows in [0] if given.store else given.rows:
        store = given.store or given.cache / f"wordybird-shaped-{rows}.zarr"
        if not store.exists():
            make_store(store, rows)
        flat = given.cache / f"{store.stem}.safetensors"
        if not flat.exists():
            make_safetensors(flat, store)
        print(f"{store}\n{'':<28}{'wall s':>8}{'ratio':>8}{'cpu s':>8}{'peak MB':>9}")
        for way, path, contents in [
            ("notebook", flat, questions),
            ("trajstore", store, ["read W", "read grad", *questions, "all three", *moments]),
        ]:
            for question in contents:
                got = measure(way, path, question, given.repeat)
                results[f"{store.stem} {way} {question}"] = got
                base = results.get(f"{store.stem} notebook {question}", {}).get("wall_s")
                ratio = f"{got['wall_s'] / base:8.2f}" if base else " " * 8
                print(
                    f"{way + ' ' + question:<28}{got['wall_s']:8.2f}{ratio}"
                    f"{got['cpu_s']:8.2f}{got['peak_bytes'] / 1e6:9.0f}",
                    flush=True,
                )
    if given.json:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
