"""Steps of the optimizer of one matrix, computed again from recorded gradients.

The optimizer is the real class of `torch.optim`; if its state has a separate type, a class of
`rounded_optimizer`. A replay begins each step at the recorded row before it; a what-if goes on from
its own result.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.provenance import OptimizerAttributes, RunAttributes
from trajstore.store.metadata.zarr_json import unproven_rows
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.notes import class_path
from trajstore.trainers.recording.parameters import NO_NUMBERS
from trajstore.trainers.replays.findings import CannotReplay
from trajstore.trainers.replays.recorded_rows import Placement, RecordedRow, RecordedRows, tensor_of
from trajstore.trainers.rounded_optimizer import OPTIMIZERS
from trajstore.values.optimizer_rule import numbers_of, with_numbers

Array = npt.NDArray[Any]

State = dict[str, torch.Tensor]
"""State that an optimizer keeps for a parameter, as ``optimizer.state[parameter]``."""

REPLAYABLE = (
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Muon",
    "SparseAdam",
)  # fmt: skip
"""Classes of `torch.optim`. All but Muon update each element independently."""

_ROUNDED = tuple(OPTIMIZERS.values())

_STEP = "step"


class RecordedOptimizer:
    """A class of `torch.optim` with the recorded hyperparameters, and one parameter that it steps.

    Only classes in this module's list are used, so a file cannot choose what is executed.

    Parameters
    ----------
    recorded : object
        The attribute ``optimizer`` of a run.
    dtype : torch.dtype
        Type of the parameter.
    device : torch.device
    largest : mapping of str to float
        The largest number of any step, by the names in the rows.

    Attributes
    ----------
    hyperparameters : dict
    numbers : dict of str to float
        Its numbers, apart from the rate, by the names in the rows of a run.
    needs_all_rows, steps_some_rows : bool
        True if each element of a step depends on all others; if a step changes only the rows of
        the sparse gradient.
    counts_steps : bool
        True if the update depends on the number of steps.
    example : dict of str to tensor
        State of one element after its first step: names, types and devices.
    state_names : tuple of str
        Names of the state without the number of steps, such as ``exp_avg``.
    starts : dict of str to float
        Its state before the first step, without numbers of the whole parameter.

    Raises
    ------
    CannotReplay
        If the run does not record its optimizer, the class is not in `REPLAYABLE`, or this version
        of torch does not take its hyperparameters.
    """

    def __init__(
        self, recorded: Any, dtype: torch.dtype, device: torch.device, largest: Mapping[str, float]
    ) -> None:
        described = OptimizerAttributes.of(recorded)
        if not described.path:
            raise CannotReplay("the run does not record its optimizer (root attribute optimizer)")
        known = _optimizer_class(described.path)
        self.hyperparameters = described.hyperparameters
        if missing := _numbers(known) - {*self.hyperparameters}:
            names = ", ".join(sorted(missing))
            raise CannotReplay(f"the run does not record the optimizer's {names}")
        if device.type == "cpu":
            # capturable keeps the step count on an accelerator; torch refuses it on the CPU.
            self.hyperparameters["capturable"] = False
        self.needs_all_rows = known is getattr(torch.optim, "Muon", None)
        self.steps_some_rows = known is torch.optim.SparseAdam
        # Of a sparse gradient, some optimizers have another rule.
        self._is_sparse = described.stored.get("sparse_gradient") is True or self.steps_some_rows
        self._class: Callable[..., Optimizer] = known
        self._tensors = described.stored.get("tensors") or {}
        self._dtype = dtype
        try:
            self._take_first_step(device, largest)
        except (
            TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError,
        ) as error:  # fmt: skip
            raise CannotReplay(
                f"{recorded['class']} in this version of torch refuses the recorded "
                f"hyperparameters ({error})"
            ) from error

    def _take_first_step(self, device: torch.device, largest: Mapping[str, float]) -> None:
        """Learn from the step of one element what the optimizer takes and keeps."""
        taken = _taken(self._class, with_numbers(self.hyperparameters, largest))
        taken["lr"] = taken["lr"] or 1.0  # SparseAdam refuses 0, as of a warm-up; a step sets it
        self._taken = {name: self._of_type(name, value) for name, value in taken.items()}
        self.example: State = {}
        self.begin(torch.ones(1, 1, device=device), {}, 0)
        made = {name: float(value) for name, value in self._state().items()}
        names = [name for name in self._optimizer.defaults if name in self.hyperparameters]
        numbers = numbers_of((name, self.hyperparameters[name]) for name in names)
        self.numbers = {name: value for name, value in numbers.items() if name not in NO_NUMBERS}
        gradient, factor = torch.ones(1, 1, device=device), torch.ones((), device="cpu")
        self.step(gradient, factor, self.hyperparameters["lr"], {})
        self._count_type = type(self._optimizer.state[self._parameter].get(_STEP))
        self.example = self._state()
        self.counts_steps = _STEP in self.example
        self.state_names = tuple(name for name in self.example if name != _STEP)
        self.starts = {n: made.get(n, 0.0) for n in self.state_names if self.example[n].ndim}

    def unknown(self, numbers: Mapping[str, float]) -> list[str]:
        """Return which of its numbers are NaN in a row."""
        return [name for name in self.numbers if math.isnan(numbers.get(name, 0.0))]

    def begin(self, weights: torch.Tensor, state: State, steps_taken: int) -> None:
        """Set the parameter and its state.

        Parameters
        ----------
        weights : tensor, (vocabulary, hidden)
            Converted to the type of the parameter.
        state : dict of str to tensor
            Converted to the types of the optimizer's state; other names are left out.
        steps_taken : int
            Steps that the optimizer has taken before; without any it has no state yet.
        """
        self._parameter = torch.nn.Parameter(weights.to(self._dtype), requires_grad=False)
        self._optimizer = self._class([self._parameter], **self._taken)
        if not steps_taken:
            return
        kept = {
            name: state[name].to(example.device, example.dtype)
            for name, example in self.example.items()
            if name in state
        }
        if self.counts_steps:
            count: Any = torch.full_like(self.example[_STEP], steps_taken)
            kept[_STEP] = count if self._count_type is torch.Tensor else count.item()
        self._optimizer.state[self._parameter] = kept

    def step(
        self,
        gradient: torch.Tensor,
        clip_coef: torch.Tensor,
        lr: float,
        numbers: Mapping[str, float],
    ) -> None:
        """Take one step.

        Parameters
        ----------
        gradient : tensor, (vocabulary, hidden)
            Before clipping; converted to the type of the parameter.
        clip_coef : tensor, ()
            Factor of clipping; NaN if the gradient is the one that the optimizer got.
        lr : float
        numbers : mapping of str to float
            Other hyperparameters that the step used.
        """
        # torch.nn.utils.clip_grad_norm_ also multiplies by a tensor of the norm's type. A Python
        # number would be rounded to the type of the gradient first.
        gradient = gradient.to(self._dtype)
        if not clip_coef.isnan():
            gradient.mul_(clip_coef.to(gradient.device))
        if self.steps_some_rows:  # all of them; it takes no other gradient
            rows = torch.arange(len(gradient), device=gradient.device)
            gradient = torch.sparse_coo_tensor(
                rows[None], gradient, gradient.shape, check_invariants=True
            )
        elif self._is_sparse:
            gradient = gradient.to_sparse(1)
        self._parameter.grad = gradient
        group = self._optimizer.param_groups[0]
        group |= with_numbers(group, numbers) | {"lr": lr}
        group |= {name: self._of_type(name, group[name]) for name in self._tensors}
        self._optimizer.step()

    def value(self, name: str) -> torch.Tensor:
        """Return W or a state by name, (vocabulary, hidden); a state is 0 before the first step."""
        if name == "W":
            return self._parameter.detach()
        state = self._state()
        if name in state:
            return state[name]
        return torch.zeros_like(self._parameter, dtype=self.example[name].dtype)

    def kept(self, names: Collection[str]) -> State:
        """Return the states of some names that the parameter has so far."""
        return {name: value for name, value in self._state().items() if name in names}

    def _of_type(self, name: str, value: Any) -> Any:
        """Return a hyperparameter as a tensor, if it was one."""
        if name not in self._tensors:
            return value
        if isinstance(value, tuple):
            return tuple(self._of_type(name, item) for item in value)
        return torch.as_tensor(value, dtype=getattr(torch, self._tensors[name]), device="cpu")

    def _state(self) -> State:
        state = self._optimizer.state[self._parameter]
        return {
            name: torch.as_tensor(value)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) or name == _STEP
        }


def _optimizer_class(path: str) -> type[Optimizer]:
    names = [name for name in REPLAYABLE if hasattr(torch.optim, name)]  # Muon is new
    classes: list[type[Optimizer]] = [getattr(torch.optim, name) for name in names]
    for known in (*classes, *_ROUNDED):
        if class_path(known) == path:
            return known
    raise CannotReplay(
        f"the optimizer {path} cannot be replayed; supported classes of torch.optim: "
        f"{', '.join(REPLAYABLE)}; of trajstore.trainers.rounded_optimizer: "
        + ", ".join(known.__name__ for known in _ROUNDED)
    )


def _numbers(optimizer_class: Callable[..., Optimizer]) -> set[str]:
    """Return the hyperparameters except flags; a missing flag has this torch's default."""
    added = {"state_dtype": "float32"} if optimizer_class in _ROUNDED else {}
    optimizer = optimizer_class(
        [torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], lr=1.0, **added
    )
    (group,) = optimizer.param_groups
    flags = (bool, type(None), list)  # and the list of parameters
    return {name for name, value in group.items() if not isinstance(value, flags)}


def _taken(
    optimizer_class: Callable[..., Optimizer], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the hyperparameters that a class takes as arguments."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in hyperparameters.items()}
    accepted = inspect.signature(optimizer_class).parameters
    return {name: value for name, value in values.items() if name in accepted}


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the step before each row uses beside the gradient.

    Attributes
    ----------
    lr : ndarray of float64, (step,)
    clip_coef : ndarray, (step,)
        Bits of the factor of the gradient.
    numbers : sequence of dict of str to float
        Other hyperparameters.
    """

    lr: npt.NDArray[np.float64]
    clip_coef: Array
    numbers: Sequence[dict[str, float]]


_NEEDED = {
    "grad": "the gradient was not recorded; record weights+grads or matrix",
    "lr": "the learning rate was not recorded; every tier has it",
    "clip_coef": "the clipping factor was not recorded; every tier has it",
}
LARGEST_RATE = 1e30  # torch refuses some of these


class OptimizerSteps:
    """Steps of the optimizer of a run from its recorded gradients.

    Parameters
    ----------
    source : TiledRun
    rows : RecordedRows
    placement : Placement
    forced : bool
        True if each step begins at the recorded row before it.

    Attributes
    ----------
    rows, placement, forced
        As given.
    attributes : mapping
        Attributes of the root of the run.
    optimizer : RecordedOptimizer
    inputs : StepInputs
    recorded : tuple of str
        W, and the recorded state of the optimizer.
    rebuilt : tuple of str
        State of the optimizer that is not recorded, so it is carried from step to step.

    Raises
    ------
    CannotReplay
        If the run lacks a variable that every step needs, or its optimizer cannot be built.
    """

    def __init__(
        self, source: TiledRun, rows: RecordedRows, placement: Placement, *, forced: bool
    ) -> None:
        for name, reason in _NEEDED.items():
            if name not in rows:
                raise CannotReplay(reason)
        self.rows, self.placement, self.forced = rows, placement, forced
        self.attributes = source.attributes
        self.run = run = RunAttributes.of(source.attributes)
        weights = getattr(torch, rows.natives["W"].name)
        self.optimizer = RecordedOptimizer(
            run.optimizer.stored, weights, placement.device, rows.largest_hyperparameters
        )
        self.inputs = StepInputs(
            lr=rows.values("lr"),
            clip_coef=rows.scalars("clip_coef"),
            numbers=[rows.hyperparameters(number) for number in range(len(rows))],
        )
        names = self.optimizer.state_names
        self.recorded = ("W", *(name for name in names if name in rows))
        self.rebuilt = tuple(name for name in names if name not in rows)
        self._other_type = self._type_of_another_optimizer()
        self._other_until = run.other_optimizer_until
        self._unproven = unproven_rows(source.attributes, rows.steps)

    def changed(self, optimizer: RecordedOptimizer, inputs: StepInputs) -> Self:
        """Return the steps of another optimizer from the same gradients."""
        other = copy.copy(self)
        other.optimizer, other.inputs = optimizer, inputs
        return other

    def check(self, number: int) -> None:
        """Check that the step before a row can be computed.

        Raises
        ------
        CannotReplay
            If it cannot; the message names the step, unless `forced`: one reason may hold for many.
        """
        for reason in self._reasons(number):
            raise CannotReplay(reason)

    def begin(self, row: RecordedRow, carried: State | None = None) -> None:
        """Set the matrix and the state of the optimizer to those of a row.

        Parameters
        ----------
        row : RecordedRow
            With the variables `recorded`.
        carried : dict of str to tensor, optional
            The state `rebuilt` at the row.

        Raises
        ------
        CannotReplay
            If the state at the row is not known.
        """
        count, state = self.steps_taken(row), self.recorded[1:]
        if count and self.rebuilt and carried is None:
            raise CannotReplay(
                f"the optimizer's {', '.join(self.rebuilt)} is not recorded, and can be rebuilt "
                "only from step 0 on, without a step that was not replayed"
                + self._fix("record the tier matrix")
            )
        if count and state and row.number == 0 and not any(row.bits[n].any() for n in state):
            it, _ = self._place(row.step + 1)
            raise CannotReplay(
                f"the optimizer's state before {it} was not recorded, because recording began there"
                + self._fix("start a step later (at=…)")
            )
        known = {name: self._parameter(name, row) for name in state}
        self.optimizer.begin(self._parameter("W", row), known | (carried or {}), count)

    def take(self, row: RecordedRow) -> None:
        """Take the step before a row from its gradient, unless it was skipped."""
        number, inputs = row.number, self.inputs
        if not self.rows.idle[number]:
            factor = tensor_of(inputs.clip_coef[number], self.rows.natives["clip_coef"])
            gradient, lr = self._parameter("grad", row), float(inputs.lr[number])
            self.optimizer.step(gradient, factor, lr, inputs.numbers[number])

    def steps_taken(self, row: RecordedRow) -> int:
        """Return the optimizer's steps before a row, at least 1 if it keeps a state there."""
        count = int(self.rows.taken[row.number])
        if count or self.optimizer.counts_steps:
            return count
        return int(any(row.bits[name].any() for name in self.recorded[1:]))

    def lacks_factor(self, number: int) -> bool:
        """Return True if the factor of a row's gradient is NaN: not known, or there was none."""
        bits = self.inputs.clip_coef[number]
        return bool(tensor_of(bits, self.rows.natives["clip_coef"]).isnan())

    def _parameter(self, name: str, row: RecordedRow) -> torch.Tensor:
        return self.placement.parameter(row.bits[name], self.rows.natives[name])

    def _fix(self, sentence: str) -> str:
        """Return what helps a what-if, as the end of a message."""
        return "" if self.forced else f"; {sentence}"

    def _place(self, step: int) -> tuple[str, str]:
        """Return how a message names a step, and where: a replay lists the steps of a reason."""
        return ("it", "") if self.forced else (f"step {step}", f" at step {step}")

    def _reasons(self, number: int) -> Iterator[str]:
        """Yield why the step before a row cannot be computed; the first one is reported."""
        rows, optimizer, inputs, fix = self.rows, self.optimizer, self.inputs, self._fix
        before, step = rows.steps[number - 1 : number + 1].tolist()
        it, at = self._place(step)
        later = "start later (at=…)"
        if self._other_type:
            yield self._other_type
        if optimizer.needs_all_rows and not self.placement.is_whole:
            yield "a step of Muon needs all tokens, but the run holds some of them"
        if optimizer.steps_some_rows and (self.rebuilt or not self.forced):
            yield (
                "SparseAdam changes only the rows of a batch, and the gradients do not tell which "
                "rows with a gradient of 0 were among them"
                + ("; record matrix" if self.forced else "")
            )
        if step <= self._other_until:
            start = f"start at the fork (at={self._other_until}), or use"
            yield (
                f"another optimizer took {it}, before the run was forked; "
                f"{'replay' if self.forced else start} the source of the fork"
            )
        if step - before != 1:
            every = self.run.every != 1
            yield (
                "the row of the step before is missing (recorded with every > 1)"
                if every and self.forced
                else f"step {before + 1} is missing"
                if step - before == 2
                else f"steps {before + 1} to {step - 1} are missing"
            ) + fix(f"record with every=1, or {later}")
        if number in self._unproven and self.forced:
            yield self._unproven[number]
        if rows.idle[number]:
            return
        if number in self._unproven and self.lacks_factor(number):
            yield f"clip_coef is NaN{at}, so the factor of the gradient is unknown" + fix(
                "set the clipping, such as training.max_grad_norm=1"
            )
        if np.isnan(inputs.lr[number]):
            yield f"the learning rate is NaN{at}, so it is unknown" + fix("set schedule.name")
        if unknown := optimizer.unknown(inputs.numbers[number]):
            yield f"{', '.join(unknown)} of hyperparameters is NaN{at}, so it is unknown" + fix(
                f"set it, such as optimizer.weight_decay=0, or {later}"
            )
        if abs(inputs.lr[number]) >= LARGEST_RATE and not self.forced:  # a replay finds it
            yield f"its learning rate{at} is too large for any optimizer"
        counts = optimizer.counts_steps and rows.taken[number - 1]
        if counts and not rows.counts_skipped(number):
            yield (
                f"the number of skipped steps before {it}, which do not count, is not recorded"
                + fix("use a run with every step from 0 on")
            )

    def _type_of_another_optimizer(self) -> str:
        """Return why the recorded values are not of the optimizer; empty if they may be."""
        kept = {name: self.optimizer.example[name].dtype for name in self.recorded[1:]}
        kept["grad"] = getattr(torch, self.rows.natives["W"].name)
        for name, dtype in kept.items():
            found, made = self.rows.natives[name].name, type_name(dtype)
            if found != made:
                return (
                    f"{name} is {found}, but the recorded optimizer keeps it in {made}, so another "
                    "optimizer trained the run"
                )
        known = self.run.vocabulary is not None
        if self.optimizer.hyperparameters.get("rounding") == "stochastic" and not known:
            return (
                "stochastic rounding depends on the position in the parameter, but the number of "
                "tokens of the parameter is not recorded (root attribute recording, vocabulary)"
            )
        return ""
