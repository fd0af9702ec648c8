"""Cost of recording the examples of a step, their losses, their states and the states' spread.

python benchmarks/seen.py [--model gatsby gpt2-4x128] [--steps N] [--rounds N] [--corpus PATH]

One training run in one process on one core is divided into segments. Each segment records another
choice of variables into its own run. Every round has each choice once, in alternating order, so
that a slower machine affects all of them. The first steps of a segment, in which the run is
created, are not timed. The others are timed by the clock and by the processor time of the training
thread, which depends less on other programs. The processor time of the whole segment includes
encoding and the last commit. Ratios are computed within each round, to the segment without
recording and to that with ``matrix``; the table shows their medians. A second table is for machines
that vary more than that: the processor time of the work for each variable alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine, save, table

MODELS = {
    "gatsby": [],
    "gpt2-4x128": ["model.layers=4", "model.hidden=128", "model.heads=4"],
}
KINDS: dict[str, tuple[str, ...] | None] = {
    "nothing": None,
    "matrix": ("matrix",),
    "+ batch": ("matrix", "batch"),
    "+ example_loss": ("matrix", "example_loss"),
    "+ hidden_trace, hidden_cosine": ("matrix", "hidden_trace", "hidden_cosine"),
    "+ hidden_states": ("matrix", "hidden_states"),
    "+ all of these": (
        "matrix", "batch", "example_loss", "hidden_trace", "hidden_cosine", "hidden_states",
    ),
}  # fmt: skip
KEYS = ("step", "thread", "processor")
WARM = 3

Timed = dict[str, float]


class Segments:
    """A training run that is continued segment by segment.

    Parameters
    ----------
    changes : list of str
        Changes of the preset ``gatsby``.
    corpus : str or None
    """

    def __init__(self, changes: list[str], corpus: str | None) -> None:
        import torch

        from trajstore.trainers.presets import preset
        from trajstore.trainers.runs.training_setup import build_training
        from trajstore.trainers.texts import load_corpus

        torch.set_num_threads(1)
        config = preset("gatsby").with_values([*changes, "training.device=cpu"])
        self._training = build_training(config, load_corpus(config, corpus=corpus))
        self._random = torch.Generator().manual_seed(0)
        self._training.model.train()
        self.step = 0

    def train(self, variables: tuple[str, ...] | None, steps: int) -> Timed:
        """Return the seconds per step: by the clock, of its thread, and of all threads."""
        import torch

        from trajstore.trainers import capture

        training = self._training
        seconds: list[float] = []
        thread: list[float] = []
        size = training.config.training.batch_size
        processor = time.process_time()
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as recording:
            if variables is not None:
                options: dict[str, Any] = {
                    "variables": variables, "first_step": self.step, "on_note": lambda note: None,
                }  # fmt: skip
                recorder = recording.enter_context(
                    capture(training.model, training.optimizer, Path(folder) / "r.zarr", **options)
                )
            for _ in range(steps):
                index = torch.randint(len(training.dataset), (size,), generator=self._random)
                examples = [training.dataset[int(one)] for one in index]
                batch = {key: torch.stack([one[key] for one in examples]) for key in examples[0]}
                begun, thread_begun = time.perf_counter(), time.thread_time()
                training.optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = training.model(**batch).loss
                loss.backward()
                if variables is not None and "batch" in variables:
                    recorder.observe(batch=index)
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
                training.optimizer.step()
                seconds.append(time.perf_counter() - begun)
                thread.append(time.thread_time() - thread_begun)
            self.step += steps
            recording.close()
            processor = time.process_time() - processor
        return {
            "step": statistics.median(seconds[WARM:]),
            "thread": statistics.median(thread[WARM:]),
            "processor": processor / steps,
        }


def measure(model: str, arguments: argparse.Namespace) -> list[dict[str, Timed]]:
    """Return all rounds of one training run."""
    training = Segments(MODELS[model], arguments.corpus)
    training.train(("matrix",), 2 * WARM)
    names, rounds = list(KINDS), []
    for number in range(arguments.rounds):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        timed = {name: training.train(KINDS[name], arguments.steps) for name in order}
        rounds.append(timed)
        shown = (f"{timed[name]['thread'] * 1e3:.1f}" for name in names)
        print(model, number + 1, *shown, flush=True)
    return rounds


def alone(model: str, repeats: int = 25) -> list[list[str]]:
    """Return the processor time of the work for each variable, on tensors of its shapes."""
    import torch

    from trajstore.trainers.presets import preset
    from trajstore.trainers.recording.examples import example_losses
    from trajstore.trainers.recording.forward_values import HiddenSpread

    torch.set_num_threads(1)
    config = preset("gatsby").with_values(MODELS[model])
    shape = (config.examples, config.model.context)
    logits = torch.randn(*shape, config.model.vocab_size).bfloat16()
    labels = torch.randint(0, config.model.vocab_size, shape)
    states = torch.randn(*shape, config.model.hidden).bfloat16()
    place = torch.empty_like(states)
    tasks: dict[str, Callable[[], Any]] = {
        "batch": lambda: labels[:, 0].to(torch.float64),
        "example_loss": lambda: example_losses(logits, labels),
        "hidden_trace, hidden_cosine": lambda: HiddenSpread.of(
            states.flatten(0, -2).float()
        ).cosine(),
        "hidden_states": lambda: place.copy_(states),
    }
    rows = []
    for name, task in tasks.items():
        seconds = []
        for _ in range(repeats):
            begun = time.thread_time()
            task()
            seconds.append(time.thread_time() - begun)
        middle = statistics.median(seconds)
        rows.append([model, name, f"{min(seconds) * 1e3:.2f} ms", f"{middle * 1e3:.2f} ms"])
    return rows


def main() -> None:
    """Print a table of medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=20, help="steps of a segment")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--corpus")
    arguments = parser.parse_args()
    rows, results = [], {"machine": machine()}
    for model in arguments.model:
        rounds = measure(model, arguments)
        results[model] = rounds
        for name in KINDS:
            row = [model, name]
            row += [f"{_median(rounds, name, key) * 1e3:.1f} ms" for key in KEYS]
            row += [f"{_median(rounds, name, key, 'nothing'):.3f}" for key in KEYS]
            row += [f"{_median(rounds, name, key, 'matrix'):.3f}" for key in KEYS]
            rows.append(row)
    columns = ["model", "recorded", "step", "its thread", "all threads"]
    columns += ["ratio to nothing", "", "", "ratio to all", "", ""]
    text = table("Steps of one training run", columns, rows)
    own = [row for model in arguments.model for row in alone(model)]
    text += table("Each variable alone", ["model", "variable", "minimum", "median"], own)
    save("seen", text, results | {"alone": own})


def _median(rounds: list[dict[str, Timed]], name: str, key: str, to: str | None = None) -> float:
    """Return the median of all rounds, or of their ratios to another choice."""
    return statistics.median(
        timed[name][key] / (1.0 if to is None else timed[to][key]) for timed in rounds
    )


if __name__ == "__main__":
    main()
