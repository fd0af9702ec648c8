"""Steps that a sound recording cannot prove, because torch rounds them otherwise than a replay."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.sharding import is_sharded
from trajstore.trainers.recording.torch_internals import is_compiled_call

_COALESCING = (torch.optim.SparseAdam, torch.optim.Adagrad)
"""Optimizers that first add the rows of a sparse gradient."""


def why_unproven(optimizer: Optimizer, parameter: torch.Tensor) -> str | None:
    """Return a sentence if a step does not follow bit for bit from the recorded gradient."""
    gradient: Any = parameter.grad
    if is_compiled_call():
        return "optimizer.step() is compiled, so it rounds otherwise than torch's own"
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_sharded(parameter):
        # The kernels of a device round every element alike, those of a processor not the last ones.
        if parameter.device.type == "cpu" and (is_fused or parameter.itemsize < 4):
            return "each process steps its own rows, the last of which a processor rounds otherwise"
        return None
    if gradient.is_sparse:
        return _unordered_sum(optimizer, gradient)
    if is_fused and not (parameter.is_contiguous() and gradient.is_contiguous()):
        return (
            "a fused optimizer steps a matrix that is not contiguous in memory, where it rounds "
            "otherwise; a step does not follow bit for bit"
        )
    return None


def _unordered_sum(optimizer: Optimizer, gradient: torch.Tensor) -> str | None:
    """Return a sentence if an optimizer does not use the sum of the rows of a sparse gradient."""
    if isinstance(optimizer, _COALESCING):
        return None
    keeps_rows = any(group.get("momentum") for group in optimizer.param_groups)
    is_unique = gradient.is_coalesced() or (
        # A device would have to be waited for.
        gradient.device.type == "cpu" and gradient.coalesce()._nnz() == gradient._nnz()
    )
    if is_unique and not keeps_rows:
        return None
    return (
        f"{type(optimizer).__name__} adds the rows of a sparse gradient one by one; grad holds "
        "their sum, so a step does not follow from it bit for bit"
    )
