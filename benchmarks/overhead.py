"""Cost of recording everything: the same training without recording, with it, and with a list.

python benchmarks/overhead.py [--preset NAME …] [--steps N] [--rounds N] [--corpus PATH]
                              [--tokenizer PATH] [--everything] [--flushes]

Each round trains three times, in alternating order, each time in a new process and with the same
seed: without recording, with it, and as notebooks do it: with a list of every step's tensors that
is saved as one safetensors file at the end. The first step, which initializes what the others use,
is not timed. The wait for the last block, or the save, is included. The table shows ratios to the
training alone: of the wall times, and of the processor times, which include encoding and depend
less on other programs. It also shows the additional peak memory.

If the machine varies more than recording costs, rounds show little. So each preset is first trained
once with a row at every other step, and the steps with a row are compared with the others. Encoding
runs in parallel to both. The tier ``norms`` is measured in the same way for two sizes of model: all
steps have a row, but every other row repeats the numbers of the model's parameters of the step
before, which costs nothing.

With --everything, trainings without recording are compared with the tier ``everything``.

With --flushes, only recordings are compared, in alternating order: with commits that are flushed to
the disk, the default, and without (fsync=False). Wall and processor times are printed. The disk is
that of the temporary folder (TMPDIR).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import machine, resident, save, table

STEPS = {"gatsby": 1_000, "wordybird-1": 40, "wordybird-1b": 40}
KINDS = ("without", "trajstore", "list")
UNFLUSHED = "not flushed"
EVERYTHING = "everything"
CLOCKS = ("seconds", "processor")
ALTERNATING = "every other step"
MODEL = "model at every other step"
SIZES = {
    "2 layers × 64": (),
    "4 layers × 128": ("model.layers=4", "model.hidden=128", "model.heads=4"),
}
"""Changes of the model of Gatsby."""


def list_recorder(file: Path) -> Any:
    """Return a callback that keeps every step in memory until the end, as the notebooks do."""
    import torch
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
            self.rows: dict[str, list[torch.Tensor]] = {}
            self.matrix = model.get_output_embeddings().weight
            self._take("W", self.matrix)
            model.register_forward_hook(self._on_output)

        def _take(self, name: str, value: torch.Tensor) -> None:
            self.rows.setdefault(name, []).append(value.detach().cpu().clone())

        def _on_output(self, model: Any, inputs: Any, output: Any) -> None:
            self._take("logits", output.logits[0, -1, :].bfloat16())
            self._take("losses", output.loss)

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self._take("grads", self.matrix.grad)

        def on_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            self._take("W", self.matrix)
            state = optimizer.state[self.matrix]
            self._take("momentum", state["exp_avg"])
            self._take("variance", state["exp_avg_sq"])

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            save_file({name: torch.stack(rows) for name, rows in self.rows.items()}, file)

    return Recorder()


def train_once(arguments: argparse.Namespace) -> dict[str, float]:
    """Train in this process, with one way of recording or none."""
    import torch
    from transformers import TrainerCallback

    from trajstore.trainers.presets import preset
    from trajstore.trainers.recording.hf_callback import TrajectoryCallback
    from trajstore.trainers.runs.training_setup import build_training
    from trajstore.trainers.texts.corpus import load_corpus

    steps = arguments.steps or STEPS[arguments.preset[0]]
    config = preset(arguments.preset[0]).with_values(
        [
            f"training.steps={steps}",
            f'recording.memory="{arguments.memory}"',
            *SIZES.get(arguments.size, ()),
        ]
    )
    text = load_corpus(config, corpus=arguments.corpus, tokenizer=arguments.tokenizer)
    training = build_training(config, text)
    if arguments.kind == ALTERNATING:
        return alternating(training, arguments.memory)
    if arguments.kind == MODEL:
        return with_the_model(training, arguments.memory)
    if training.config.training.loop != "trainer":
        raise SystemExit("this benchmark needs a preset with training.loop = trainer")
    started = processor = 0.0

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal started, processor
            if state.global_step == 1:
                started, processor = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[TrainerCallback] = [Clock()]
        if arguments.kind in ("trajstore", UNFLUSHED, EVERYTHING):
            flushed = arguments.kind != UNFLUSHED
            variables = "everything" if arguments.kind == EVERYTHING else "matrix"
            path = Path(folder) / "run.zarr"
            callbacks.append(
                TrajectoryCallback(path, variables, memory=arguments.memory, fsync=flushed)
            )
        elif arguments.kind == "list":
            callbacks.append(list_recorder(Path(folder) / "run.safetensors"))
        training.run(callbacks)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        processor = time.process_time() - processor
    return {
        "seconds": seconds,
        "processor": processor,
        "peak": resident("VmHWM"),
    }


def alternating(training: Any, memory: str) -> dict[str, float]:
    """Train with a row at every other step; return the seconds of steps with and without a row."""
    from transformers import TrainerCallback

    from trajstore.trainers.recording.hf_callback import TrajectoryCallback

    begun: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        run = TrajectoryCallback(Path(folder) / "run.zarr", memory=memory, every=2)
        training.run([Clock(), run])
    seconds = [after - before for before, after in itertools.pairwise(begun)]
    warm = len(seconds) // 10
    between, rows = (  # seconds[0] is step 1, which has no row
        [seconds[step] for step in range(start, len(seconds), 2) if step >= warm]
        for start in (0, 1)
    )
    return {"rows": statistics.median(rows), "between": statistics.median(between)}


class EveryOtherStep:
    """Replaces a `ModelParameters`: at every other step it returns the previous values."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.last, self.works = whole, {}, True
        self.names = whole.names

    def initial(self) -> dict[str, Any]:
        """Return the values before the first step."""
        return self.whole.initial()

    def after_backward(self, *args: Any) -> None:
        """Take the gradients at every other step."""
        if self.works:
            self.whole.after_backward(*args)

    def before_step(self, groups: Any) -> None:
        """Copy the weights at every other step."""
        if self.works:
            self.whole.before_step(groups)

    def after_update(self, groups: Any, *, skipped: bool) -> None:
        """Take the updates of every other step."""
        if self.works:
            self.whole.after_update(groups, skipped=skipped)

    def after_step(self) -> dict[str, Any]:
        """Return the values of the step, or of the step before."""
        if self.works:
            self.last = self.whole.after_step()
        self.works = not self.works
        return self.last


def with_the_model(training: Any, memory: str) -> dict[str, float]:
    """Return the seconds of steps with and without summaries of all parameters."""
    from transformers import TrainerCallback

    from trajstore.trainers.recording.hf_callback import TrajectoryCallback

    begun: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not begun:
                recording = run.recorder._recording
                recording.summaries = EveryOtherStep(recording.summaries)
            begun.append((time.perf_counter(), time.thread_time()))

    with tempfile.TemporaryDirectory() as folder:
        run = TrajectoryCallback(Path(folder) / "run.zarr", variables="norms", memory=memory)
        training.run([run, Clock()])
    pairs = list(itertools.pairwise(begun))
    warm = len(pairs) // 10 // 2 * 2
    found = {}
    for at, clock in enumerate(("seconds", "processor")):
        taken = [after[at] - before[at] for before, after in pairs]
        found[f"{clock}, model"] = statistics.median(taken[warm::2])
        found[f"{clock}, without"] = statistics.median(taken[warm + 1 :: 2])
    return found


def measure(
    arguments: argparse.Namespace, preset: str, kind: str, size: str = ""
) -> dict[str, float]:
    """Train in a new process."""
    command = [sys.executable, __file__, "--kind", kind, "--preset", preset, "--size", size]
    command += ["--memory", arguments.memory]
    for name in ("steps", "corpus", "tokenizer"):
        if getattr(arguments, name) is not None and not (
            name != "steps" and preset == "gatsby"  # its text is embedded
        ):
            command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table of rounds and their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--corpus", help="text for Wordybird")
    parser.add_argument("--tokenizer")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--flushes", action="store_true")
    parser.add_argument("--everything", action="store_true")
    kinds = (*KINDS, UNFLUSHED, EVERYTHING, ALTERNATING, MODEL)
    parser.add_argument("--kind", choices=kinds, help=argparse.SUPPRESS)
    parser.add_argument("--size", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps(train_once(arguments)))
        return
    if arguments.flushes:
        compare_flushes(arguments, arguments.preset or ["gatsby", "wordybird-1b"])
        return
    if arguments.everything:
        compare_everything(arguments, arguments.preset or ["gatsby"])
        return
    arguments.preset = arguments.preset or ["gatsby", "wordybird-1"]
    rows: list[list[str]] = []
    results: dict[str, Any] = {"machine": machine()}
    steps = []
    for preset in arguments.preset:
        timed = measure(arguments, preset, ALTERNATING)
        results[f"{preset}, {ALTERNATING}"] = timed
        ratio = timed["rows"] / timed["between"]
        steps.append([preset, *(f"{timed[kind] * 1e3:.1f}" for kind in timed), f"{ratio:.3f}"])
        print(*steps[-1], sep="  ", flush=True)
    models = []
    for size in SIZES if "gatsby" in arguments.preset else ():
        timed = measure(arguments, "gatsby", MODEL, size)
        results[f"{size}, {MODEL}"] = timed
        row = [size, *(f"{value * 1e3:.2f}" for value in timed.values())]
        for clock in ("seconds", "processor"):
            row.append(f"{timed[f'{clock}, model'] / timed[f'{clock}, without']:.3f}")
        models.append(row)
        print(*row, sep="  ", flush=True)
    for preset in arguments.preset:
        rounds = []
        for number in range(arguments.rounds):
            # In alternating order, so that a slower machine affects all of them.
            order = KINDS[number % 3 :] + KINDS[: number % 3]
            timed = {kind: measure(arguments, preset, kind) for kind in order}
            rounds.append(timed)
            rows.append(_row(preset, str(number + 1), timed))
            print(*rows[-1], sep="  ", flush=True)
        if not rounds:
            continue
        middle = {
            kind: {
                key: statistics.median(timed[kind][key] for timed in rounds)
                for key in ("seconds", "processor", "peak")
            }
            for kind in KINDS
        }
        rows.append(_row(preset, "median", middle))
        results[preset] = {"rounds": rounds, "median": middle}
    columns = ["preset", "round", "without", "trajstore", "ratio", "processor", "extra memory"]
    columns += ["list", "ratio", "processor", "extra memory"]
    text = table("Steps of one training", ["preset", "ms with a row", "without", "ratio"], steps)
    if models:
        columns_of_models = ["model", "ms with it", "without", "processor ms with it", "without"]
        columns_of_models += ["ratio", "ratio of processor time"]
        text += table("Steps of one training, tier norms", columns_of_models, models)
    if rows:
        text += table("Training with and without recording", columns, rows)
    save("overhead", text, results)


def compare_flushes(arguments: argparse.Namespace, presets: list[str]) -> None:
    """Print and save a table of recordings with and without flushes."""
    results: dict[str, Any] = {"machine": machine()}
    rows = []
    for preset in presets:
        rounds = []
        for number in range(arguments.rounds):
            order = ("trajstore", UNFLUSHED)[:: -1 if number % 2 else 1]
            timed = {kind: measure(arguments, preset, kind) for kind in order}
            rounds.append(
                [timed[kind][clock] for clock in CLOCKS for kind in ("trajstore", UNFLUSHED)]
            )
            rows.append([preset, str(number + 1), *_compared(*rounds[-1])])
            print(*rows[-1], sep="  ", flush=True)
        middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
        rows.append([preset, "median", *_compared(*middle)])
        results[preset] = {"rounds": rounds, "median": middle}
    columns = ["preset", "round", "flushed", UNFLUSHED, "ratio"]
    columns += ["processor", UNFLUSHED, "ratio"]
    save("flushes", table("Recording with and without flushes", columns, rows), results)


def compare_everything(arguments: argparse.Namespace, presets: list[str]) -> None:
    """Print and save a table of trainings without recording and with the tier everything."""
    results: dict[str, Any] = {"machine": machine()}
    rows = []
    for preset in presets:
        rounds = []
        for number in range(arguments.rounds):
            order = (EVERYTHING, "without")[:: -1 if number % 2 else 1]
            timed = {kind: measure(arguments, preset, kind) for kind in order}
            rounds.append(
                [timed[kind][clock] for clock in CLOCKS for kind in (EVERYTHING, "without")]
            )
            rows.append([preset, str(number + 1), *_compared(*rounds[-1])])
            print(*rows[-1], sep="  ", flush=True)
        middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
        rows.append([preset, "median", *_compared(*middle)])
        results[preset] = {"rounds": rounds, "median": middle}
    columns = ["preset", "round", EVERYTHING, "without", "ratio"]
    columns += ["processor", "without", "ratio"]
    save("everything", table("Training with the tier everything", columns, rows), results)


def _compared(*times: float) -> list[str]:
    cells = []
    for flushed, unflushed in zip(times[::2], times[1::2], strict=True):
        cells += [f"{flushed:.2f} s", f"{unflushed:.2f} s", f"{flushed / unflushed:.3f}"]
    return cells


def _row(preset: str, number: str, timed: dict[str, dict[str, float]]) -> list[str]:
    alone = timed["without"]
    row = [preset, number, f"{alone['seconds']:.1f} s"]
    for kind in KINDS[1:]:
        row += [
            f"{timed[kind]['seconds']:.1f} s",
            f"{timed[kind]['seconds'] / alone['seconds']:.3f}",
            f"{timed[kind]['processor'] / alone['processor']:.3f}",
            f"{(timed[kind]['peak'] - alone['peak']) / 2**20:.0f} MiB",
        ]
    return row


if __name__ == "__main__":
    main()
