"""Functions that attach a recorder: `attach` and `capture` to a loop, `open_recorder` to any."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from trajstore.errors import RecordingError
from trajstore.optimizer_advice import require_sound
from trajstore.schema import EVERYTHING, MODEL
from trajstore.store.storage.remote_path import RunPath
from trajstore.store.writing.resumed_run import in_all_processes
from trajstore.trainers.recording.device_summaries import ModelParameters
from trajstore.trainers.recording.device_to_host import Comparison
from trajstore.trainers.recording.model_state import ModelState
from trajstore.trainers.recording.notes import RunNotes, optimizer_advice, report_notes
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop, takes_options
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import JoinedOptimizer, find_parameters, unwrap
from trajstore.trainers.recording.planned_run import Recording, plan_runs, run_paths
from trajstore.trainers.recording.resumed_run import ExistingRun
from trajstore.trainers.recording.sharding import find_shares, is_distributed
from trajstore.trainers.recording.step_hooks import Recorder

P = ParamSpec("P")
R = TypeVar("R")

_NO_LABELS = (
    "the tokens have no labels dead and live; pass token_count= or is_dead=, or label them later "
    "with trajstore annotate"
)


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
        and raise an error if it ends without a step.

    Raises
    ------
    ConfigError
        If there is such advice, and `strict_numerics` is set.
    RecordingError
        If a parameter cannot be recorded, or another process with a part of it fails.
    RunExists
        If the path exists, and neither resume nor overwrite is set.
    NothingToResume
        If the existing run begins after the step of the training, or has other weights there.
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
        on_note=on_note,
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
                    recording.state = ModelState(
                        model,
                        joined,
                        parameters[0],
                        options.resolved,
                        whole_state=options.whole_state,
                    )
                planned = plan_runs(path, parameters, recording, shares)
            rows = []
            for run in planned:
                existing = ExistingRun.find(run, comparison) if options.resume else None
                rows.append(ParameterRows(run, existing))
    except BaseException:
        for share in filter(None, shares):
            share.close()
        raise
    multiplied = next((one for one in parameters if one.head is not None), parameters[0])
    recorder = Recorder(
        recording, rows, multiplied, on_step=on_step, must_write=path if own_loop else None
    )
    try:
        # All checks have passed; only now rows may be dropped.
        for parameter in rows:
            parameter.resume()
        if planned and not options.resume and _is_first_process():  # else they were reported before
            report_notes((one.sentence for one in advice), on_note)
            report_notes((note for run in planned for note in run.notes), on_note)
            if own_loop and options.is_dead is None and options.token_count is None:
                notes.mention(_NO_LABELS)
    except BaseException:
        recorder.close(complete=False)
        raise
    return recorder


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
    max_grad_norm: float = 0.0,
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
    max_grad_norm : float
        Norm to which the loop clips all gradients; 0 is no clipping. The recorded ``clip_coef`` is
        checked against the gradient, and is NaN if they do not agree.
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
        ``close()`` ends the recording, ``commit()`` stores all rows so far. ``observe()`` takes the
        loss if the model does not return it, hidden states, and values of the examples of a step
        that no hook can get. In a ``with`` statement it is closed at the end.

    Raises
    ------
    RecordingError
        If the parameter is not found, has requires_grad=False, or is missing in the optimizer; if
        two optimizers have a parameter, or one steps again before the others have stepped.
    RunExists
        If `path` exists, and neither `resume` nor `overwrite` is set.
    NothingToResume
        If `resume` is set, and the run begins after `first_step` or has other weights there.
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
        schedule={"max_grad_norm": max_grad_norm},
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
