"""How long a step of a training takes on this machine, found out by a few real ones.

Two short trainings: one as it is, and one that is recorded, to a temporary folder. What the second
takes beyond the first, until its last row is written, is what its rows cost.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl

from trajstore.argument_types import checks_types
from trajstore.byte_sizes import format_bytes, parse_bytes
from trajstore.errors import ConfigError, InvalidArgument
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.step_hooks import Recorder
from trajstore.trainers.runs.recorded_training import recording_options, run_recorded
from trajstore.trainers.runs.training_setup import build_training, find_device
from trajstore.trainers.texts.corpus import Corpus, load_corpus

__all__ = ["TimedSteps", "time_steps"]

_LEAST = 2  # steps that are trained, of which the first, slower than all others, is not timed
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    """What a few steps of a training took.

    Attributes
    ----------
    device : str
    steps, rows : int
        That were trained without being recorded, and recorded.
    step_seconds : float
        Of a step that is not recorded.
    row_seconds : float
        What a row adds, until it is written.
    row_bytes : float
        On disk of one of these rows, which are the first of the run.
    """

    device: str
    steps: int
    rows: int
    step_seconds: float
    row_seconds: float
    row_bytes: float

    def facts(self, *, steps: int, rows: int) -> dict[str, Any]:
        """What a run of so many steps and rows is expected to take, and what that stands on."""
        return {
            "seconds": steps * self.step_seconds + rows * self.row_seconds,
            "seconds_recording": rows * self.row_seconds,
            "step_seconds": self.step_seconds,
            "row_seconds": self.row_seconds,
            "row_bytes": self.row_bytes,
            "timed_steps": self.steps,
            "timed_rows": self.rows,
            "device": self.device,
        }


@checks_types
def time_steps(
    config: RunConfig,
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    seconds: float = 4.0,
) -> TimedSteps:
    """Train a few steps of a configuration on this machine, and tell what they take.

    The random states of torch, NumPy and Python are seeded for it, as for any training.

    Parameters
    ----------
    config : RunConfig
    corpus, tokenizer : path-like, optional
        As for `trainers.record`.
    seconds : float
        For all steps together; at least four are trained, however long they take. Texts are
        loaded, and models made, besides.

    Raises
    ------
    ConfigError
        If the device is not there, or the training does not fit its memory.
    InvalidArgument, CorpusError
        If the text or the tokenizer cannot be read.

    Examples
    --------
    >>> from trajstore.trainers import preset
    >>> timed = time_steps(preset("gatsby").with_values(["training.batch_size=2"]), seconds=0.1)
    >>> timed.facts(steps=3000, rows=3001)["seconds"] > 3000 * timed.step_seconds
    True
    """
    if not seconds > 0:
        raise InvalidArgument(f"seconds: got {seconds}, expected more than 0")
    device = find_device(config.training.device)
    if device.type == "cpu":
        _check_memory(config)
    text = load_corpus(config, corpus=corpus, tokenizer=tokenizer)
    # Every row, however seldom the run has one: there are few enough.
    every = ["recording.every=1", "recording.commit_every=0"]
    config = config.with_values([*every, f"training.steps={max(config.training.steps, _LEAST)}"])
    try:
        bare = _train(config, text, device, seconds / 2)
        with tempfile.TemporaryDirectory(prefix="trajstore-") as folder:
            run = Path(folder) / "timed.zarr"
            recorded = _record(config, text, device, seconds / 2, run)
            size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    # Not all devices have an error of their own for too little memory.
    except RuntimeError as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(f"these steps cannot be trained on {device}: {reason}") from error
    step_seconds = bare.seconds / bare.steps
    rows = recorded.steps + 2  # step 0, and the one that the clock began with
    return TimedSteps(
        device=str(device),
        steps=bare.steps,
        rows=rows,
        step_seconds=step_seconds,
        # Steps take one time and another; what is written after the last is no step's for sure.
        row_seconds=max(recorded.seconds - recorded.steps * step_seconds, recorded.after) / rows,
        row_bytes=size / rows,
    )


class _Clock:
    """Counts steps from the end of the first one, and says when it is time to stop."""

    def __init__(self, device: torch.device, limit: float) -> None:
        self._device = device
        self._limit = limit
        self._begun: float | None = None
        self.steps = 0
        self.seconds = 0.0
        self.after = 0.0

    def __call__(self, *_: Any) -> bool:
        if self._begun is None:
            self._begun = self._now()
            return False
        self.steps += 1
        self.seconds = self._now() - self._begun
        return self.seconds >= self._limit

    def stop(self) -> None:
        """Take the time until now; `after` is that after the last step."""
        if self._begun is not None:
            before, self.seconds = self.seconds, self._now() - self._begun
            self.after = self.seconds - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return perf_counter()


class _StopWhen(TrainerCallback):
    """Ends a Trainer's training when it is time."""

    def __init__(self, is_time: Callable[[], bool]) -> None:
        self._is_time = is_time

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_time():
            control.should_training_stop = True


def _train(config: RunConfig, text: Corpus, device: torch.device, limit: float) -> _Clock:
    clock = _Clock(device, limit)
    build_training(config, text).run([_StopWhen(clock)], on_step_end=clock)
    return clock


def _record(
    config: RunConfig, text: Corpus, device: torch.device, limit: float, run: Path
) -> _Clock:
    clock = _Clock(device, limit)
    options = recording_options(config, text)

    def after_step(recorder: Recorder, scaler: Any) -> bool:
        return clock()

    def ignore_note(note: str) -> None:
        """The advice is part of the plan."""

    training = build_training(config, text)
    run_recorded(training, run, options, None, after_step=after_step, on_note=ignore_note)
    clock.stop()
    return clock


def _check_memory(config: RunConfig) -> None:
    """Refuse what this machine cannot hold: it would be swapping, or be killed."""
    model, training = config.model, config.training
    weights = model.vocab_size * model.hidden + 12 * model.layers * model.hidden**2
    # A matrix, its gradient and two moments; the logits of a micro-batch, twice.
    needed = 4 * _FLOAT32 * weights + parse_bytes(config.recording.memory)
    needed += 2 * _FLOAT32 * training.batch_size * model.context * model.vocab_size
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ConfigError(
            f"this training takes {format_bytes(needed)} and more, and this machine has "
            f"{format_bytes(there)} of memory"
        )
