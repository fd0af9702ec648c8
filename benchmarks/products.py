"""Products of 16-bit matrices: torch's own and those in float32, rounded once.

python benchmarks/products.py [--preset NAME …] [--rounds N] [--corpus PATH] [--tokenizer PATH]

Wordybird trains on `--corpus` with `--tokenizer`, the others on embedded text.

For each preset and for one and two threads, trains in alternating order with both ways, each time
in a new process, and prints the smallest seconds of a step. Then multiplies matrices, random and of
a recorded training, both ways, and prints errors in units of the last place (ulp) against float64.

ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 makes a processor with bfloat16 instructions
compute as one without them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from measure import machine

PRESETS = {"gatsby": 12, "gatsby-gradients": 12, "gatsby-adam": 12, "wordybird-1": 3, "duckling": 4}
"""Steps to train."""
WAYS = ("native", "float32")
TRAIN = """
import json, sys, time
import torch
from trajstore.trainers import preset
from trajstore.trainers.runs.training_setup import build_training
from trajstore.trainers.texts import load_corpus
name, way, threads, steps, text = sys.argv[1], *map(json.loads, sys.argv[2:])
torch.set_num_threads(threads)
config = preset(name).with_values([f"training.products={way}", f"training.steps={steps}"])
training = build_training(config, load_corpus(config, **text))
ends = []
training.optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
training.run()
print(json.dumps(min(b - a for a, b in zip(ends, ends[1:]))))
"""


def step_seconds(preset: str, *settings: Any) -> float:
    """Train in a new process, and return the smallest seconds of a step after the first."""
    given = [sys.executable, "-c", TRAIN, preset, *map(json.dumps, settings)]
    done = subprocess.run(given, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def speeds(presets: list[str], rounds: int, text: dict[str, str]) -> Iterator[list[Any]]:
    """Yield rows of the table of speeds."""
    for preset in presets:
        own = text if preset.startswith("wordybird") else {}
        for threads in (1, 2):
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way in WAYS:
                    settings = (way, threads, PRESETS[preset], own)
                    found[way].append(step_seconds(preset, *settings))
            native, wide = (min(found[way]) for way in WAYS)
            yield [preset, threads, f"{native:.3f}", f"{wide:.3f}", f"{native / wide:.2f}"]


def errors() -> Iterator[list[Any]]:
    """Compare products of both ways with float64: random matrices, and weights after 20 steps."""
    import torch

    from trajstore.trainers import float32_products, preset
    from trajstore.trainers.runs.training_setup import build_training
    from trajstore.trainers.texts import load_corpus

    config = preset("gatsby").with_values(["training.steps=20"])
    training = build_training(config, load_corpus(config))
    taken: list[Any] = []
    training.model.transformer.h[1].mlp.c_fc.register_forward_pre_hook(
        lambda _, args: taken.append(args[0].detach().flatten(0, 1)[:512])
    )
    with float32_products():
        training.run()
    torch.manual_seed(0)
    model = training.model
    states, weights = taken[-1].float(), model.transformer.h[1].mlp.c_fc.weight.detach().float()
    pairs = {
        "random, 512 × 256 × 512": (torch.randn(512, 256), torch.randn(256, 512)),
        "random, 64 × 4096 × 128": (torch.randn(64, 4096), torch.randn(4096, 128)),
        "recorded, states × weights": (states, weights),
        "recorded, states × W": (states, model.lm_head.weight.detach().T.float()),
    }  # fmt: skip
    for kind in (torch.bfloat16, torch.float16):
        for name, pair in pairs.items():
            a, b = (one.to(kind) for one in pair)
            exact = a.double() @ b.double()
            _, exponent = torch.frexp(exact)
            ulp = torch.ldexp(
                torch.tensor(torch.finfo(kind).eps, dtype=torch.float64), exponent - 1
            )
            row = [str(kind).removeprefix("torch."), name]
            for way in WAYS:
                with float32_products(way == "float32"):
                    error = ((a @ b).double() - exact).abs() / ulp
                row += [f"{error.max():.4f}", f"{error.mean():.4f}"]
            yield row


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", action="append", choices=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--corpus")
    parser.add_argument("--tokenizer")
    given = parser.parse_args()
    text = {
        name: value
        for name in ("corpus", "tokenizer")
        if (value := getattr(given, name)) is not None
    }
    import torch

    print(machine() | {"capability": torch.backends.cpu.get_cpu_capability()})
    print("preset | threads | native, s a step | float32, s a step | ratio")
    for row in speeds(given.preset or list(PRESETS), given.rounds, text):
        print(*row, sep=" | ", flush=True)
    print("type | matrices | native max | native mean | float32 max | float32 mean (ulp)")
    for row in errors():
        print(*row, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
