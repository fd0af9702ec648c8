"""What recording everything costs: paired runs of the same training, with and without.

python benchmarks/overhead.py [--preset NAME …] [--steps N] [--pairs N] [--corpus PATH]
                              [--tokenizer PATH]

Each pair trains twice, in turns, each time in a fresh process and from the same seed, and times the
steps after the first one, which builds what the others use; the wait for the last block is in. The
table shows the ratio of the two wall times, that of the processor times (which counts the encoding
too, and feels less of whatever else the machine does), and how much more memory the process held
at its peak. Look at all pairs.
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
from pathlib import Path
from typing import Any

STEPS = {"gatsby": 1_000, "wordybird-1": 40}


def train_once(arguments: argparse.Namespace) -> dict[str, float]:
    """Train in this process, recorded or not."""
    import torch
    from transformers import TrainerCallback

    from trainers.callback import TrajectoryCallback
    from trainers.corpus import load_corpus
    from trainers.presets import preset
    from trainers.training import build_training

    steps = arguments.steps or STEPS[arguments.preset[0]]
    config = preset(arguments.preset[0]).with_values(
        [f"training.steps={steps}", f'recording.memory="{arguments.memory}"']
    )
    text = load_corpus(config, corpus=arguments.corpus, tokenizer=arguments.tokenizer)
    training = build_training(config, text)
    if training.config.training.loop != "trainer":
        raise SystemExit("this benchmark is of the Trainer's presets")
    started = processor = 0.0

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal started, processor
            if state.global_step == 1:
                started, processor = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[TrainerCallback] = [Clock()]
        if arguments.recorded:
            callbacks.append(TrajectoryCallback(Path(folder) / "run.zarr", memory=arguments.memory))
        training.run(callbacks)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        processor = time.process_time() - processor
    return {
        "seconds": seconds,
        "processor": processor,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure(arguments: argparse.Namespace, preset: str, *, recorded: bool) -> dict[str, float]:
    """Train in a process of its own."""
    command = [sys.executable, __file__, "--once", "--preset", preset]
    command += ["--memory", arguments.memory]
    for name in ("steps", "corpus", "tokenizer"):
        if getattr(arguments, name) is not None and not (
            name == "tokenizer" and preset == "gatsby"
        ):
            command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--recorded"] if recorded else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table of pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--corpus")
    parser.add_argument("--tokenizer")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--recorded", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(train_once(arguments)))
        return
    print("preset         without       with   ratio   processor   more memory at the peak")
    for preset in arguments.preset:
        ratios = []
        for number in range(arguments.pairs):
            # In turns, so that a machine that slows down does not favour one of them.
            order = [False, True] if number % 2 == 0 else [True, False]
            timed = {kind: measure(arguments, preset, recorded=kind) for kind in order}
            ratio = timed[True]["seconds"] / timed[False]["seconds"]
            processor = timed[True]["processor"] / timed[False]["processor"]
            more = (timed[True]["peak"] - timed[False]["peak"]) / 2**20
            ratios.append(ratio)
            print(
                f"{preset:<12} {timed[False]['seconds']:7.1f} s {timed[True]['seconds']:7.1f} s "
                f"{ratio:7.3f} {processor:11.3f} {more:9.0f} MiB",
                flush=True,
            )
        print(f"{preset:<12} median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
