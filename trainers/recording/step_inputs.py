"""The inputs of a step: the tensors that its forward passes got.

A row has 64-bit words. The first word is the number of bytes of a description, JSON text in UTF-8,
which follows in as many whole words. It lists for each forward pass the name, type and shape of
each tensor. Then follow the values of all tensors, one word each: an integer, or the bits of a
floating-point number as a signed integer; of a complex number, both parts. The rest of the row is
0. A row that begins with 0 has no inputs.
"""

from __future__ import annotations

import inspect
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import InvalidArgument
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.examples import EXAMPLE_INDEX
from trajstore.trainers.recording.forward_values import ForwardPasses
from trajstore.trainers.recording.hooks import ModuleHooks
from trajstore.trainers.recording.parameters import as_dense

Inputs = dict[str, torch.Tensor]
"""The tensors of one forward pass, by the names of the model's arguments."""

_ONE = (
    "steps are developed from the tensor {name} alone, which the model gets; if the loss needs "
    "others, such as targets, pass all with observe(inputs=…)"
)
_TOO_LONG = (
    "inputs: a step has {words} words, but the rows have room for {room}; such a step cannot be "
    "developed. Start with the largest batch"
)


class StepInputs:
    """Takes the inputs of the step in progress.

    Parameters
    ----------
    on_note : callable
        Called with a sentence about inputs that are not recorded.

    Attributes
    ----------
    room : int
        Words of a row; 0 before the first row.
    are_observed : bool
        True if the loop passes them.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self.room = 0
        self.are_observed = False
        self._on_note = on_note
        self._signature: inspect.Signature | None = None
        self._parts: list[Inputs] = []

    def begin_step(self) -> None:
        """Discard the inputs of the previous step."""
        self._parts = []

    def watch(self, hooks: ModuleHooks, model: torch.nn.Module, passes: ForwardPasses) -> None:
        """Add the hook on the model, inside its pass."""
        self._passes = passes
        self._signature = inspect.signature(model.forward)
        hooks.before(model, self._on_model_input)

    def _on_model_input(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._passes.current is None or self._signature is None:
            return
        named = self._signature.bind_partial(*args, **kwargs).arguments
        kinds = {entry.name: entry.kind for entry in self._signature.parameters.values()}
        for name in [name for name in named if kinds[name] is inspect.Parameter.VAR_KEYWORD]:
            named |= named.pop(name)
        named.pop(EXAMPLE_INDEX, None)
        self._passes.current.keep("inputs", self._parts.append, self._taken(named))

    def observe(self, inputs: Any) -> Callable[[], None]:
        """Return a function that uses the inputs of a micro-batch in place of the hooks'.

        Raises
        ------
        InvalidArgument
            If they are no dict.
        """
        if not isinstance(inputs, Mapping):
            raise InvalidArgument(
                f"inputs: got {reprlib.repr(inputs)}, expected a dict of tensors by name"
            )
        taken, self.are_observed = self._taken(inputs), True
        return lambda: self._parts.append(taken)

    def _taken(self, named: Mapping[str, Any]) -> Inputs:
        # Copies: the loop may fill the tensors again.
        return {name: as_dense(value.detach()).clone() for name, value in _tensors(named)}

    def note_single(self) -> None:
        """Note that the model gets one tensor only, perhaps without targets."""
        if max(map(len, self._parts), default=0) == 1:
            self._on_note(_ONE.format(name=next(iter(self._parts[0]))))

    def value(self) -> torch.Tensor | None:
        """Return the words of the current step; None if no forward pass had inputs."""
        if not any(self._parts):
            return None
        description = json.dumps(
            [
                [[name, type_name(part.dtype), [*part.shape]] for name, part in inputs.items()]
                for inputs in self._parts
            ],
            separators=(",", ":"),
        ).encode()
        text = np.frombuffer(description + bytes(-len(description) % 8), "<i8")
        head = torch.tensor([len(description), *text.tolist()], device="cpu")
        tensors = [part for inputs in self._parts for part in inputs.values()]
        device = tensors[0].device
        values = [
            part.flatten().view(_stored_type(part.dtype)).to(device, torch.int64)
            for part in tensors
        ]
        size = len(head) + sum(map(len, values))
        self.room = self.room or 2 << size.bit_length()  # room for longer batches
        if size > self.room:
            self._on_note(_TOO_LONG.format(words=size, room=self.room))
            return torch.zeros(self.room, dtype=torch.int64, device="cpu")
        rest = torch.zeros(self.room - size, dtype=torch.int64, device=device)
        return torch.cat([head.to(device, non_blocking=True), *values, rest])


def decoded(words: npt.NDArray[np.int64]) -> list[Inputs]:
    """Return the inputs of each forward pass of a row, on the CPU; none if it has none.

    Raises
    ------
    ValueError
        If the description is damaged.
    """
    length = int(words[0])
    if not length:
        return []
    begin = 1 + -(-length // 8)
    description = json.loads(words[1:begin].astype("<i8").tobytes()[:length])
    passes: list[Inputs] = []
    for tensors in description:
        passes.append({})
        for name, kind, shape in tensors:
            flat = torch.empty(math.prod(shape), dtype=getattr(torch, kind), device="cpu")
            stored = _stored_type(flat.dtype)
            if count := flat.nbytes // stored.itemsize:
                flat.view(stored).copy_(torch.from_numpy(words[begin : begin + count].copy()))
            passes[-1][name] = flat.view(shape)
            begin += count
    return passes


def _tensors(named: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of arguments by name; those of a mapping or sequence as ``NAME.KEY``."""
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _tensors({f"{name}.{key}": part for key, part in value.items()})
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _tensors({f"{name}.{key}": part for key, part in enumerate(value)})


def _stored_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of integers that holds the values of a type, or the bits of its numbers."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    kind: torch.dtype = getattr(torch, f"int{8 * dtype.to_real().itemsize}")
    return kind
