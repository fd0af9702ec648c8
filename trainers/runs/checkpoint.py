"""The checkpoints next to a run: their folder, and when a training writes one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trajstore.errors import FormatError, RunExists, RunLocked
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.storage.atomic import PARTIAL_SUFFIX, flush, sweep
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import CHECKPOINT, Location, checkpoint_folder
from trajstore.threads import submit
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.runs.run_state import RunState, rows_hold_state, stored_name
from trajstore.trainers.runs.training_setup import Training


class CheckpointFolder:
    """The checkpoints of one run.

    ``NAME.zarr`` and ``NAME`` share a folder; checkpoints of the other run are left unchanged.

    Parameters
    ----------
    run : Path or RemotePath
        The run; the folder is its sibling ``NAME.ckpt``.
    fsync : bool
        Flush each file to the disk.
    """

    def __init__(self, run: Location, *, fsync: bool = True) -> None:
        self.path = checkpoint_folder(run)
        self._run = run
        self._fsync = fsync
        self._rows: dict[int, int] = {}
        self._staged: tuple[Path, Path] | None = None
        self._placed: Path | None = None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in increasing order."""
        entries: Iterable[Location] = self.path.iterdir() if self.path.is_dir() else []
        names = (entry.name for entry in entries)
        return sorted(int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name)))

    def check(self) -> None:
        """Check that a new run does not share the folder with another one.

        Raises
        ------
        RunExists
            If another run has checkpoints in the folder.
        """
        for step in self.steps():
            if (other := self._other_owner(step)) is not None:
                raise self._taken_by(other)

    def newest(self, run: str, committed_rows: int, *, until: int | None = None) -> RunState | None:
        """Return the run's newest checkpoint within the committed rows, and at most `until`.

        Raises
        ------
        FormatError
            If a candidate is damaged.
        """
        for step in reversed(self.steps()):
            if until is not None and step > until:
                continue
            try:
                checkpoint = RunState.load(self._file(step))
            except FileNotFoundError:
                continue  # a recording has replaced it by a newer one
            if self._is_others(checkpoint.name):
                continue
            if checkpoint.run == run and checkpoint.rows <= committed_rows:
                return checkpoint
        return None

    def has_uncommitted(self, committed_rows: int) -> bool:
        """Return True if a checkpoint cannot be used yet, because rows of it are not committed."""
        return any(rows > committed_rows for rows in self._rows.values())

    def keep(self, state: RunState) -> None:
        """Have the checkpoint that a run resumes from survive a loss of power.

        It may have been written without flushes, and the first commit promises its rows again. If
        another process has just removed it, that process holds the lock, and the resume fails.
        """
        file = self._file(state.step)
        if self._fsync and isinstance(file, Path):
            flush(path for path in (file, file.parent, file.parent.parent) if path.exists())

    def clean(self, state: RunState | None) -> None:
        """Remove files that a run does not need when it starts, or resumes from a checkpoint.

        These are partial files of interrupted writes, and all its other checkpoints.
        """
        if self.path.is_dir():
            sweep(self.path)
        self._rows = {} if state is None else {state.step: state.rows}
        for step in self.steps():
            if step not in self._rows and self._other_owner(step) is None:
                self._file(step).unlink()

    def add(self, checkpoint: RunState, committed_rows: int) -> None:
        """Write a checkpoint, and remove those that are no longer needed.

        Checkpoints past the committed rows are kept, and the newest of the others.

        Parameters
        ----------
        checkpoint : RunState
        committed_rows : int
            Committed rows of the run.

        Raises
        ------
        OSError
            If the checkpoint could not be written; the others are kept.
        RunExists
            If another run has a checkpoint of that step in the folder.
        """
        checkpoint.save(self._free(checkpoint.step), fsync=self._fsync)
        self._rows[checkpoint.step] = checkpoint.rows
        self.prune(committed_rows)

    def stage(self, checkpoint: RunState) -> None:
        """Write a checkpoint to a temporary file for `place`; all others are kept until then.

        Raises
        ------
        OSError
            If the checkpoint could not be written.
        RunExists
            If another run has a checkpoint of that step in the folder.
        """
        file = self._free(checkpoint.step)
        assert isinstance(file, Path)  # a fork is always local
        partial = file.with_name(f".{file.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        self._staged = (partial, file)
        checkpoint.save(partial, fsync=self._fsync)

    def place(self) -> None:
        """Rename the staged file to its final name."""
        assert self._staged is not None
        partial, file = self._staged
        partial.replace(file)
        self._staged, self._placed = None, file
        if self._fsync:
            flush([file.parent])

    def discard(self) -> None:
        """Remove a staged file, or one placed before its run, because the run failed."""
        if self._staged is not None:
            self._staged[0].unlink(missing_ok=True)
            self._staged = None
        if self._placed is not None and not self._run.exists():
            self._placed.unlink(missing_ok=True)
            self._placed = None
        if isinstance(self.path, Path) and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def prune(self, committed_rows: int) -> None:
        """Remove checkpoints that are not needed: all usable ones except the newest.

        Parameters
        ----------
        committed_rows : int
            Committed rows of the run.
        """
        usable = [step for step, rows in self._rows.items() if rows <= committed_rows]
        for step in sorted(usable)[:-1]:
            self._file(step).unlink(missing_ok=True)
            del self._rows[step]

    def _free(self, step: int) -> Location:
        """Return the path for the checkpoint of a step, and create its folder."""
        if isinstance(self.path, Path) and not self.path.is_dir():
            self.path.mkdir()
            if self._fsync:
                flush([self.path.parent])
        if (other := self._other_owner(step)) is not None:
            raise self._taken_by(other)
        return self._file(step)

    def _file(self, step: int) -> Location:
        return self.path / f"step-{step:08d}.safetensors"

    def _other_owner(self, step: int) -> str | None:
        """Return the name of another run that owns a checkpoint, or None."""
        path = self._file(step)
        if not path.exists():
            return None
        try:
            name = stored_name(path)
        except FormatError:
            return None  # a damaged checkpoint is of no use to the other run
        return name if self._is_others(name) else None

    def _is_others(self, name: str) -> bool:
        """Return True if a name is that of another existing run; a run may have been renamed."""
        if name in ("", self._run.name):
            return False
        other = self._run.with_name(name)
        return other.exists() and checkpoint_folder(other) == self.path

    def _taken_by(self, other: str) -> RunExists:
        return RunExists(
            f"{self.path} has checkpoints of {other}, and {self._run.name} would use the same "
            "folder; choose another path for the run"
        )


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
    taken_from : RunState, optional
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
        taken_from: RunState | None,
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
        self._taken_from = taken_from
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
                    self._folder.discard()
                self._folder.prune(recorder.committed_rows)
        except RunLocked:
            pass  # the process that resumes the run removes them

    def _take_if_due(self, recorder: Recorder, scaler: Any, *, last: bool) -> None:
        if recorder.writer is None:
            return
        if self._created is None:
            self._created = str(root_attributes(self._run)["created"])
            config, arrays = self._training.config, recorder.writer.layout.arrays
            self._in_rows = config.has_keyframes or rows_hold_state(config, arrays)
            self._folder.clean(self._taken_from)
        if self._in_rows:
            return
        if self._adding is not None and self._adding.done():
            self.wait()
        if not last and not self._is_due(recorder):
            return
        self.wait()
        begun = self._clock()
        state = self._take(recorder, scaler)
        self._last_step = recorder.step
        self._adding = submit(self._thread, self._add, state, recorder.committed_rows, begun)
        if last:
            self.wait()

    def _add(self, state: RunState, committed_rows: int, begun: float) -> None:
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

    def _take(self, recorder: Recorder, scaler: Any) -> RunState:
        return RunState.take(
            self._training,
            scaler,
            recorder,
            run=str(self._created),
            name=self._run.name,
            sources=self._sources,
        )
