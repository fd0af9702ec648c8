"""Progress of a recording."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from trajstore.arguments import format_bytes, format_duration
from trajstore.cli.output import Bar, err, in_options

if TYPE_CHECKING:
    from typing import Any

    from trajstore.store.writing.writer import RunWriter
    from trajstore.trainers.recording.device_to_host import ComparedRun
    from trajstore.trainers.recording.step_hooks import Recorder
    from trajstore.trainers.texts.corpus import Corpus


_SOON = 3.0  # seconds from the first line to the second
_WIDE = 120  # columns of a terminal that fit all columns and a bar


class _Rate(ProgressColumn):
    """Steps per second."""

    def render(self, task: Any) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:.1f} steps/s")


class RecordingProgress(Bar):
    """Progress of a recording: a bar on a terminal, occasional lines elsewhere.

    Parameters
    ----------
    steps : int
        Optimizer steps of the whole run.
    """

    def __init__(self, steps: int) -> None:
        # Seconds between reads of the loss, which may wait for the device.
        self._interval = 0.2 if err.is_terminal else 30.0
        self._wide = err.width >= _WIDE
        super().__init__(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),  # the rest of the width
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            speed_estimate_period=10,
            expand=True,
        )
        self._began: float | None = None
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._steps = steps
        self.show(0, steps)
        self._next = 0.0  # the first step is shown at once
        self._waited = 0.0

    def show_corpus(self, corpus: Corpus) -> None:
        """Print which text is trained on, and start to measure the duration."""
        self._began = time.monotonic()
        dead = int((corpus.counts() == 0).sum())
        err.print(
            f"Corpus: {corpus.name}, {corpus.size:,} bytes, {corpus.ids.size:,} tokens, "
            f"{dead} of {corpus.vocab_size} ids dead (sha256 {corpus.sha256[:12]}…)"
        )

    def show_products(self, sentence: str) -> None:
        """Print how products of matrices are computed, and why."""
        err.print(f"{sentence}.")

    def show_note(self, note: str) -> None:
        """Print a note about the run."""
        err.print(f"Note: {in_options(note)}.")

    def show_retrain(self, step: int, last: int) -> None:
        """Show how many of the recorded steps have been trained again."""
        if err.is_terminal:
            state = f"comparing step {step} of {last} with the recorded rows"
            self._bar.update(self._task, completed=step, state=state)
            return
        now = time.monotonic()
        if now >= self._next or step == last:
            self._next = now + self._interval
            err.print(f"comparing step {step} of {last} with the recorded rows")

    def show_step(self, recorder: Recorder) -> None:
        """Show the step, its loss, the recorded bytes and the rows in memory."""
        now = time.monotonic()
        self._last = now, recorder.step
        self._first = self._first or self._last
        if now < self._next and recorder.step != self._steps:
            return
        # The second line comes soon, because only it can estimate the time.
        self._next = now + (self._interval if self._first != self._last else _SOON)
        state = f"loss {recorder.loss.item():.3f}"
        if self.rate is not None and recorder.step < self._steps and not err.is_terminal:
            left = (self._steps - recorder.step) / self.rate
            state = f"{format_duration(left)} left, {state}"
        writer = recorder.writer
        if writer is not None:
            state += self._written(writer)
        if err.is_terminal:
            self._bar.update(self._task, completed=recorder.step, state=state)
        else:
            err.print(f"step {recorder.step}/{self._steps}: {state}")

    @property
    def seconds(self) -> float | None:
        """Seconds of the recording so far; None before the first step."""
        if self._began is None or self._last is None:
            return None
        return self._last[0] - self._began

    @property
    def rate(self) -> float | None:
        """Steps per second since the first step; None before the second."""
        if self._first is None or self._last is None or self._first == self._last:
            return None
        return (self._last[1] - self._first[1]) / max(self._last[0] - self._first[0], 1e-9)

    def _written(self, writer: RunWriter | ComparedRun) -> str:
        """Return the recorded and written bytes; a narrow terminal gets the most important."""
        waiting = writer.seconds_waited > self._waited
        self._waited = writer.seconds_waited
        if err.is_terminal and not self._wide:
            shown = ", waiting for the disk" if waiting else ""
            return shown or f", {format_bytes(writer.bytes_recorded)}"
        state = f", {format_bytes(writer.bytes_recorded)} recorded"
        if writer.bytes_written:
            state += f", {format_bytes(writer.bytes_written)} on disk"
        state += f", {writer.rows - writer.committed_rows} rows in memory"
        if waiting:
            state += f", waiting for the disk ({format_duration(writer.seconds_waited)} so far)"
        return state
