"""The state of a whole model at each step: parameters, gradients, moments, buffers, randomness.

All parameters except the recorded matrix form one vector, in the order of `named_parameters`. Their
gradients and moments form vectors of the same order. Each tensor is copied once, to its place in
the row. If the tensors of a vector have several types, it has the smallest type that holds all
values of each. The conversion is exact; NaN keeps the part of its payload that a cast keeps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import torch

from trajstore.errors import InvalidArgument, RecordingError
from trajstore.installation import imported, version_of
from trajstore.schema import KEPT, OPTIMIZER_STATE, VARIABLES, kept_as
from trajstore.trainers.recording.device_to_host import (
    JoinedVector,
    check_joinable,
    joint_type,
    same_bits,
    type_name,
)
from trajstore.trainers.recording.forward_values import ForwardPasses
from trajstore.trainers.recording.hooks import ModuleHooks
from trajstore.trainers.recording.kept_state import (
    ADAM_STATE,
    Entry,
    ModelBuffers,
    find_kept,
    kept_values,
    named_buffers,
    random_state,
    state_attribute,
)
from trajstore.trainers.recording.notes import CannotFollow
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    RecordedParameter,
    as_float64,
    gradient_of,
    unwrap,
)
from trajstore.trainers.recording.torch_internals import name_outside_compile
from trajstore.values.native_types import NATIVE_TYPES, native_type

State = dict[str, torch.Tensor | JoinedVector]

_GRADIENTS = "params_grad"

OF_ADAM = ("params_exp_avg", "params_exp_avg_sq", "params_count")
"""Variables that Adam has after its first step."""

_MOVED = (
    "the loop draws random numbers between the forward passes of a step, and the model draws, too, "
    "so such a step cannot be repeated; give the loop a torch.Generator of its own"
)

STATE = ("params", "exp_avg", "exp_avg_sq", *OF_ADAM, "buffers")
"""Variables that determine the next step, except W and those of the optimizer's own names."""


@dataclass(eq=False)
class ModelState:
    """The state of a model that a step can be repeated from, except the recorded matrix.

    Parameters
    ----------
    model : Module
        Wrapped or not.
    optimizer : JoinedOptimizer
    recorded : RecordedParameter
        The matrix that the run holds by itself.
    variables : collection of str
        Recorded variables; others are not copied.
    whole_state : bool
        True to record all that the optimizer keeps, by its names.

    Attributes
    ----------
    names : tuple of str
        Names of all parameters, tied ones once.
    kept : list of Entry
        What the optimizer keeps.

    Raises
    ------
    RecordingError
        If the other parameters have several devices, or a type that is not recorded; or if the
        optimizer has a parameter that the model lacks.
    """

    model: InitVar[torch.nn.Module]
    optimizer: JoinedOptimizer
    recorded: InitVar[RecordedParameter]
    variables: Collection[str]
    _: KW_ONLY
    whole_state: bool = False

    def __post_init__(self, model: torch.nn.Module, recorded: RecordedParameter) -> None:
        self.kept: list[Entry] = []
        self._model = unwrap(model)
        named: dict[str, torch.Tensor] = {
            name_outside_compile(name): tensor for name, tensor in self._model.named_parameters()
        }
        self.names = tuple(named)
        self._tensors: list[torch.Tensor] = list(named.values())
        self._matrix = recorded.tensor
        others = {name: tensor for name, tensor in named.items() if tensor is not self._matrix}
        check_joinable(others)
        if outside := _places_in(self.optimizer).keys() - set(map(id, self._model.parameters())):
            raise RecordingError(
                f"the optimizer has {len(outside)} parameters that {type(self._model).__name__} "
                "lacks; pass a model that contains them, or record matrix instead of everything"
            )
        self._others = list(others.values())
        self._other_names = tuple(others)
        self._types: dict[str, list[torch.dtype]] = {}  # of the parts of each vector
        self._state_types: dict[int, torch.dtype] = {
            id(tensor): getattr(torch, group["state_dtype"])
            for group in self.optimizer.param_groups
            if group.get("state_dtype") in NATIVE_TYPES
            for tensor in group["params"]
        }
        self._random: torch.Tensor | None = None  # at the first forward pass of the step
        self._before_pass: torch.Tensor | None = None
        self._after_pass: torch.Tensor | None = None  # if the model draws
        self._draws: bool | None = None  # unknown before the first forward pass
        self._buffers = ModelBuffers(self._model) if "buffers" in self.variables else None
        self.take_initial()

    # Attributes of the root ----------------------------------------------------------------------

    def attributes(self) -> dict[str, Any]:
        """Return the root attributes that describe the vectors and the model."""
        attributes: dict[str, Any] = {"parameters": self._parameter_table()}
        if self._buffers is not None and self._buffers.names:
            attributes["buffers"] = self._buffers.table()
        config = getattr(self._model, "config", None)
        if isinstance(config, imported("transformers.configuration_utils", "PretrainedConfig")):
            attributes["model_config"] = {
                "class": type(self._model).__name__,
                "transformers": version_of("transformers"),
                "config": json.loads(config.to_json_string(use_diff=False)),
                "buffer_types": {
                    name: type_name(tensor.dtype)
                    for name, tensor in named_buffers(self._model)
                    if tensor.is_floating_point()
                },
            }
        return attributes

    def _parameter_table(self) -> list[dict[str, Any]]:
        aliases: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name_outside_compile(name))
        places = _places_in(self.optimizer)
        mixed = {
            _type_key(name): iter(types)
            for name, types in self._types.items()
            if name != "params" and len(set(types)) > 1
        }
        table, offset = [], 0
        for name, tensor in zip(self.names, self._tensors, strict=True):
            group, position = places.get(id(tensor), (None, None))
            entry: dict[str, Any] = {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": type_name(tensor.dtype),
                "variable": "W" if tensor is self._matrix else "params",
                "group": group,
                "requires_grad": tensor.requires_grad,
            }
            if position is not None:
                entry["position"] = position
            if tensor is not self._matrix:
                entry["offset"] = offset
                offset += tensor.numel()
                entry |= {key: type_name(next(types)) for key, types in mixed.items()}
            if tied := aliases[id(tensor)][1:]:
                entry["tied"] = tied
            table.append(entry)
        return table

    # Row 0 ---------------------------------------------------------------------------------------

    def take_initial(self) -> None:
        """Copy the state before the first step."""
        self.kept = find_kept(self.optimizer, self.kept)
        self._take_initial()

    @torch.no_grad()
    def _take_initial(self) -> None:
        self._initial = {
            name: value.on_host() if isinstance(value, JoinedVector) else value.cpu()
            for name, value in self._state(self.variables, initial=True).items()
        }

    def initial(self) -> dict[str, torch.Tensor]:
        """Return the state before the first step by variable, once: it is not kept."""
        initial, self._initial = self._initial, {}
        if self._buffers is not None and self._buffers.names:
            initial["buffers"] = self._buffers.initial()
        return initial

    def resume(self, attributes: Mapping[str, Any], recorded: Collection[str]) -> None:
        """Continue a run, whose root attributes and variables are given.

        Raises
        ------
        InvalidArgument
            If the run was recorded with other parameters or groups of them.
        """
        keys = ("name", "shape", "dtype", "variable", "group")
        now, before = (
            [tuple(entry.get(key) for key in keys) for entry in table]
            for table in (self._parameter_table(), attributes.get("parameters", []))
        )
        for number, (new, old) in enumerate(itertools.zip_longest(now, before)):
            if new != old:
                raise InvalidArgument(
                    f"parameter {number} of the model is {new}, but {old} in the run; resume "
                    "with the model and the optimizers of the run"
                )
        now_kept = {entry["name"]: entry for entry in find_kept(self.optimizer)}
        # A run without the attribute holds a count of any type.
        adam = [now_kept.get(entry["name"], entry) for entry in ADAM_STATE]
        self.kept = list(attributes.get(OPTIMIZER_STATE, adam))
        if KEPT.name in recorded:
            self._take_initial()  # with the entries of the run
        self.whole_state &= KEPT.name in recorded
        for name in (_GRADIENTS, *(f"params_{entry['name']}" for entry in self.kept)):
            key = _type_key(name)
            if types := [entry[key] for entry in attributes["parameters"] if key in entry]:
                self._types[name] = [getattr(torch, native_type(kind).name) for kind in types]
        if self._buffers is not None:
            self._buffers.names = tuple(entry["name"] for entry in attributes.get("buffers", []))
        self._draws = "random_state" in recorded

    def differing(self, row: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Return the variables of a row whose bits are not those of the training before a step.

        Parameters
        ----------
        row : mapping of str to tensor
            Values of `STATE` variables, on the CPU, in their native types. Without a state, an
            optimizer has moments and counts of 0.
        """
        now = self.initial()
        for name, value in self.optimizer.state.get(self._matrix, {}).items():
            if name in row and isinstance(value, torch.Tensor):
                now[name] = value.detach().cpu()
        return tuple(
            name
            for name, values in row.items()
            if not same_bits(now.get(name, torch.zeros_like(values)), values)
        )

    # A step --------------------------------------------------------------------------------------

    def watch(
        self,
        hooks: ModuleHooks,
        model: torch.nn.Module,
        passes: ForwardPasses,
        on_note: Callable[[str], None],
    ) -> None:
        """Add the hooks that take the states of the random generators."""
        if "random_state" in self.variables:
            self._passes, self._on_note = passes, on_note
            hooks.before(model, self._before_forward, first=True)
            hooks.after(model, self._after_forward)

    def _before_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._passes.current is not None:
            before, after = random_state(self._matrix.device), self._after_pass
            if after is not None and not torch.equal(before, after):
                self._on_note(_MOVED)
            self._before_pass = before
            self._passes.current.keep("random_state", self._use_random_state, self._before_pass)

    def _use_random_state(self, before: torch.Tensor) -> None:
        """Take the state before the first forward pass that the step uses."""
        if self._random is None:
            self._random = before

    def _after_forward(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._before_pass is not None:
            after = random_state(self._matrix.device)
            self._draws = self._draws or not torch.equal(self._before_pass, after)
            self._after_pass = after if self._draws else None
        self._before_pass = None

    @property
    def draws_nothing(self) -> bool:
        """Whether the model was called, and its forward pass drew no random numbers."""
        return self._draws is False

    def after_backward(
        self,
        variables: Collection[str],
        unscale: float,
        consumed: Set[torch.Tensor] = frozenset(),
        before: torch.Tensor | None = None,
    ) -> State:
        """Return the gradients before clipping; `unscale` multiplies them.

        Parameters
        ----------
        variables : collection of str
            Variables of the run; others are not returned.
        unscale : float
        consumed : set of tensor
            Parameters that were stepped in this step; they keep their values of `before`.
        before : tensor, (element,), optional
            Gradients of the step so far.
        """
        if not self._others or _GRADIENTS not in variables:
            return {}
        gradients = [gradient_of(tensor) for tensor in self._others]
        if consumed and before is not None:
            kept = before.split([tensor.numel() for tensor in self._others])
            gradients = [
                part.view(tensor.shape).to(tensor.dtype, copy=True)
                if tensor in consumed
                else None
                if grad is None
                else grad * unscale
                for tensor, grad, part in zip(self._others, gradients, kept, strict=True)
            ]
            unscale = 1.0
        if unscale != 1.0 and len(set(self._part_types(_GRADIENTS, gradients))) > 1:
            # Rounded to the type of each, not to that of the vector.
            gradients = [None if grad is None else grad * unscale for grad in gradients]
            unscale = 1.0
        nan = float("nan")
        return {_GRADIENTS: self._vector(_GRADIENTS, gradients, missing=nan, factor=unscale)}

    def rates(self, rates: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the rate of each group as a vector; NaN for None."""
        unknown = torch.tensor(float("nan"), dtype=torch.float64, device="cpu")
        return self._stacked([unknown if rate is None else rate for rate in rates])

    def after_step(
        self, variables: Collection[str], *, first: bool, is_keyframe: bool = True
    ) -> State:
        """Return the state after the step, and the random state before it.

        Parameters
        ----------
        variables : collection of str
            Variables of the run; others are not returned.
        first : bool
            True as long as the run is not created, so that it can have more variables.
        is_keyframe : bool
            False to return only what each row has.

        Raises
        ------
        RecordingError
            If the run lacks something that the step has changed.
        """
        if first and is_keyframe:
            self.kept = find_kept(self.optimizer, self.kept)
        state = self._state(variables) if is_keyframe else {}
        random, self._random, self._after_pass = self._random, None, None
        if random is not None and self._draws:
            if not first and "random_state" not in variables:
                raise CannotFollow(
                    "the model draws random numbers in this step, but did not in the first one, so "
                    "the run has no random_state; switch dropout on before the first step"
                )
            state["random_state"] = random.to(torch.bfloat16)  # it holds 0 to 256 exactly
        buffers = None if self._buffers is None else self._buffers.after_step(first=first)
        if buffers is not None:
            state["buffers"] = buffers
        return state

    def _state(self, variables: Collection[str], *, initial: bool = False) -> State:
        """Return the parameters, and what the optimizer keeps of them."""
        values_of: State = {}
        if self._others and "params" in variables:
            values_of["params"] = self._vector("params", self._others, initial=initial)
        state = self.optimizer.state
        for entry in self.kept:
            *_, name = kept_as(entry["name"], entry["of"]) or ("",)
            if name not in variables and (name in VARIABLES or not self.whole_state or not name):
                continue
            of_elements = entry["of"] == "element"
            values = kept_values(state, self._others if of_elements else self._tensors, entry)
            if all(value is None for value in values):
                continue
            if of_elements:
                values_of[name] = self._vector(name, values, initial=initial)
            else:
                values_of[name] = self._numbers(values)
        if self.whole_state and state_attribute(self.optimizer, self.kept):
            values_of[KEPT.name] = self._marks()
        return values_of

    def _numbers(self, values: Sequence[Any]) -> torch.Tensor:
        """Return numbers that an optimizer keeps as a vector of float64; 0 for None."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        alike = len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
        if alike and len(tensors) == len(values):
            return as_float64(torch.stack(tensors))
        numbers = [as_float64(0.0 if value is None else value) for value in values]
        return self._stacked([number.reshape(()) for number in numbers])

    def _marks(self) -> torch.Tensor:
        """Return which values the optimizer keeps of each parameter, as the sum of their bits."""
        bits = {entry["name"]: 1 << place for place, entry in enumerate(self.kept)}
        marks = []
        for tensor in self._tensors:
            kept = self.optimizer.state.get(tensor, {})
            names = [str(name) for name, value in kept.items() if value is not None]
            if new := [name for name in names if name not in bits]:
                raise CannotFollow(
                    f"the optimizer now keeps {', '.join(new)}, but did not in the first row; "
                    "record a new run"
                )
            marks.append(float(sum(bits[name] for name in names)))
        return torch.tensor(marks, dtype=torch.float64, device="cpu")

    def _vector(
        self,
        name: str,
        tensors: Sequence[torch.Tensor | None],
        *,
        missing: float = 0.0,
        factor: float = 1.0,
        initial: bool = False,
    ) -> JoinedVector:
        """Return a vector of the current step, or of the `initial` state.

        Raises
        ------
        RecordingError
            If a tensor has another type than in the first row.
        """
        types = self._part_types(name, tensors)
        before = types if initial else self._types.setdefault(name, types)
        if types != before:
            changes = zip(self._other_names, types, before, strict=True)
            part, now, was = next(change for change in changes if change[1] != change[2])
            raise CannotFollow(
                f"{name}: {part} is now {type_name(now)}, but was {type_name(was)} in the first "
                "row; record a new run for the new type"
            )
        return JoinedVector(
            like=self._others,
            tensors=tensors,
            dtype=joint_type(frozenset(types)),
            missing=missing,
            factor=factor,
        )

    def _part_types(self, name: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.dtype]:
        """Return the type of each; for None, the one that it will probably have."""
        if all(tensor is not None for tensor in tensors):
            return [tensor.dtype for tensor in tensors if tensor is not None]
        pairs = list(zip(self._others, tensors, strict=True))
        chosen = {} if name in ("params", _GRADIENTS) else self._state_types
        types = {p.dtype: tensor.dtype for p, tensor in pairs if tensor is not None}
        return [
            chosen.get(id(p), types.get(p.dtype, p.dtype)) if tensor is None else tensor.dtype
            for p, tensor in pairs
        ]

    def _stacked(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        """Return a vector of numbers, on the device of the matrix if theirs differ."""
        if len({number.device for number in numbers}) > 1:
            numbers = [number.to(self._matrix.device) for number in numbers]
        return torch.stack(numbers)


def _places_in(optimizer: JoinedOptimizer) -> dict[int, tuple[int, int]]:
    """Return group and position of each parameter of an optimizer, by its `id`."""
    return {
        id(tensor): (number, position)
        for number, group in enumerate(optimizer.param_groups)
        for position, tensor in enumerate(group["params"])
    }


def _type_key(vector: str) -> str:
    """Return the key of a parameter's own type in a vector, in the table of parameters."""
    return f"{vector.removeprefix('params_')}_dtype"
