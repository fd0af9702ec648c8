"""Speed of reading a history: a token, a step, everything, the norms of gradients; and of opening.

    python benchmarks/read.py [--rounds 7] [--rows 200] [--steps 200]

Compared with HDF5 in chunks of one step (uint16 bits, widened, as its users do), and for the norms
with torch on data in RAM, if torch is installed. The peak of memory above the imports is measured
in a separate process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr
import zarr
from history import wordybird
from measure import alternate, cache, machine, resident, save, table

from trajstore import RunWriter, open_run

# Frequent and rare tokens, at all positions of a block.
TOKENS = (262, 1_234, 11_111, 27_001, 50_256)
MEMORY = 1 << 30  # of a scan, with all copies

# A script in this folder has the name of the package `analysis`, and must not be imported first.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent]

Ask = Callable[[xr.Dataset], Any]


def write(folder: Path, history: dict[str, np.ndarray], rows: int) -> dict[str, Path]:
    """Write the same W and grad in each format."""
    W = history["W"]
    paths = {name: folder / name for name in ("run.zarr", "run.h5")}
    is_dead = np.arange(W.shape[1]) % 5 < 2  # the real fraction, at regular positions
    with RunWriter.create(
        paths["run.zarr"],
        token=np.arange(W.shape[1]),
        hidden=W.shape[2],
        variables={"W": "bfloat16", "grad": "bfloat16"},
        is_dead=is_dead,
    ) as run:
        for step in range(rows):
            values = {name: np.array(history[name][step]) for name in ("W", "grad")}
            run.append(step=step, **values)
    with h5py.File(paths["run.h5"], "w") as file:
        for name in ("W", "grad"):
            shape = (rows, *W.shape[1:])
            data = file.create_dataset(name, shape, "u2", chunks=(1, *shape[1:]))
            for step in range(rows):
                data[step] = history[name][step]
        file["is_dead"] = is_dead
    return paths


def widened(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits to float32, as users of HDF5 do."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def norms_in_ram(grad: Any, is_dead: Any) -> Any:
    """Return the root mean square of the gradients of dead and of live tokens at each step."""
    import torch

    squares = [g.float().square().mean(-1) for g in grad]
    return [torch.stack([square[mask].mean().sqrt() for square in squares])
            for mask in (is_dead, ~is_dead)]  # fmt: skip


def norms(ds: xr.Dataset) -> Any:
    """Return the same with `ds.traj`."""
    return ds.traj.grad_norms().compute()


READERS: dict[str, Callable[[Path], xr.Dataset]] = {
    "xr.open_zarr": xr.open_zarr,
    "open_run": open_run,
    "open_run, chunks=None": lambda path: open_run(path, chunks=None),
}

LAZY = ("xr.open_zarr", "open_run")
SCANS: dict[str, Ask] = {
    "full scan of W": lambda ds: ds.W.max().compute(),
    "full scan of grad": lambda ds: ds.grad.max().compute(),
}


def steps_of(rows: int) -> list[int]:
    return [rows * part // 211 for part in (5, 36, 81, 104, 127, 167, 198)]


def questions(rows: int) -> dict[str, tuple[int, Ask]]:
    """Return the number of answers of each question, and a function for it."""
    steps = steps_of(rows)
    return {
        "one token, all steps": (
            len(TOKENS),
            lambda ds: [ds.W[:, token].values for token in TOKENS],
        ),
        "one step": (len(steps), lambda ds: [ds.W[step].values for step in steps]),
        **{name: (1, ask) for name, ask in SCANS.items()},
        "gradient norms, dead and live": (1, norms),
    }


def peak(path: Path, reader: str, question: str, rows: int) -> int:
    """Return the bytes above the imports that one question takes, in a separate process."""
    done = subprocess.run(
        [sys.executable, __file__, "--rows", str(rows), "--peak", str(path), reader, question],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout))


def print_peak(path: str, reader: str, question: str, rows: int) -> None:
    from trajstore import analysis  # noqa: F401

    before = resident("VmRSS")
    questions(rows)[question][1](READERS[reader](Path(path)))
    print(json.dumps(resident("VmHWM") - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200, help="steps of the history to read")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = options.rows
    if options.peak:
        print_peak(*options.peak, rows)
        return
    folder = cache() / "scratch-read"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = machine()
    paths = write(folder, wordybird(options.steps), rows)
    file = h5py.File(paths["run.h5"])
    opened = {name: open_it(paths["run.zarr"]) for name, open_it in READERS.items()}

    def scan(name: str) -> Callable[[], Any]:
        return lambda: max(widened(file[name][step]).max() for step in range(rows))

    bases: dict[str, tuple[str, Callable[[], Any]]] = {
        "one token, all steps": (
            "h5py",
            lambda: [widened(file["W"][:, token]) for token in TOKENS],
        ),
        "one step": ("h5py", lambda: [widened(file["W"][step]) for step in steps_of(rows)]),
        "full scan of W": ("h5py", scan("W")),
        "full scan of grad": ("h5py", scan("grad")),
        "gradient norms, dead and live": ("torch, in RAM", lambda: None),
    }
    results: dict[str, dict[str, float]] = {}
    lines = []
    for question, (count, ask) in questions(rows).items():
        whole = question not in ("one token, all steps", "one step")
        readers = LAZY if whole else tuple(READERS)
        base, reference = bases[question]
        if base.startswith("torch") and find_spec("torch") is None:
            continue
        if base.startswith("torch"):
            import torch

            grad = torch.from_numpy(file["grad"][...].view(np.int16)).view(torch.bfloat16)
            is_dead = torch.from_numpy(file["is_dead"][...])
            reference = lambda grad=grad, is_dead=is_dead: norms_in_ram(grad, is_dead)  # noqa: E731
        contenders: dict[str, Callable[[], tuple[float, dict[str, Any]]]] = {
            name: lambda ds=opened[name], ask=ask: (ask(ds), (1.0, {}))[1] for name in readers
        }
        contenders[base] = lambda reference=reference: (reference(), (1.0, {}))[1]
        measured = alternate(contenders, options.rounds, memory=MEMORY if whole else 0)
        seconds = {name: 1 / item.rate / count for name, item in measured.items()}
        results[question] = seconds
        for name, second in seconds.items():
            taken = (
                ""
                if name == base
                else f"{peak(paths['run.zarr'], name, question, rows) / 1e6:,.0f}"
            )
            lines.append(
                [question, name, f"{second * 1e3:,.1f}", f"{seconds[base] / second:.2f}", taken]
            )
    openers = {
        name: lambda open_it=open_it: (open_it(paths["run.zarr"]), (1.0, {}))[1]
        for name, open_it in READERS.items()
    }
    measured = alternate(openers, 5 * options.rounds)
    results["opening"] = {name: 1 / item.rate for name, item in measured.items()}
    lines += [
        ["opening", name, f"{second * 1e3:,.1f}", "", ""]
        for name, second in results["opening"].items()
    ]
    title = f"Reading {rows} Wordybird steps of W and grad, zarr {zarr.__version__}"
    columns = ["question", "reader", "ms", "× reference's speed", "peak, MB"]
    save(f"read-{zarr.__version__}", table(title, columns, lines), {"machine": facts, **results})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
