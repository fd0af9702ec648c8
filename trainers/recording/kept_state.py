"""What an optimizer keeps of each parameter: tensors of its shape, numbers, and anything else."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trajstore.schema import KEPT, NUMBERS, OPTIMIZER_STATE, VARIABLES, coordinate, kept_as
from trajstore.trainers.recording.flat_vectors import FLOATS, type_name
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.trainers.recording.parameters import as_dense, as_float64
from trajstore.trainers.recording.run_notes import CannotFollow
from trajstore.trainers.recording.sharding import is_sharded
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
    found = {entry["name"]: entry for entry in known}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if matrix is not None and optimizer.state.get(matrix):
        parameters = [matrix]
    for parameter in sorted(parameters, key=lambda one: one.ndim == 0):
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            entry = found.setdefault(str(name), _entry(name, parameter, value))
            if not _fits(entry, parameter, value):
                found[str(name)] = {"name": str(name), "of": "other"}
    return list(found.values())


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
    found, name = [], entry["name"]
    for parameter in parameters:
        value = state.get(parameter, {}).get(name)
        if value is not None and not _fits(entry, parameter, value):
            raise CannotFollow(
                f"the optimizer now keeps another kind of {name} than in the first row; record a "
                "new run"
            )
        found.append(as_dense(value) if isinstance(value, torch.Tensor) else value)
    return found


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
    found: Entry = {"name": str(name), "of": "other"}
    for entry in ({**found, "of": "element"}, {**found, "of": "parameter", "type": _type(value)}):
        if _is_free(name, entry["of"]) and _fits(entry, parameter, value):
            return entry
    return found


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
