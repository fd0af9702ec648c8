"""When a recorded training is checkpointed, and how it is put back and stopped."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trajstore.errors import RunLocked
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location
from trajstore.threads import submit
from trajstore.trainers.recording.hf_callback import TrajectoryCallback
from trajstore.trainers.recording.step_hooks import Recorder
from trajstore.trainers.runs.checkpoint import Checkpoint, CheckpointFolder
from trajstore.trainers.runs.training_setup import Training
from trajstore.trainers.runs.training_state import restore_random, restore_state, take_state

__all__ = ["Checkpointing", "TrainerCheckpoints"]

_APART = 10.0
"""Seconds from one checkpoint to the next at least, and to the first."""

_PAUSE = 100  # times what the last one took: so they take a hundredth of the time at most


class Checkpointing:
    """Takes the checkpoints of one recorded training.

    Where nothing else is asked for, they are taken as time goes by, so far apart that what they
    cost is lost in the noise; and none while the rows of the last one are not committed, so that
    there are never more than two. Those that are asked for every so many steps are taken where a
    block of rows ends, so that a checkpoint and a commit coincide. When the training ends, or is
    asked to stop, its state is taken after that step, before the last rows are committed: a
    complete run always has the checkpoint of its last step.

    The training only waits for a copy of its state; that is written and flushed in a thread.

    Parameters
    ----------
    training : Training
    run : Path or RemotePath
    every : int, optional
        Steps between two checkpoints at least; without it, they are taken as time goes by.
    sources : mapping of str to str
        Paths of the text and the tokenizer, where they were given.
    taken_from : Checkpoint, optional
        That the training goes on from.
    stop : callable
        Asked after every step whether to stop.
    fsync : bool
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        training: Training,
        run: Location,
        *,
        every: int | None,
        sources: Mapping[str, str],
        taken_from: Checkpoint | None,
        stop: Callable[[], bool],
        fsync: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training = training
        self._run = run
        self._folder = CheckpointFolder(run, fsync=fsync)
        self._every = every
        self._sources = dict(sources)
        self._taken_from = taken_from
        self._last_step = 0 if taken_from is None else taken_from.step
        self._stop = stop
        self._created: str | None = None
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
            Of the loop.

        Returns
        -------
        bool
            Whether to stop; the run is closed as interrupted then.
        """
        ends = recorder.step >= self._training.config.training.steps
        stop = self._stop() and not ends
        self._take_if_due(recorder, scaler, last=stop or ends)
        if stop:
            recorder.close(complete=False)
        return stop

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()

    def finish(self, recorder: Recorder) -> None:
        """Remove the checkpoints that are of no more use; the run is closed."""
        if recorder.writer is None:
            return
        try:
            with RunLock.acquire(self._run):
                self._folder.prune(recorder.writer.committed_rows)
        except RunLocked:
            pass  # whoever goes on with the run already does that itself

    def _take_if_due(self, recorder: Recorder, scaler: Any, *, last: bool) -> None:
        writer = recorder.writer
        if writer is None:
            return
        if self._created is None:
            self._created = str(open_group(self._run).attrs["created"])
            self._folder.begin(self._taken_from)
        if self._adding is not None and self._adding.done():
            self._settle()
        if not last and not self._is_due(recorder, writer.committed_rows):
            return
        self._settle()
        begun = self._clock()
        taken = self._take(recorder, scaler)
        self._last_step = recorder.step
        self._adding = submit(self._thread, self._add, taken, writer.committed_rows, begun)
        if last:
            self._settle()

    def _add(self, taken: Checkpoint, committed_rows: int, begun: float) -> None:
        self._folder.add(taken, committed_rows)
        self._last_time = self._clock()
        self._took = self._last_time - begun

    def _settle(self) -> None:
        """Wait for the one that is being written; raise what went wrong."""
        if self._adding is not None:
            adding, self._adding = self._adding, None
            adding.result()

    def _is_due(self, recorder: Recorder, committed_rows: int) -> bool:
        if self._every is not None:
            return recorder.at_block_end and recorder.step - self._last_step >= self._every
        if self._adding is not None:
            return False
        passed = self._clock() - self._last_time
        return passed >= max(_APART, _PAUSE * self._took) and not self._folder.waits(committed_rows)

    def _take(self, recorder: Recorder, scaler: Any) -> Checkpoint:
        state, tensors = take_state(self._training, scaler)
        return Checkpoint(
            run=str(self._created),
            name=self._run.name,
            step=recorder.step,
            rows=recorder.rows,
            config=self._training.config.model_dump(mode="json"),
            sources=self._sources,
            state=copy.deepcopy(state),  # written while the training goes on
            tensors=tensors,
        )


class TrainerCheckpoints(TrainerCallback):
    """Puts a Trainer back to a checkpoint, and has its own taken.

    To be given before the callback that records: what is put back must be there when that one
    attaches.

    Parameters
    ----------
    training : Training
    after_step : callable
        As `Checkpointing.after_step`.
    trajectory : TrajectoryCallback
    taken_from : Checkpoint, optional
        That the training goes on from.
    """

    def __init__(
        self,
        training: Training,
        after_step: Callable[[Recorder, Any], bool],
        trajectory: TrajectoryCallback,
        taken_from: Checkpoint | None,
    ) -> None:
        self._training = training
        self._after_step = after_step
        self._trajectory = trajectory
        self._taken_from = taken_from
        self._random_from = taken_from

    def on_train_begin(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
        """Put back everything but the random states, after accelerate has moved it about."""
        if self._taken_from is not None:
            taken = self._taken_from
            restore_state(self._training, taken, getattr(optimizer, "scaler", None))

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        train_dataloader: Any,
        **kwargs: Any,
    ) -> None:
        """Put back the random states, where the checkpoint fell on the end of an epoch."""
        steps = -(-len(train_dataloader) // args.gradient_accumulation_steps)
        if state.global_step % steps == 0:
            self._restore_random()

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        """Put back the random states, where it fell within one.

        The Trainer has drawn the epoch's order and the first batches by now, as it had then.
        """
        self._restore_random()

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        """Have a checkpoint taken if one is due, and stop if that is asked for."""
        recorder = self._trajectory.recorder
        assert recorder is not None
        if self._after_step(recorder, getattr(optimizer, "scaler", None)):
            control.should_training_stop = True

    def _restore_random(self) -> None:
        if self._random_from is not None:
            restore_random(self._training, self._random_from)
            self._random_from = None
