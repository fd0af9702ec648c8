"""The optimizer and the device of a recorded run, to repeat its steps.

The optimizer is the real class of `torch.optim`; if its state has a separate type, a class of
`rounded_optimizer`.
"""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.store.metadata.metadata_form import (
    recorded_facts,
    recorded_modes,
    recorded_threads,
    resumed_after,
)
from trajstore.trainers.recording.notes import class_path, processor_name
from trajstore.trainers.recording.parameters import NO_NUMBERS
from trajstore.trainers.replays.recorded_rows import Placement
from trajstore.trainers.replays.replay_result import CannotReplay
from trajstore.trainers.rounded_optimizer import OPTIMIZERS
from trajstore.values.optimizer_rule import numbers_of, with_numbers

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

    Parameters
    ----------
    optimizer_class : type of Optimizer
    hyperparameters : dict
        Hyperparameters of the recorded parameter's group.
    dtype : torch.dtype
        Type of the parameter.
    device : torch.device
    largest : mapping of str to float
        The largest number of any step, by the names in the rows.
    tensors : mapping of str to str, optional
        Types of the hyperparameters that are tensors, with which torch computes.
    sparse : bool
        True if the gradient is a sparse tensor, for which some optimizers have another rule.

    Attributes
    ----------
    hyperparameters : dict
    steps_some_rows : bool
        True if a step changes only the rows of the sparse gradient.
    example : dict of str to tensor
        State of one element after its first step: names, types and devices.
    starts : dict of str to float
        Its state before the first step, without numbers of the whole parameter.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        hyperparameters: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        largest: Mapping[str, float],
        *,
        tensors: Mapping[str, str] | None = None,
        sparse: bool = False,
    ) -> None:
        self.hyperparameters = hyperparameters
        self._tensors = {} if tensors is None else tensors
        self.steps_some_rows = optimizer_class is torch.optim.SparseAdam
        self._is_sparse = sparse or self.steps_some_rows
        self._class: Callable[..., Optimizer] = optimizer_class
        self._taken = _taken(optimizer_class, with_numbers(hyperparameters, largest))
        if not self._taken["lr"]:  # each step sets it, but SparseAdam refuses 0, as of a warm-up
            self._taken["lr"] = 1.0
        self._taken = {name: self._of_type(name, value) for name, value in self._taken.items()}
        self._dtype = dtype
        self.example: State = {}
        self.begin(torch.ones(1, 1, device=device), {}, 0)
        made = {name: float(value) for name, value in self._state().items()}
        self.step(
            torch.ones(1, 1, device=device), torch.ones((), device="cpu"), hyperparameters["lr"], {}
        )
        self._count_type = type(self._optimizer.state[self._parameter].get(_STEP))
        self.example = self._state()
        self.starts = {
            name: made.get(name, 0.0) for name in self.state_names if self.example[name].ndim
        }

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state without the number of steps, such as ``exp_avg``."""
        return tuple(name for name in self.example if name != _STEP)

    @property
    def numbers(self) -> dict[str, float]:
        """Its numbers, apart from the rate, by the names in the rows of a run."""
        names = [name for name in self._optimizer.defaults if name in self.hyperparameters]
        numbers = numbers_of((name, self.hyperparameters[name]) for name in names)
        return {name: number for name, number in numbers.items() if name not in NO_NUMBERS}

    def unknown(self, numbers: Mapping[str, float]) -> list[str]:
        """Return which of its numbers are NaN in a row."""
        return [name for name in self.numbers if math.isnan(numbers.get(name, 0.0))]

    @property
    def counts_steps(self) -> bool:
        """True if the update depends on the number of steps."""
        return _STEP in self.example

    def check_whole(self, placement: Placement) -> None:
        """Check that the recorded tokens suffice for a step.

        Raises
        ------
        CannotReplay
            If each element depends on all others, of which some are not known.
        """
        if placement.ids is not None and self._class is getattr(torch.optim, "Muon", None):
            raise CannotReplay("a step of Muon needs all tokens, but the run holds some of them")

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


def recorded_optimizer(
    attributes: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    largest: Mapping[str, float],
) -> RecordedOptimizer:
    """Return the optimizer of the attribute ``optimizer`` of a run.

    Only classes in this module's list are used, so a file cannot choose what is executed.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    dtype : torch.dtype
        Type of the parameter.
    device : torch.device
    largest : mapping of str to float
        `RecordedRows.largest_hyperparameters`.

    Raises
    ------
    CannotReplay
        If the run does not record its optimizer, the class is not in `REPLAYABLE`, or this version
        of torch does not take its hyperparameters.
    """
    recorded = attributes.get("optimizer")
    if not isinstance(recorded, Mapping) or not isinstance(recorded.get("class"), str):
        raise CannotReplay("the run does not record its optimizer (root attribute optimizer)")
    path = recorded["class"]
    optimizer_class = _optimizer_class(path)
    hyperparameters = dict(recorded.get("hyperparameters") or {})
    missing = _numbers(optimizer_class) - set(hyperparameters)
    if missing:
        raise CannotReplay(f"the run does not record the optimizer's {', '.join(sorted(missing))}")
    if device.type == "cpu":
        # capturable keeps the step count on an accelerator; torch refuses it on the CPU.
        hyperparameters["capturable"] = False
    try:
        return RecordedOptimizer(
            optimizer_class,
            hyperparameters,
            dtype,
            device,
            largest,
            tensors=recorded.get("tensors"),
            sparse=recorded.get("sparse_gradient") is True,
        )
    except (
        TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError,
    ) as error:  # fmt: skip
        raise CannotReplay(
            f"{path} in this version of torch refuses the recorded hyperparameters ({error})"
        ) from error


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


_CAPABILITY = "cpu_capability"


@dataclass(frozen=True, kw_only=True)
class ReplayDevice:
    """Device of a replay, compared with the device of the recording.

    Attributes
    ----------
    device : torch.device
        Device to replay on.
    exact : bool
        True if both devices are of the same kind, so that every bit has to agree. Processors are
        if torch uses the same instructions on both.
    recorded_on, replayed_on : str
    threads : int, optional
        Threads of torch; None if irrelevant or unknown.
    modes : dict
        Modes of the process, see `process_modes`.
    notes : tuple of str
        Other reasons for different values.
    """

    device: torch.device
    exact: bool
    recorded_on: str
    replayed_on: str
    threads: int | None
    modes: dict[str, Any]
    notes: tuple[str, ...]


def replay_device(
    attributes: Mapping[str, Any], step: int = 0, *, products: bool = False
) -> ReplayDevice:
    """Return the device to replay a run on: the kind that recorded it, else the CPU.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    step : int
        Step before the replayed ones; a resumed run may have been recorded on several devices.
    products : bool
        True if products of matrices are computed, too. Their bits depend on the very processor;
        those of other operations only on its vector instructions.

    Raises
    ------
    FormatError
        If ``provenance.resumed`` is not a list of objects with a step.
    """
    provenance = recorded_facts(attributes, step)
    recorded = str(provenance.get("device", "an unknown device"))
    kind = recorded.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        exact = here == provenance.get("device_name")
        device = torch.device("cuda")
    elif kind == "mps" and torch.backends.mps.is_available():
        here, exact, device = "mps", True, torch.device("mps")
    else:
        now = {"processor": platform.machine()}
        now[_CAPABILITY] = torch.backends.cpu.get_cpu_capability()
        if products:
            now["processor_name"] = processor_name()
        recording = {name: provenance.get(name, value) for name, value in now.items()}
        here, device = f"cpu ({_listed(now)})", torch.device("cpu")
        exact = kind == "cpu" and recording == now
        if kind == "cpu":
            recorded = f"cpu ({_listed(recording)})"
    detail = provenance.get("device_name")
    recorded_on = f"{recorded} ({detail})" if detail else recorded
    replayed_on = f"cuda ({here})" if device.type == "cuda" else here
    version = provenance.get("torch", torch.__version__)
    notes = []
    if not exact:
        notes.append(
            f"recorded on {recorded_on}, replayed on {replayed_on}: different values are counted "
            "but are no errors"
        )
        if device.type == kind == "cpu" and recording | {_CAPABILITY: now[_CAPABILITY]} == now:
            notes.append(
                f"to compare every bit on a processor that has {recording[_CAPABILITY]}, too, set "
                f"ATEN_CPU_CAPABILITY={str(recording[_CAPABILITY]).lower()}"
            )
    if version != torch.__version__:
        notes.append(
            f"recorded with torch {version}, replayed with {torch.__version__}, which may round "
            "differently: different values are counted but are no errors"
        )
    count = recorded_threads(attributes, step)
    return ReplayDevice(
        device=device,
        exact=exact and version == torch.__version__,
        recorded_on=recorded_on,
        replayed_on=replayed_on,
        threads=count if count and count > 0 and device.type == "cpu" else None,
        modes=recorded_modes(attributes, step),
        notes=tuple(notes),
    )


def replay_devices(
    attributes: Mapping[str, Any], steps: npt.NDArray[Any], *, products: bool = False
) -> list[ReplayDevice]:
    """Return the device to replay each row of a run on, (step,).

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    steps : ndarray of int, (step,)
        Steps of its rows.
    products : bool
        See `replay_device`.

    Raises
    ------
    FormatError
        See `replay_device`.
    """
    begins = [0, *resumed_after(attributes)]
    devices = [replay_device(attributes, step, products=products) for step in begins]
    return [devices[max(index - 1, 0)] for index in np.searchsorted(begins, steps).tolist()]


def _listed(provenance: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in provenance.values() if value)
