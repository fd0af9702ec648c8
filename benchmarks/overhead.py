"""What recording costs the thread that trains: with it and without, in turns, in new processes.

python benchmarks/overhead.py [CASE …] [--rounds N] [--package FOLDER …]

A case is a training of equal layers; `CASES` lists them. In a new process it is trained several
times, without recording and with it in turns; all start from the same weights. Each step is timed:
its wall time, and the processor time of the thread that trains, which other programs disturb less.
The table shows the time of the fastest tenth of the steps, because the host of a virtual machine
disturbs the others, and what recording adds: milliseconds and share of a step. The mean contains
the first rows, whose memory is new, and the disturbances.

With several folders of --package, each of them holding another version of trajstore, their
processes take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from measure import machine, save, table

VOCABULARY = 128


class Case(NamedTuple):
    """A training: layers × hidden, and how it is recorded."""

    tensors: int = 25
    hidden: int = 16
    clips: bool = False
    tier: str = "matrix"
    vocabulary: int = VOCABULARY
    trainer: bool = False
    steps: int = 100
    turns: int = 4
    pause: float = 0.0  # seconds of other work in a step


CASES = {
    "25": Case(),
    "25 clipped": Case(clips=True),
    "145": Case(145, steps=60),
    "145 clipped": Case(145, clips=True, steps=60),
    "25 everything": Case(tier="everything"),
    "145 everything clipped": Case(145, 64, clips=True, tier="everything", steps=60),
    "row of 2.4 MB": Case(5, 64, vocabulary=2_344),
    "row of 25.7 MB": Case(5, 64, vocabulary=25_129, steps=64, turns=1, pause=0.1),
    "25 keyframes": Case(tier="keyframes"),
    "145 keyframes clipped": Case(145, 64, clips=True, tier="keyframes", steps=60),
    "Trainer": Case(trainer=True),
    "Trainer everything": Case(trainer=True, tier="everything"),
}


def build(case: Case) -> Any:
    """Return a model: an embedding, layers, and a head of another matrix."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(case.hidden, case.hidden) for _ in range((case.tensors - 3) // 2)]
    embedding = torch.nn.Embedding(case.vocabulary, case.hidden)
    head = torch.nn.Linear(case.hidden, VOCABULARY)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers, self.head = embedding, torch.nn.Sequential(*layers), head

        def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
            logits = self.head(self.layers(self.embedding(input_ids)))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    return Model()


Clocks = list[tuple[float, float]]


def clock() -> tuple[float, float]:
    """Return the wall time and the processor time of this thread."""
    return time.perf_counter(), time.thread_time()


def own_loop(case: Case, path: Path | None) -> Clocks:
    """Train with a plain loop; return the time at the beginning of each step, and at the end."""
    import torch

    from trajstore.trainers import capture

    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ids = [torch.randint(VOCABULARY, (2, 4)) for _ in range(8)]
    options: dict[str, Any] = {"max_grad_norm": 0.1} if case.clips else {}
    recording: Any = contextlib.nullcontext()
    if path is not None:
        names = {"parameter": "embedding.weight", "variables": case.tier}
        recording = capture(model, optimizer, path, **names, **options)
    clocks: Clocks = []
    with recording:
        for step in range(case.steps):
            time.sleep(case.pause)  # stands for a larger model, whose step leaves time to encode
            clocks.append(clock())
            optimizer.zero_grad()
            batch = ids[step % 8]
            model(batch, batch)["loss"].backward()
            if case.clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            clocks.append(clock())
    return clocks


def trainer(case: Case, path: Path | None) -> Clocks:
    """Train with the Trainer of transformers; return the times of `own_loop`."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from trajstore.trainers import TrajectoryCallback

    clocks: Clocks = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clocks.append(clock())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clocks.append(clock())

    rows = [{"input_ids": [n % VOCABULARY] * 4, "labels": [n % VOCABULARY] * 4} for n in range(64)]
    callbacks: list[TrainerCallback] = [Clock()]
    if path is not None:
        names = {"parameter": "embedding.weight", "variables": case.tier}
        callbacks.append(TrajectoryCallback(path, **names))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=case.steps,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(build(case), arguments, train_dataset=rows, callbacks=callbacks).train()
    return clocks


def measure(case: Case) -> dict[str, Any]:
    """Return milliseconds of a step in this process: wall and processor, without and with."""
    import logging

    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    train: Callable[[Case, Path | None], Clocks] = trainer if case.trainer else own_loop
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(("warm", *("without", "with") * case.turns, "without")):
            path = Path(folder) / f"{number}.zarr" if kind == "with" else None
            clocks = train(case, path)
            for at, name in enumerate(("wall", "processor")):
                pairs = zip(clocks[::2], clocks[1::2], strict=True)
                found.setdefault(f"{kind} {name}", []).extend(
                    (after[at] - before[at]) * 1e3 for before, after in pairs
                )
    return {
        "fastest": {name: sorted(times)[len(times) // 10] for name, times in found.items()},
        "mean": {name: statistics.mean(times) for name, times in found.items()},
    }


def in_new_process(name: str, package: Path | None) -> dict[str, Any]:
    """Measure a case in a new process, with the trajstore of a folder."""
    command = [sys.executable, __file__, name, "--measure"]
    command += [] if package is None else ["--package", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print and save a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--package", type=Path, action="append", help="parent of trajstore/")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    packages = arguments.package or [None]
    if arguments.measure:
        if packages[0] is not None:
            sys.path.insert(0, str(packages[0]))
        print(json.dumps(measure(CASES[arguments.cases[0]])))
        return
    results: dict[str, Any] = {"machine": machine()}
    rows = []
    for name in arguments.cases or CASES:
        rounds: dict[Path | None, list[dict[str, Any]]] = {one: [] for one in packages}
        for number in range(arguments.rounds):
            for package in packages[:: -1 if number % 2 else 1]:
                rounds[package].append(in_new_process(name, package))
        for package, timed in rounds.items():
            rows.append([name, *([] if package is None else [str(package)]), *cells(timed)])
            print(*rows[-1], sep="  ", flush=True)
        results[name] = {str(package): timed for package, timed in rounds.items()}
    columns = ["case", *([] if packages == [None] else ["package"]), "ms without", "wall, added"]
    columns += ["share", "processor, added", "share", "mean processor, added"]
    save(
        "overhead",
        table("A step without recording, and what recording adds", columns, rows),
        results,
    )


def cells(timed: list[dict[str, Any]]) -> list[str]:
    """Return medians over the rounds, and the range of the shares."""
    found = [f"{statistics.median(one['fastest']['without wall'] for one in timed):.2f}"]
    for name in ("wall", "processor"):
        added = [
            one["fastest"][f"with {name}"] - one["fastest"][f"without {name}"] for one in timed
        ]
        shares = [
            100 * ms / one["fastest"][f"without {name}"]
            for ms, one in zip(added, timed, strict=True)
        ]
        found.append(f"{statistics.median(added):.2f}")
        found.append(f"{statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f})")
    mean = [one["mean"]["with processor"] - one["mean"]["without processor"] for one in timed]
    return [*found, f"{statistics.median(mean):.2f}"]


if __name__ == "__main__":
    main()
