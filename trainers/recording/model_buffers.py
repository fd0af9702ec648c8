"""The buffers of a model that change while it is trained, as one vector."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trajstore.trainers.recording.flat_vectors import FLOATS, type_name
from trajstore.trainers.recording.run_notes import CannotFollow
from trajstore.trainers.recording.torch_internals import name_outside_compile, version

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
        asked: dict[str, torch.Tensor] = {}  # the answers are on a device
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
            one = next(iter(asked.values())).device
            answers = torch.stack([answer.to(one) for answer in asked.values()]).tolist()
            changed += itertools.compress(asked, answers)
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
