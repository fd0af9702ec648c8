"""When a training writes a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from trajstore.errors import RunLocked
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location
from trajstore.threads import submit
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.runs.training_setup import Training
from trajstore.trainers.states.checkpoints import CheckpointFolder
from trajstore.trainers.states.state import State
from trajstore.trainers.states.stored_model import rows_hold_state

_MIN_INTERVAL = 10.0
"""Minimum seconds between checkpoints, and before the first."""

_PAUSE_FACTOR = 100  # pause in durations of the last checkpoint: at most a hundredth of the time


class Checkpointing:
    """Takes the checkpoints of one recorded training.

    By default they are taken by time, so rarely that their cost is negligible. The next one waits
    until the rows of the last one are committed, so there are never more than two. With
    ``recording.checkpoint_every``, they are taken at the end of a block of rows, so that a
    checkpoint and a commit coincide. When the training ends or is stopped, its state is copied
    after that step, before the last rows are committed. So a complete run always has the checkpoint
    of its last step.

    The training only waits for a copy of its state; a thread writes and flushes it. A run whose
    rows or keyframes hold the whole state gets no checkpoint. That of a fork stays until the run
    is complete, because its first keyframe may not be committed yet.

    Parameters
    ----------
    training : Training
    run : Path or RemotePath
        The run, or the first of several.
    sources : mapping of str to str
        Given paths of the text and the tokenizer.
    taken_from : State, optional
        State from which the training starts.
    stop : callable
        Called after every step; returns True to stop.
    fsync : bool
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        training: Training,
        run: Location,
        *,
        sources: Mapping[str, str],
        taken_from: State | None,
        stop: Callable[[], bool],
        fsync: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training = training
        self._run = run
        self._folder = CheckpointFolder(run, fsync=fsync)
        if taken_from is not None:
            self._folder.keep(taken_from)
        self._every = training.config.recording.checkpoint_every
        self._sources = dict(sources)
        self._taken_from = taken_from and replace(taken_from, weights={}, kept={})
        self._last_step = 0 if taken_from is None else taken_from.step
        self._stop = stop
        self._created: str | None = None
        self._in_rows = False
        self._clock = clock
        self._last_time, self._took = clock(), 0.0
        self._thread = ThreadPoolExecutor(1, "trajstore-checkpoint")
        self._adding: Future[None] | None = None

    def after_step(self, recorder: Recorder, scaler: Any) -> bool:
        """Take a checkpoint if one is due.

        Parameters
        ----------
        recorder : Recorder
        scaler : GradScaler or None
            Scaler of the loop.

        Returns
        -------
        bool
            True to stop; the run is then closed as interrupted.
        """
        ends = recorder.step >= self._training.config.training.steps
        stop = self._stop() and not ends
        self._take_if_due(recorder, scaler, last=stop or ends)
        if stop:
            recorder.close(complete=False)
        return stop

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error."""
        if self._adding is not None:
            adding, self._adding = self._adding, None
            adding.result()

    def close(self) -> None:
        """Wait until the last checkpoint is written; its error is not raised."""
        self._thread.shutdown()

    def finish(self, recorder: Recorder) -> None:
        """Remove checkpoints that are no longer needed; the run is closed."""
        if recorder.writer is None:
            return
        try:
            with RunLock.acquire(self._run):
                if self._in_rows:  # the last one replaces the checkpoint of a fork
                    self._folder.clean(None)
                    self._folder.remove()
                self._folder.prune(recorder.committed_rows)
        except RunLocked:
            pass  # the process that resumes the run removes them

    def _take_if_due(self, recorder: Recorder, scaler: Any, *, last: bool) -> None:
        if recorder.writer is None:
            return
        if self._created is None:
            self._created = str(root_attributes(self._run)["created"])
            config, arrays = self._training.config, recorder.writer.layout.arrays
            self._in_rows = config.has_keyframes or rows_hold_state(
                config.model_dump(mode="json"), arrays
            )
            self._folder.clean(self._taken_from)
        if self._in_rows:
            return
        if self._adding is not None and self._adding.done():
            self.wait()
        if not last and not self._is_due(recorder):
            return
        self.wait()
        begun = self._clock()
        state = self._training.state(
            recorder, scaler, run=str(self._created), sources=self._sources
        )
        self._last_step = recorder.step
        self._adding = submit(self._thread, self._add, state, recorder.committed_rows, begun)
        if last:
            self.wait()

    def _add(self, state: State, committed_rows: int, begun: float) -> None:
        self._folder.add(state, committed_rows)
        self._last_time = self._clock()
        self._took = self._last_time - begun

    def _is_due(self, recorder: Recorder) -> bool:
        if self._every is not None:
            return recorder.at_block_end and recorder.step - self._last_step >= self._every
        if self._adding is not None:
            return False
        passed = self._clock() - self._last_time
        due = passed >= max(_MIN_INTERVAL, _PAUSE_FACTOR * self._took)
        return due and not self._folder.has_uncommitted(recorder.committed_rows)
