"""`develop`: the state of any step of an own loop, trained from the keyframe before it.

The loop gives the body of a step. Its inputs, random states, learning rates and the factor of a
gradient scaler come from the recorded rows. The same hooks as in a recording take the digests of
each step, and compare them with those of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from trajstore.arguments import ANY, checks_types, exact_step
from trajstore.errors import InvalidArgument, NothingToResume, RecordingError, VariableNotRecorded
from trajstore.provenance import RunAttributes
from trajstore.schema import KEYFRAMES, TIERS, VARIABLES
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import RunPath, location
from trajstore.store.writing.create import staged_run
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.capture import Recorder, open_recorder
from trajstore.trainers.recording.existing_run import Comparison
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop
from trajstore.trainers.recording.parameters import JoinedOptimizer, find_group
from trajstore.trainers.recording.step_inputs import Inputs, decoded
from trajstore.trainers.runs.developed_run import Developed, step_to_reach, write_developed
from trajstore.trainers.runs.differences import explain_difference
from trajstore.trainers.states.stored_model import StoredModel, row_of
from trajstore.trainers.step_model import StepModel, restore, set_generators, set_numbers

_COMPARED = ("W", "params_digest", "step_digest")
_WHOLE = ("everything", "params_digest", "step_digest")

Build = Callable[[], tuple[Any, ...]]
"""Returns a new model, its optimizer, the step, and the gradient scaler, if any, for `develop`."""


@checks_types
def develop(
    run: RunPath,
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    step: Callable[[list[Inputs]], Any],
    *,
    at: int,
    scaler: Any = None,
    ends_step: Any = None,
    allow_different: bool = False,
) -> Developed:
    """Set a model and its optimizer to the state after any step of a run with keyframes.

    The keyframe before the step is restored, and the steps after it are trained again. Before each
    one, the random generators, the learning rates, the hyperparameters of the group of W, the
    factor of the scaler, the number of threads and the modes of torch get their recorded values.
    After each one, W and the digests of all parameters, gradients and buffers are compared with the
    recorded ones.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="keyframes"``.
    model : Module
        The model of the recording, in its types and in training mode.
    optimizer : Optimizer, or sequence of Optimizer
        As for `restore`.
    step : callable
        The body of the loop: forward and backward passes, clipping, and the optimizer's step. It is
        called with a list of the inputs of each forward pass: tensors on the device of the model,
        by the names of the arguments of ``model.forward``, or by those that ``observe`` got. If the
        run has ``batch``, it has one entry instead: the indices ``batch`` of all examples.
    at : int
        Step to reach.
    scaler : GradScaler, optional
        Scaler of the loss, if the recording had one.
    ends_step : Optimizer, optional
        As for `capture`.
    allow_different : bool
        Continue after a difference, and return it.

    Returns
    -------
    Developed
        ``difference`` is None if all steps agree with the recorded ones.

    Raises
    ------
    RunNotFound, StepNotFound
        If there is no run, or it does not hold the step.
    VariableNotRecorded
        If it has no keyframes, or the inputs of a step did not fit.
    FormatError
        If the keyframe does not fit its digests.
    InvalidArgument
        As `restore`; or if `step` does not take exactly one step.
    NothingToResume
        If a step differs. The message has the step, the parameters, and what differs between the
        machines.

    Examples
    --------
    >>> from trajstore.trainers import capture
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> def step(inputs):
    ...     for of_pass in inputs:
    ...         model(of_pass["input"]).square().sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> options = {"variables": "keyframes", "keyframe_every": 4, "parameter": "0.weight"}
    >>> with capture(model, optimizer, "run.zarr", **options):
    ...     for _ in range(6):
    ...         step([{"input": torch.randint(0, 5, (4,))}])
    >>> develop("run.zarr", model, optimizer, step, at=3)
    Developed(steps=3, keyframe=0, difference=None)
    """
    stored = StoredModel(run)
    if not stored.has_keyframes:
        raise VariableNotRecorded(
            f"{run} has no keyframes; restore() its steps, or record it with variables='keyframes'"
        )
    at = exact_step(at, least=ANY)
    row_of(run, stored.all_steps, at)
    keyframe = int(stored.restorable[stored.restorable <= at].max(initial=-1))
    if keyframe < 0:
        raise VariableNotRecorded(
            f"{run} has no keyframe to develop step {at} from; develop the run that it was forked "
            "from, or a later step"
        )
    restore(run, model, optimizer, step=keyframe)
    joined, told = JoinedOptimizer(optimizer, ends_step), None
    comparison = Comparison(variables=_COMPARED)
    options, loop = _options(run), TrainingLoop(scaler=scaler, first_step=keyframe)
    quiet: dict[str, Any] = {"comparison": comparison, "on_note": lambda sentence: None}
    with open_recorder(model, joined, run, options, loop, **quiet) as recorder:
        for _ in _trained(
            stored, model, joined, step, scaler, recorder, range(keyframe + 1, at + 1)
        ):
            if comparison.difference is not None and told is None:
                device = next(model.parameters()).device
                told = explain_difference(location(run), comparison.difference, device)
                if not allow_different:
                    raise NothingToResume(
                        f"the developed steps of {run} differ from the recorded ones: {told}; "
                        "check that step() does what the loop did, and that the inputs determine "
                        "it, or give allow_different=True"
                    )
    return Developed(steps=at - keyframe, keyframe=keyframe, difference=told)


def train_own(run: Path, build: Build, first: int, last: int, target: Path) -> None:
    """Write steps of a run of an own loop as a new run of ``everything``.

    Parameters
    ----------
    run : Path
    build : callable
        As for `trajstore.open_run`.
    first, last : int
        The first step, which follows a keyframe or is 0, and the last one.
    target : Path
        The new run.

    Raises
    ------
    NothingToResume, VariableNotRecorded, InvalidArgument
        As `develop`.
    """
    with torch.random.fork_rng():  # the program that reads goes on with its random numbers
        _train_own(run, build, first, last, target)


def _train_own(run: Path, build: Build, first: int, last: int, target: Path) -> None:
    stored, begin = StoredModel(run), max(first - 1, 0)
    parts = build()
    if not isinstance(parts, tuple) or len(parts) not in (3, 4):
        raise InvalidArgument(
            "developed: the function returned "
            + (f"{len(parts)} values" if isinstance(parts, tuple) else type(parts).__name__)
            + ", expected (model, optimizer, step), and a gradient scaler if there is one"
        )
    model, optimizer, step, scaler = (*parts, None)[:4]
    joined = JoinedOptimizer(optimizer)
    restore(run, model, optimizer, step=begin)
    recording = RunAttributes.of(stored.attributes).recording
    names = {name: recording[name] for name in ("parameter", "logits_mode")}
    options = RecordingOptions(variables=_WHOLE, **names)
    loop = TrainingLoop(scaler=scaler, first_step=begin)
    with staged_run(target) as new:
        part = new.with_name("developed.zarr")
        with open_recorder(
            model, joined, part, options, loop, on_note=lambda sentence: None
        ) as recorder:
            numbers = range(begin + 1, step_to_reach(run, begin, last) + 1)
            for _ in _trained(stored, model, joined, step, scaler, recorder, numbers):
                pass
        device = next(model.parameters()).device
        write_developed(run, new, part, range(first, last + 1), begin, device=device)


def _trained(
    stored: StoredModel,
    model: torch.nn.Module,
    joined: JoinedOptimizer,
    step: Callable[[list[Inputs]], Any],
    scaler: Any,
    recorder: Recorder,
    numbers: range,
) -> Iterator[int]:
    """Train steps, each with the settings, random state, modes and inputs of the recorded one."""
    run, pairs = RunAttributes.of(stored.attributes), StepModel(stored, lambda: model).parameters
    trained = {each.name: p for each, p in pairs if find_group(joined, p) is not None}
    for number in numbers:
        set_numbers(stored, joined, trained, number)
        if "random_state" in stored:
            set_generators(model, stored.value("random_state", number))
        if scaler is not None and "scale" in stored:
            factor = float(stored.value("scale", number))
            scaler.load_state_dict(scaler.state_dict() | {"scale": factor})
        inputs = _inputs(stored, model, number)
        names = [sorted(each) for each in inputs]
        try:
            with process_mode(run.threads_after(number - 1), run.modes_after(number - 1)):
                step(inputs)
        except Exception as error:
            error.add_note(f"the inputs of step {number} of {stored.run} are {names}")
            raise
        _check_taken(recorder, number)
        yield number


def _options(run: RunPath) -> RecordingOptions:
    """Return the options that a run was recorded with."""
    group: Any = open_group(run)
    further = [n for n in group.array_keys() if n in [*VARIABLES] and n not in TIERS[KEYFRAMES]]
    recording = RunAttributes.of(group.attrs.asdict()).recording
    known = {name: recording[name] for name in ("parameter", "logits_mode", "keyframe_every")}
    return RecordingOptions(variables=[KEYFRAMES, *further], resume=True, memory=1 << 50, **known)


def _inputs(stored: StoredModel, model: torch.nn.Module, number: int) -> list[Inputs]:
    """Return the inputs of a step on the device of the model."""
    if "inputs" in stored:
        inputs = decoded(stored.value("inputs", number))
    else:
        batch = stored.value("batch", number) if "batch" in stored else np.empty(0)
        indices = torch.from_numpy(batch[~np.isnan(batch)]).long()
        inputs = [{"batch": indices}] if len(indices) else []
    if not inputs:
        raise VariableNotRecorded(
            f"{stored.run} does not hold the inputs of step {number}, because they did not fit or "
            "were not known; develop an earlier step"
        )
    device = next(model.parameters()).device
    return [{name: part.to(device) for name, part in each.items()} for each in inputs]


def _check_taken(recorder: Recorder, number: int) -> None:
    """Check that one step was taken."""
    if not recorder.is_recording:
        raise RecordingError(f"step {number} cannot be followed: {recorder.notes()[-1]}")
    if recorder.step != number:
        raise InvalidArgument(
            f"step() ended after optimizer step {recorder.step}, expected {number}; it has to take "
            "exactly one step of the optimizer"
        )
