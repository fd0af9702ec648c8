"""The recorder, and what attaches it: `attach` and `capture` to a loop, `open_recorder` to any."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, Self, TypeVar

import numpy.typing as npt
import torch

from trajstore.errors import InvalidArgument, RecordingError, RunNotFound
from trajstore.optimizer_advice import require_sound
from trajstore.schema import EVERYTHING, MODEL
from trajstore.store.storage.remote_path import Location, RunPath
from trajstore.store.writing.create import staged_file
from trajstore.store.writing.resumed_run import in_all_processes
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.device_summaries import ModelParameters
from trajstore.trainers.recording.digests import StepDigests
from trajstore.trainers.recording.existing_run import ComparedRun, Comparison, ExistingRun
from trajstore.trainers.recording.listeners import Listeners
from trajstore.trainers.recording.model_state import ModelState
from trajstore.trainers.recording.notes import RunNotes, optimizer_advice, report_notes
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop, takes_options
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    RecordedParameter,
    find_parameters,
    unwrap,
)
from trajstore.trainers.recording.planned_run import PlannedRun, Recording, plan_runs, run_paths
from trajstore.trainers.recording.sharding import find_shares, is_distributed
from trajstore.trainers.recording.step_inputs import StepInputs

P = ParamSpec("P")
R = TypeVar("R")

_NO_LABELS = (
    "the tokens have no labels dead and live; pass token_count= or is_dead=, or label them later "
    "with trajstore annotate"
)


class Recorder:
    """Records parameters of a model while an optimizer trains it.

    `attach`, `capture` or the callback of a Trainer creates it.

    Parameters
    ----------
    recording : Recording
    parameters : sequence of ParameterRows
        One per recorded parameter; empty in a process that does not record. In a distributed
        training those have examples, too.
    multiplied : RecordedParameter
        Matrix whose module gets the hidden states.
    on_step : callable, optional
        Called with the recorder after every step.
    must_write : path-like, optional
        Path of the run, if a recording without a step is to be noted.

    Attributes
    ----------
    step : int
        Optimizer steps taken, with those before the recording.
    loss : tensor, ()
        Loss of the last step; NaN if there is none.
    has_failed : bool
        True if an error in a hook has ended the recording.
    """

    def __init__(
        self,
        recording: Recording,
        parameters: Sequence[ParameterRows],
        multiplied: RecordedParameter,
        *,
        on_step: Callable[[Recorder], None] | None = None,
        must_write: RunPath | None = None,
    ) -> None:
        self._recording = recording
        self._rows = tuple(parameters)
        self._notes = recording.notes
        self._must_write = must_write
        self.has_failed = False
        self._hooks = Listeners(
            recording,
            self._rows,
            multiplied,
            on_error=self._fail,
            on_step=None if on_step is None else functools.partial(on_step, self),
        )
        atexit.register(self.close, complete=False)

    @property
    def step(self) -> int:
        """Optimizer steps taken, with those before the recording."""
        return self._hooks.step

    @property
    def loss(self) -> torch.Tensor:
        """Loss of the last step; NaN if there is none."""
        return self._hooks.loss

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close as complete, or as interrupted when an exception leaves the ``with``."""
        try:
            self.close(complete=error is None)
        except RecordingError as failure:
            if error is None:
                raise
            # The failure often has the same cause as the error.
            error.add_note(f"The recording ended with: {failure}")

    @property
    def writer(self) -> RunWriter | ComparedRun | None:
        """Writer of the first parameter's run; None until the first step is complete."""
        return self._rows[0].writer if self._rows else None

    @property
    def rows(self) -> int:
        """Rows of the first parameter's run, including those that are not committed yet."""
        return self._rows[0].rows if self._rows else 0

    @property
    def committed_rows(self) -> int:
        """Rows that are committed in every run."""
        return min((rows for _, rows in self.recorded_rows()), default=0)

    @property
    def is_recording(self) -> bool:
        """False after the recording was closed, or has ended because of an error."""
        return self._hooks.are_registered

    def recorded_rows(self) -> list[tuple[Location, int]]:
        """Return the path of each parameter's run and its number of rows."""
        writers = [rows.writer for rows in self._rows]
        return [(writer.path, writer.committed_rows) for writer in writers if writer is not None]

    def mention(self, sentence: str) -> None:
        """Add a note about the recording."""
        self._notes.mention(sentence)

    def notes(self) -> list[str]:
        """Return the notes about missing or doubtful values of the steps so far."""
        return [str(entry["note"]) for entry in self._notes.entries]

    @property
    def at_block_end(self) -> bool:
        """True if the last step has a row, and that row is the last one of a block."""
        if self.writer is None or self._rows[0].last_step != self.step:
            return False
        return self.rows % self.writer.layout.block_rows == 0

    def observe(
        self,
        *,
        loss: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        batch: npt.ArrayLike | torch.Tensor | None = None,
        example_loss: npt.ArrayLike | torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Pass values that the hooks cannot get, once per micro-batch, before the optimizer's step.

        After an error has ended the recording, which is logged, a call has no effect.

        Parameters
        ----------
        loss : tensor, ()
            Loss of each micro-batch, not divided by their number, in place of what the backward
            passes differentiate. The mean over a step's micro-batches is recorded.
        logits : tensor, (batch, position, token) or (batch, token)
            Logits, if neither the model nor its unembedding returns them.
        hidden : tensor, (batch, position, hidden)
            Hidden states that the model multiplies by the recorded matrix, if no module of it has
            the matrix and `hidden_from` names none.
        batch : array_like of int, (example,)
            Indices of the examples in the data set. Alternatively, give the model's inputs a tensor
            ``example_index``: it is recorded and removed before the model runs.
        example_loss : array_like of float, (example,)
            Loss of each example, unless the model is a causal language model of transformers with
            ``labels``.
        inputs : mapping, optional
            All tensors that determine the micro-batch, by name (those in a list or dict by
            ``NAME.KEY``), in place of those that the model gets: for example ids and targets, if
            the loop computes the loss. They are recorded with the tier ``keyframes``.

        Raises
        ------
        InvalidArgument
            If a value is not a tensor of floats, or `inputs` is no dict; if `hidden` has another
            shape; or if `batch` or `example_loss` does not have one number for each example, which
            is stored exactly.
        RecordingError
            If the recording was closed.
        """
        self._check_open("observe")
        if not self.is_recording:
            return
        for name, value in (("loss", loss), ("logits", logits)):
            if value is not None and not (
                isinstance(value, torch.Tensor) and value.is_floating_point()
            ):
                raise InvalidArgument(
                    f"{name}: got {reprlib.repr(value)}, expected a tensor of floats"
                )
        if loss is not None and loss.numel() != 1:
            raise InvalidArgument(f"loss: got shape {tuple(loss.shape)}, expected one value")
        self._hooks.observe(
            loss=loss,
            logits=logits,
            hidden=hidden,
            batch=batch,
            example_loss=example_loss,
            inputs=inputs,
        )

    def commit(self) -> None:
        """Commit all rows so far, and return when they are on the disk, flushed if `fsync` is set.

        `checkpoint` calls it. If you save a checkpoint in another way, call it before, in every
        process of a sharded training. Then the run has all rows up to the checkpoint, whatever ends
        the process. After an error has ended the recording, which is logged, it has no effect.

        Raises
        ------
        OSError, RecordingError
            If the disk fails or is full; or if the recording was closed.
        """
        self._check_open("commit")
        self._hooks.call(self._commit)

    def checkpoint(self, path: str | os.PathLike[str], state: Any) -> None:
        """Commit all rows, then save a checkpoint by `torch.save`, in place of the old one.

        A kill or a loss of power leaves the old file or the new one, whole, and the run has all
        rows up to it. After an error has ended the recording, the file is still saved.

        Parameters
        ----------
        path : path-like
            Local file. Missing folders are created.
        state : object
            What `torch.save` takes; None only commits. In a distributed training, call this method
            in every process after the same step, each with its own file, or None.

        Raises
        ------
        OSError, RecordingError
            If the disk fails or is full; or if the recording was closed.
        RunLocked
            If another process writes the file.
        RunExists
            If `path` is a folder.
        """
        self._check_open("checkpoint")
        self._hooks.call(self._commit)
        if state is not None:
            with staged_file(path, overwrite=True) as file:
                torch.save(state, file)

    def _check_open(self, call: str) -> None:
        if not self.is_recording and not self.has_failed:
            raise RecordingError(
                f"{call}() was called after the recording was closed; call it inside the with "
                "block, or before close()"
            )

    def _commit(self) -> None:
        for rows in self._rows:
            rows.commit()

    def close(self, *, complete: bool = True) -> None:
        """End the recording, and commit all complete rows; further calls have no effect.

        Parameters
        ----------
        complete : bool
            Mark the run ``complete``, or ``interrupted``.

        Raises
        ------
        OSError, RecordingError
            If the disk fails or is full; with `strict`, also if a complete recording has no step.
            By default, that is a note.
        """
        if not self._hooks.are_registered:
            return
        atexit.unregister(self.close)
        self._hooks.remove()
        try:
            with contextlib.ExitStack() as closing:  # closes each, also if another fails
                closing.callback(self._hooks.release)
                for rows in reversed(self._rows):
                    closing.callback(rows.close, complete=complete)
                closing.callback(self._hooks.check_end)
        except Exception as error:
            if self.has_failed or self._ends_training(error):
                raise
            self._mention_end(error)
        if complete and self._must_write is not None and self._rows and self.writer is None:
            optimizer = self._recording.optimizer
            self._notes.add(
                f"no step of {optimizer.named(optimizer.waiting)} was taken, so "
                f"{self._must_write} was not written; call the step() of each given optimizer "
                "while the recorder is open, or give those that step"
            )

    def _fail(self, error: BaseException) -> None:
        """End the recording after an error in a hook; raise it if the training has to know it.

        See `RunNotes.ends_training`.
        """
        ends_training = self._ends_training(error)
        self._mention_end(error)
        try:
            self.close(complete=False)
        except Exception as failure:
            error.add_note(f"The recording ended with: {failure}")
        if ends_training:
            raise error

    def _ends_training(self, error: BaseException) -> bool:
        has_begun = all(rows.has_begun for rows in self._rows)
        return self._notes.ends_training(error, has_begun=has_begun)

    def _mention_end(self, error: BaseException) -> None:
        self.has_failed = True
        reason = str(error) or type(error).__name__
        rest = "" if isinstance(error, RunNotFound) else "; the run keeps its complete rows"
        self._notes.mention(f"the recording ended in step {self._hooks.step + 1}: {reason}{rest}")


def open_recorder(
    model: torch.nn.Module,
    optimizer: Any,
    path: RunPath,
    options: RecordingOptions,
    loop: TrainingLoop,
    *,
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    comparison: Comparison | None = None,
    own_loop: bool = False,
) -> Recorder:
    """Return a recorder that records a training run until it is closed.

    In a distributed training, only the first process records, unless the recorded parameter is
    sharded. The other processes only count steps.

    Parameters
    ----------
    model : Module
    optimizer : Optimizer or JoinedOptimizer
        May be wrapped by accelerate.
    path : path-like
        Path of the run, by custom ``NAME.zarr``.
    options : RecordingOptions
    loop : TrainingLoop
    on_step : callable, optional
        Called with the recorder after every optimizer step.
    on_note : callable, optional
        Called with each sentence of advice about the numerics of a new run; default: they are
        logged.
    comparison : Comparison, optional
        Compare each row with the existing run instead of storing it.
    own_loop : bool
        The loop has no callback that knows its tokens and its end: note that labels are missing,
        and that it ends without a step.

    Raises
    ------
    ConfigError
        If there is such advice, and `strict_numerics` is set.
    RecordingError
        If a parameter cannot be recorded, or another process with a part of it fails.
    RunExists
        If the path exists, and neither resume nor overwrite is set.
    NothingToResume
        If the existing run does not fit the training, or lacks rows up to its step (`attach`).
    """
    joined = optimizer if isinstance(optimizer, JoinedOptimizer) else JoinedOptimizer(optimizer)
    wanted = options
    if comparison is None:
        options = wanted.resumed_or_new(run_paths(path, wanted))
    notes = RunNotes(functools.partial(_report, on_note), strict=options.strict)
    announce = (lambda sentence: None) if options.resume else notes.mention
    if options is not wanted and loop.first_step:
        announce(f"there were no rows to resume: the run begins after step {loop.first_step}")
    parameters = find_parameters(model, joined, options.parameter, announce)
    advice = optimizer_advice(parameters)
    if options.strict_numerics:
        require_sound(advice)
    recording = Recording(
        model=unwrap(model),
        optimizer=joined,
        options=options,
        loop=loop,
        notes=notes,
        on_note=functools.cache(functools.partial(_report, on_note)),  # of several runs, once
    )
    planned = []
    shares = find_shares(model, parameters, options)
    try:
        with in_all_processes(shares[0]):
            if _is_first_process() or shares[0] is not None:
                device = parameters[0].tensor.device
                if of_model := set(MODEL).intersection(options.resolved):
                    recording.summaries = ModelParameters(model, device, of_model)
                if of_state := [name for name in EVERYTHING if name in options.resolved]:
                    if len(parameters) > 1:
                        raise RecordingError(
                            f"{of_state[0]} is recorded with one matrix, got {len(parameters)}; "
                            "name one parameter, the others are in params"
                        )
                    has_state = not options.has_keyframes or comparison is None
                    of_keyframes = options.of_keyframes.resolved if options.has_keyframes else ()
                    recording.state = ModelState(
                        model,
                        joined,
                        parameters[0],
                        (*options.resolved, *(of_keyframes if has_state else ())),
                        whole_state=options.whole_state and has_state,
                    )
                if "inputs" in options.resolved:
                    recording.inputs = StepInputs(notes.mention)
                if not {"params_digest", "step_digest"}.isdisjoint(options.resolved):
                    recording.digests = StepDigests(unwrap(model))
                planned = plan_runs(path, parameters, recording, shares)
            rows = []
            for run in planned:
                existing = ExistingRun.find(run, comparison) if options.resume else None
                keyframes = None
                if options.has_keyframes and comparison is None:
                    keyframes = _keyframes(run.of_keyframes())
                rows.append(ParameterRows(run, existing, keyframes))
    except BaseException:
        for share in filter(None, shares):
            share.close()
        raise
    multiplied = next((p for p in parameters if p.head is not None), parameters[0])
    recorder = Recorder(
        recording, rows, multiplied, on_step=on_step, must_write=path if own_loop else None
    )
    try:
        # All checks have passed; only now rows may be dropped.
        for parameter in rows:
            parameter.resume()
        if planned and not options.resume and _is_first_process():  # else they were reported before
            report_notes((entry.sentence for entry in advice), on_note)
            report_notes((note for run in planned for note in run.notes), on_note)
            if own_loop and options.is_dead is None and options.token_count is None:
                notes.mention(_NO_LABELS)
    except BaseException:
        recorder.close(complete=False)
        raise
    return recorder


def _keyframes(planned: PlannedRun) -> ParameterRows:
    """Return the rows of keyframes, which resume those that exist; a fork begins without.

    The last step may have no keyframe, so the rows of the matrix decide about a gap.
    """
    options = replace(planned.recording.options.resumed_or_new([planned.path]), allow_gap=True)
    planned = replace(planned, recording=replace(planned.recording, options=options))
    return ParameterRows(planned, ExistingRun.find(planned) if options.resume else None)


def _report(on_note: Callable[[str], None] | None, sentence: str) -> None:
    if _is_first_process():
        report_notes([sentence], on_note)


def _is_first_process() -> bool:
    return not is_distributed() or torch.distributed.get_rank() == 0


@takes_options
def attach(
    model: torch.nn.Module,
    optimizer: Any,
    path: RunPath,
    *,
    ends_step: Any = None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    first_step: int = 0,
    on_step: Callable[[Recorder], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    **options: Any,
) -> Recorder:
    """Record every optimizer step of a PyTorch loop, until the returned recorder is closed.

    A process that ends before leaves the run ``interrupted``, with all complete rows; after
    ``kill -9``, with those that were committed. `capture` also closes the run after an exception.

    Parameters
    ----------
    model : Module
        May be wrapped by `torch.compile` or `DistributedDataParallel`, or sharded by
        `torch.distributed.fsdp.fully_shard`; then each process records its own tokens.
    optimizer : Optimizer, or sequence of Optimizer
        Any optimizer. What it keeps in the shape of a parameter is recorded, by its own names. Of
        several, each trains parameters of its own, and a step is complete when each has stepped
        once, in any order. The run is created when each has stepped.
    path : path-like
        Path of the run, by custom ``NAME.zarr``.
    ends_step : Optimizer, optional
        One of several optimizers: its step ends a recorded step, in which the others may step
        several times or not at all. ``skipped`` is 1 if the matrix's optimizer does not step, and
        NaN with ``lr`` if it steps several times.
    scaler : GradScaler, optional
        Scaler of the loss, of all optimizers. Gradients are recorded unscaled; a skipped step of
        the matrix's optimizer is marked in ``skipped``.
    max_grad_norm : float, optional
        Norm to which the loop clips all gradients; 0 is no clipping. Default: not known. The
        recorded ``clip_coef`` is what the loop applied; a note tells if it does not follow from
        this norm.
    first_step : int
        Optimizer steps that the loop has taken before.
    on_step : callable, optional
        Called with the recorder after every optimizer step.
    on_note : callable, optional
        Called with each note: advice about the optimizer's types, such as a second moment that
        cannot decay, and a missing loss. Default: logged as warnings of
        ``trajstore.trainers.recording.notes``.
    **options
        Options of `RecordingOptions`.

    Returns
    -------
    Recorder
        ``close()`` ends the recording, ``commit()`` stores all rows so far, and ``checkpoint()``
        then saves a checkpoint. ``observe()`` takes the loss if the model does not return it,
        hidden states, and values of the examples of a step that no hook can get. In a ``with``
        statement it is closed at the end.

    Raises
    ------
    RecordingError
        If the parameter is not found, has requires_grad=False, or is missing in the optimizer; if
        two optimizers have a parameter, or one steps again before the others have stepped.
    RunExists
        If `path` exists, and neither `resume` nor `overwrite` is set.
    NothingToResume
        If `resume` is set, and the run begins after `first_step`, is complete before it without
        `allow_gap`, has other weights there, or another shape or type of the matrix.
    InvalidArgument
        If an option is impossible.
    ConfigError
        If `strict_numerics` is set and there is advice.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> run = attach(model, optimizer, "run.zarr")
    >>> for _ in range(3):
    ...     ids = torch.randint(0, 5, (4, 7))
    ...     torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> run.close()
    >>> from trajstore import open_run
    >>> open_run("run.zarr").grad.shape
    (4, 5, 3)
    """
    wanted = RecordingOptions(**options)
    wanted.check_path(path)
    loop = TrainingLoop(
        scaler=scaler,
        max_grad_norm=max_grad_norm,
        first_step=first_step,
        schedule={} if max_grad_norm is None else {"max_grad_norm": max_grad_norm},
    )
    joined = JoinedOptimizer(optimizer, ends_step)
    return open_recorder(
        model, joined, path, wanted, loop, on_step=on_step, on_note=on_note, own_loop=True
    )


def _with_arguments_of(function: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that passes all its arguments to another one: it shows their names."""
    return functools.wraps(function, assigned=(), updated=())


@takes_options
@_with_arguments_of(attach)
@contextlib.contextmanager
def capture(*arguments: Any, **options: Any) -> Iterator[Recorder]:
    """Record a PyTorch loop: every optimizer step inside the ``with`` block.

    The run is ``complete`` when the block ends, and ``interrupted`` when an exception leaves it.

    Parameters
    ----------
    model, optimizer, path, ends_step, scaler, max_grad_norm, first_step, on_step, on_note
        See `attach`.
    **options
        Options of `RecordingOptions`.

    Yields
    ------
    Recorder
        See `attach`.

    Raises
    ------
    RecordingError, RunExists, NothingToResume, InvalidArgument, ConfigError
        See `attach`.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with capture(model, optimizer, "run.zarr") as run:
    ...     for _ in range(3):
    ...         ids = torch.randint(0, 5, (4, 7))
    ...         loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    ...         loss.backward()
    ...         run.observe(loss=loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> from trajstore import open_run
    >>> open_run("run.zarr").grad.shape
    (4, 5, 3)
    """
    with attach(*arguments, **options) as recorder:
        yield recorder
