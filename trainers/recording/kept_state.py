"""What a next step depends on, besides parameters: the optimizer's state, buffers, generators.

An optimizer keeps tensors of a parameter's shape, numbers, and anything else. Buffers that change
form one vector. On a device the generators are the device's and the CPU's: some layers draw on the
CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from trajstore.errors import InvalidArgument
from trajstore.schema import KEPT, NUMBERS, OPTIMIZER_STATE, VARIABLES, coordinate, kept_as
from trajstore.trainers.recording.device_to_host import FLOATS, type_name
from trajstore.trainers.recording.notes import CannotFollow
from trajstore.trainers.recording.parameters import JoinedOptimizer, as_dense, as_float64
from trajstore.trainers.recording.sharding import is_sharded
from trajstore.trainers.recording.torch_internals import name_outside_compile, version
from trajstore.values.optimizer_rule import ADAM, MOMENTS

Entry = Mapping[str, str]
"""An entry of the attribute `OPTIMIZER_STATE`."""

ADAM_STATE: tuple[Entry, ...] = (
    {"name": "step", "of": "parameter", "type": "float32"},
    *({"name": name, "of": "element"} for name in MOMENTS),
)
"""Entries of a run without the attribute."""

_TAKEN = {KEPT.name, *VARIABLES}
_DIMENSIONS = {dim for entry in VARIABLES.values() for dim in entry.dims}


def find_kept(
    optimizer: JoinedOptimizer,
    known: Iterable[Entry] = (),
    *,
    matrix: torch.Tensor | None = None,
) -> list[Entry]:
    """Return what an optimizer keeps now, after the `known` entries, which keep their places.

    An optimizer may keep a value of some parameters in 8 bits, and of the others in their shape.
    Such a value has another form, unless it is asked only what is kept of a `matrix` with a state.
    """
    entries = {entry["name"]: entry for entry in known}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if matrix is not None and optimizer.state.get(matrix):
        parameters = [matrix]
    for parameter in sorted(parameters, key=lambda p: p.ndim == 0):
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            entry = entries.setdefault(str(name), _entry(name, parameter, value))
            if not _fits(entry, parameter, value):
                entries[str(name)] = {"name": str(name), "of": "other"}
    return list(entries.values())


def state_attribute(optimizer: JoinedOptimizer, kept: Iterable[Entry]) -> dict[str, Any]:
    """Return the attribute of the root, if the state is not that of Adam or plain SGD."""
    names = {type(member).__name__.removeprefix("Rounded") for member in optimizer.members}
    if (names <= {*ADAM} or names == {"SGD"}) and all(entry in ADAM_STATE for entry in kept):
        return {}
    return {OPTIMIZER_STATE: [dict(entry) for entry in kept]}


def kept_values(
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    parameters: Iterable[torch.Tensor],
    entry: Entry,
) -> list[Any]:
    """Return the values that an optimizer keeps of parameters; None for one without a value.

    Raises
    ------
    CannotFollow
        If one has another shape or type than the entry.
    """
    values, name = [], entry["name"]
    for parameter in parameters:
        value = state.get(parameter, {}).get(name)
        if value is not None and not _fits(entry, parameter, value):
            raise CannotFollow(
                f"the optimizer now keeps another kind of {name} than in the first row; record a "
                "new run"
            )
        values.append(as_dense(value) if isinstance(value, torch.Tensor) else value)
    return values


def kept_elements(parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter's shape in its state, by their names."""
    return {
        name: as_dense(value) for name, value in state.items() if is_element(name, parameter, value)
    }


def step_count(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the number of steps that an optimizer has counted with a parameter, if it does.

    It counts no step without a gradient, and begins again if the loop replaces its state.
    """
    count: Any = state.get("step")
    if isinstance(count, int | float) or (isinstance(count, torch.Tensor) and not count.ndim):
        return {"step_count": as_float64(count)}
    return {}


def is_element(name: object, parameter: torch.Tensor, value: Any) -> bool:
    """Return True if a value of a matrix can be recorded as a variable of its own name."""
    return _is_free(name, "element") and _is_like(parameter, value)


def _entry(name: object, parameter: torch.Tensor, value: Any) -> Entry:
    other: Entry = {"name": str(name), "of": "other"}
    for entry in ({**other, "of": "element"}, {**other, "of": "parameter", "type": _type(value)}):
        if _is_free(name, entry["of"]) and _fits(entry, parameter, value):
            return entry
    return other


def _is_plain(value: Any) -> bool:
    # Blocks of 8 bits pretend to be one tensor.
    return type(value) is torch.Tensor or (
        isinstance(value, torch.Tensor)
        and (not hasattr(value, "__tensor_flatten__") or is_sharded(value))
    )


def _is_like(parameter: torch.Tensor, value: Any) -> bool:
    return _is_plain(value) and value.shape == parameter.shape and value.dtype in FLOATS


def _fits(entry: Entry, parameter: torch.Tensor, value: Any) -> bool:
    if entry["of"] == "element":
        return _is_like(parameter, value)
    if entry["of"] == "parameter" and _type(value) == entry["type"] in NUMBERS:
        if isinstance(value, torch.Tensor):
            return _is_plain(value) and value.ndim == 0 and value.dtype != torch.bool
        return not isinstance(value, int) or abs(value) <= 2**53  # exact in float64
    return entry["of"] == "other"


def _type(value: Any) -> str:
    kind: Any = value.dtype if isinstance(value, torch.Tensor) else type(value)
    return type_name(kind)


@functools.cache
def _is_free(name: object, of: str) -> bool:
    """Return True if variables can have the names of a value, which no others have."""
    if name == "step" or name in MOMENTS:
        return (name == "step") == (of == "parameter")
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        return False
    taken = name.startswith(("param", "_")) or name in _DIMENSIONS or coordinate(name) is not None
    return not taken and _TAKEN.isdisjoint((name, *kept_as(name, of)))


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalizations. They may begin to change at any step."""


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a model, with their names outside `torch.compile`."""
    for name, tensor in model.named_buffers():
        yield name_outside_compile(name), tensor


class ModelBuffers:
    """Buffers whose values change in the first step, and statistics of normalizations.

    Parameters
    ----------
    model : Module
        Not wrapped.

    Attributes
    ----------
    names : tuple of str
        Recorded buffers; empty before the first step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.names: tuple[str, ...] = ()
        self._model = model
        buffers = dict(named_buffers(model))
        self._first = {name: tensor.detach().clone() for name, tensor in buffers.items()}
        self._marks = {name: (id(tensor), version(tensor)) for name, tensor in buffers.items()}

    def table(self) -> list[dict[str, Any]]:
        """Return the root attribute ``buffers``."""
        table, offset = [], 0
        for name in self.names:
            tensor = self._first[name]
            facts = {"name": name, "shape": list(tensor.shape), "dtype": type_name(tensor.dtype)}
            table.append({**facts, "offset": offset})
            offset += tensor.numel()
        return table

    def initial(self) -> torch.Tensor:
        """Return the recorded buffers before the first step, on the CPU."""
        return self._joined(self._first).cpu()

    def after_step(self, *, first: bool) -> torch.Tensor | None:
        """Return the recorded buffers after a step; None if there are none.

        Parameters
        ----------
        first : bool
            True as long as more buffers can be recorded.

        Raises
        ------
        RecordingError
            If a buffer has changed that the run lacks, or float64 does not have its values.
        """
        now = dict(named_buffers(self._model))
        if first:
            self._marks.clear()  # compare all values
        changed = self._changed(now)
        if changed and not first:
            raise CannotFollow(
                f"the buffer {changed[0]} changes in this step, but did not in the first one, so "
                "the run does not have it; record the tier matrix, or run the model once before "
                "the recording starts"
            )
        if changed:
            self.names = tuple(name for name in self._first if name in {*self.names, *changed})
        return self._joined(now) if self.names else None

    def _changed(self, now: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the buffers that are not recorded and have other values than at the start."""
        changed: list[str] = []
        asked: dict[str, torch.Tensor] = {}  # the flags are on a device
        for name, tensor in now.items():
            if name in self.names or self._marks.get(name) == (id(tensor), version(tensor)):
                continue
            first = self._first.get(name)
            if first is None or first.shape != tensor.shape or first.dtype != tensor.dtype:
                raise CannotFollow(
                    f"the buffer {name} has another shape or type than before the first step; "
                    "record the tier matrix, or run the model once before the recording starts"
                )
            self._marks[name] = (id(tensor), version(tensor))
            is_statistic = name.rpartition(".")[2] in _STATISTICS
            if not is_statistic and tensor.device.type != "cpu":
                asked[name] = (first != tensor).any()
            elif is_statistic or not torch.equal(first, tensor):
                changed.append(name)
        if asked:  # the training waits once for all
            device = next(iter(asked.values())).device
            are_changed = torch.stack([flag.to(device) for flag in asked.values()]).tolist()
            changed += itertools.compress(asked, are_changed)
        return changed

    def _joined(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the recorded buffers as one vector; float64 if their types differ."""
        chosen = {name: tensors[name].detach().flatten() for name in self.names}
        kinds = {tensor.dtype for tensor in chosen.values()}
        if len(kinds) == 1 and kinds.issubset(FLOATS):
            return torch.cat(list(chosen.values()))
        return torch.cat([_as_float64(name, tensor) for name, tensor in chosen.items()])


def _as_float64(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Convert a buffer exactly.

    Raises
    ------
    RecordingError
        If float64 does not have its values: complex numbers, or integers above 2⁵³.
    """
    if buffer.device.type == "mps":  # which has no float64
        buffer = buffer.cpu()
    wide = buffer.real.double() if buffer.is_complex() else buffer.double()
    if buffer.dtype not in FLOATS and not torch.equal(wide.to(buffer.dtype), buffer):
        raise CannotFollow(
            f"the buffer {name} has values of {buffer.dtype} that float64 does not have; record "
            "all instead of everything"
        )
    return wide


def random_state(device: torch.device) -> torch.Tensor:
    """Return the states of the generators, one after another, the CPU's last.

    Parameters
    ----------
    device : torch.device
        Device of the model.

    Returns
    -------
    tensor of uint8, (byte,)
        On the CPU.
    """
    host = torch.get_rng_state()
    if device.type == "cuda":
        return torch.cat([torch.cuda.get_rng_state(device), host])
    if device.type == "mps":
        return torch.cat([torch.mps.get_rng_state(), host])
    return host


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the generators to what `random_state` returned.

    Raises
    ------
    InvalidArgument
        If it was taken on another kind of device.
    """
    length, expected = len(torch.get_rng_state()), len(random_state(device))
    if len(state) != expected:
        raise InvalidArgument(
            f"random_state: got {len(state)} bytes, expected {expected} on {device}; use the kind "
            "of device that recorded them"
        )
    # Copies, as torch reads a part of a tensor from the beginning of the whole.
    of_device, host = state[:-length].clone(), state[-length:].clone()
    if device.type == "cuda":
        torch.cuda.set_rng_state(of_device, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(of_device)
    torch.set_rng_state(host)
