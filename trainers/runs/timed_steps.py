"""The duration of a training step on this machine, measured with a few steps.

Two short trainings are timed: one without recording, and one that records to a temporary folder.
The cost of the rows is the extra time of the second, until its last row is written.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from trajstore.argument_types import Positive, checks_types
from trajstore.byte_sizes import format_bytes, parse_bytes
from trajstore.errors import ConfigError
from trajstore.trainers.config import RunConfig
from trajstore.trainers.runs.matrix_runs import planned_runs
from trajstore.trainers.runs.recorded_training import recording_options, run_recorded
from trajstore.trainers.runs.training_setup import build_training, find_device, with_products
from trajstore.trainers.texts.corpus import load_corpus

_MIN_STEPS = 2  # the first step is slower than all others and is not timed
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    """Durations of a few training steps.

    Attributes
    ----------
    device : str
    steps, rows : int
        Timed steps without recording, and recorded rows.
    step_seconds : float
        Seconds of a step without recording.
    row_seconds : float
        Extra seconds per row, until it is written.
    row_bytes : float
        Bytes on disk of one of these rows, which are the first of the run.
    """

    device: str
    steps: int
    rows: int
    step_seconds: float
    row_seconds: float
    row_bytes: float

    def facts(self, *, steps: int, rows: int) -> dict[str, Any]:
        """Return the expected duration of a run, and the measurements."""
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
    seconds: Positive = 4.0,
) -> TimedSteps:
    """Train a few steps of a configuration on this machine, and measure their duration.

    The random states of torch, NumPy and Python are seeded, as for any training.

    Parameters
    ----------
    config : RunConfig
    corpus, tokenizer : path-like, optional
        As for `trainers.record`.
    seconds : float
        Time limit of all steps together; at least four are trained. Loading texts and building
        models takes extra time.

    Raises
    ------
    ConfigError
        If the device is not available, or the training does not fit into its memory.
    InvalidArgument, CorpusError
        If the text or the tokenizer cannot be read.

    Examples
    --------
    >>> from trajstore.trainers import preset
    >>> timed = time_steps(preset("gatsby").with_values(["training.batch_size=2"]), seconds=0.1)
    >>> timed.facts(steps=3000, rows=3001)["seconds"] > 3000 * timed.step_seconds
    True
    """
    device = find_device(config.training.device)
    config, _ = with_products(config)
    if device.type == "cpu":
        _check_memory(config)
    text = load_corpus(config, corpus=corpus, tokenizer=tokenizer)
    # Record every row, also if the run records only some: these are few.
    every = ["recording.every=1", "recording.commit_every=0"]
    steps = max(config.training.steps, _MIN_STEPS)
    config = config.with_values([*every, f"training.steps={steps}"])
    try:
        bare = _Clock(device, seconds / 2)
        build_training(config, text).run(on_step_end=bare)
        with tempfile.TemporaryDirectory(prefix="trajstore-") as folder:
            run, *_ = planned_runs(Path(folder) / "timed.zarr", config)
            options = recording_options(config, text)
            training = build_training(config, text)
            recorded = _Clock(device, seconds / 2)
            # The plan has the notes already.
            run_recorded(
                training, run, options, None, after_step=recorded, on_note=lambda note: None
            )
            whole = recorded.elapsed()
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    # Some devices have no special error for too little memory.
    except RuntimeError as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"these steps cannot be trained on {device}: {reason}; use a smaller model or batch, "
            "or another device"
        ) from error
    step_seconds = bare.seconds / bare.steps
    rows = recorded.steps + 2  # with step 0, and the step that started the clock
    return TimedSteps(
        device=str(device),
        steps=bare.steps,
        rows=rows,
        step_seconds=step_seconds,
        # The duration of steps varies; the time after the last step is certainly for writing.
        row_seconds=max(whole - recorded.steps * step_seconds, whole - recorded.seconds) / rows,
        row_bytes=size / rows,
    )


class _Clock:
    """Counts steps from the end of the first one, and compares their time with the limit."""

    def __init__(self, device: torch.device, limit: float) -> None:
        self._device = device
        self._limit = limit
        self._begun = 0.0
        self.steps = -1
        self.seconds = 0.0

    def __call__(self, *_: Any) -> bool:
        self.steps += 1
        now = self.elapsed()
        if not self.steps:
            self._begun = now
            return False
        self.seconds = now
        return now >= self._limit

    def elapsed(self) -> float:
        """Return the seconds since the end of the first step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return perf_counter() - self._begun


def _check_memory(config: RunConfig) -> None:
    """Raise an error if the training does not fit into memory; it would swap or be killed."""
    model, training = config.model, config.training
    matrices = 1 if model.tied else 2
    weights = matrices * model.vocab_size * model.hidden + 12 * model.layers * model.hidden**2
    # A matrix, its gradient and two moments; the logits of a micro-batch, twice.
    needed = 4 * _FLOAT32 * weights + parse_bytes(config.recording.memory)
    needed += 2 * _FLOAT32 * training.batch_size * model.context * model.vocab_size
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ConfigError(
            f"this training needs at least {format_bytes(needed)}, but this machine has "
            f"{format_bytes(available)} of memory; use a smaller model or batch, or --no-timing"
        )
