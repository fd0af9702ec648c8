"""Recorded parameters whose rows are sharded over processes.

FSDP2 (`torch.distributed.fsdp.fully_shard`) and tensor parallelism hold a parameter as a `DTensor`
with ``Shard(0)``: each process has consecutive tokens. Each process records its tokens into one run
(`trajstore.store.writing.resumed_run`). No process gathers the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from trajstore.errors import RecordingError
from trajstore.schema import EVERYTHING, MODEL, OF_EXAMPLES, VARIABLES
from trajstore.store.writing.resumed_run import ALONE, TokenShare
from trajstore.trainers.recording.options import RecordingOptions
from trajstore.trainers.recording.parameters import RecordedParameter, unwrap

_TIMEOUT = timedelta(minutes=5)
"""Time that a process waits for the replies of the others about a block."""

_SUPPORTED = (
    "shard it with fully_shard(model): only Shard(0) over one dimension of all processes, in their "
    "order, is supported"
)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_distributed() -> bool:
    """Return True if several processes train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True if several processes hold a tensor together."""
    if type(tensor) in _PLAIN or not is_distributed():
        return False
    from torch.distributed.tensor import DTensor  # takes long, and not every torch has it

    return isinstance(tensor, DTensor)


def has_fsdp(model: torch.nn.Module) -> bool:
    """Return True if FSDP2 shards a part of a model."""
    if not is_distributed():
        return False
    from torch.distributed.fsdp import FSDPModule  # takes long, and not every torch has it

    return any(isinstance(module, FSDPModule) for module in model.modules())


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a matrix that this process holds; all if it is not sharded.

    Parameters
    ----------
    tensor : tensor, (token, hidden)
        Tensor parallelism may leave all tokens of a gradient, or a summand, in each process. Then
        all processes call this function at once.
    """
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Shard

    local: torch.Tensor = tensor.redistribute(placements=[Shard(0)]).to_local()  # type: ignore[attr-defined]
    return local


def own_tokens(tensor: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens `ids` of a tensor, (token, …), or all; those of this process if sharded."""
    rows = own_rows(tensor.detach())
    return rows if ids is None else rows.index_select(0, ids)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. If it is sharded, all processes call this function at once."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does.

    Gradients that are all sharded over one mesh are added as there. The last bit may differ from
    the norm of gradients in one process. If only some are sharded, it is the norm of their norms.

    Parameters
    ----------
    gradients : sequence of tensor
    """
    meshes = [gradient.device_mesh for gradient in gradients if is_sharded(gradient)]  # type: ignore[attr-defined]
    if len(meshes) in (0, len(gradients)) and all(mesh == meshes[0] for mesh in meshes):
        return whole(torch.nn.utils.get_total_norm(list(gradients)))
    norms = [whole(torch.linalg.vector_norm(gradient)) for gradient in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def agreed(truth: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return True if a condition holds in all processes that share a parameter.

    Parameters
    ----------
    truth : tensor of bool, ()
    parameter : tensor
    """
    if not is_sharded(parameter):
        return truth
    least = truth.to(torch.int32)
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=mesh.get_group())
    return least.bool()


def own_logits(logits: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the logits of this process's tokens; None if they have another vocabulary.

    Every process trains on its own batch; the result has the logits of the first one. If the head
    is sharded, each process has computed a part of them.

    Parameters
    ----------
    logits : tensor, (token,)
        Logits of this process, or its part of them.
    parameter : tensor, (token, hidden)
    """
    if not is_sharded(parameter):
        return logits if len(logits) == len(parameter) else None
    logits = whole(logits)
    rows = own_rows(parameter)
    if len(logits) != len(parameter):
        return logits if len(logits) == len(rows) else None
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    logits = logits.clone()
    torch.distributed.broadcast(logits, 0, group=mesh.get_group())
    share = replace(ALONE, number=mesh.get_local_rank(), count=mesh.size())
    return logits[share.tokens(len(parameter))]


def own_variables(share: TokenShare | None, variables: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a process records of some variables; the first one also those without tokens."""
    if share is None or share.is_first:
        return variables
    return tuple(name for name in variables if "token" in VARIABLES[name].dims)


def find_shares(
    model: torch.nn.Module, parameters: Sequence[RecordedParameter], options: RecordingOptions
) -> list[TokenShare | None]:
    """Return the share of this process in each parameter's run; None if it is not sharded.

    All processes of a training run call this function at once.

    Parameters
    ----------
    model : Module
    parameters : sequence of RecordedParameter
    options : RecordingOptions

    Raises
    ------
    RecordingError
        If the sharding of a parameter, or a variable of a sharded parameter, is not supported.
    """
    trained = [tensor for tensor in unwrap(model).parameters() if tensor.requires_grad]
    if not any(map(is_sharded, trained)):
        return [None] * len(parameters)
    for parameter in parameters:
        _check_placement(parameter)
    _check_variables(model, options)
    return [_new_share() for _ in parameters]


def _check_placement(parameter: RecordedParameter) -> None:
    tensor: Any = parameter.tensor
    if not is_sharded(tensor):
        raise RecordingError(
            f"{parameter.name} is not a DTensor, but other parameters of the model are; "
            f"{_SUPPORTED}"
        )
    mesh, world = tensor.device_mesh, torch.distributed.get_world_size()
    in_order = mesh.ndim == 1 and mesh.mesh.tolist() == list(range(world))
    if not in_order or not tensor.placements[0].is_shard(0):
        raise RecordingError(
            f"{parameter.name} is {', '.join(map(str, tensor.placements))} over the processes "
            f"{mesh.mesh.tolist()}; {_SUPPORTED}"
        )


def _check_variables(model: torch.nn.Module, options: RecordingOptions) -> None:
    variables = options.resolved
    if not (isinstance(options.tokens, str) and options.tokens == "all"):
        raise RecordingError(
            "tokens: a parameter that is sharded over processes is recorded with all tokens; leave "
            "out tokens, or select tokens after recording"
        )
    if of_state := [name for name in EVERYTHING if name in variables]:
        raise RecordingError(
            f"{of_state[0]}: the state of a model with sharded parameters cannot be recorded; "
            "record weights, weights+grads or matrix"
        )
    if of_model := [name for name in MODEL if name in variables]:
        raise RecordingError(
            f"{', '.join(of_model)}: norms of sharded parameters cannot be recorded; record "
            "weights, weights+grads or matrix"
        )
    if (of_examples := [name for name in OF_EXAMPLES if name in variables]) and not has_fsdp(model):
        raise RecordingError(
            f"{', '.join(of_examples)}: in a tensor-parallel training all processes have the same "
            "examples, which would be recorded once per process; leave them out"
        )


def _new_share() -> TokenShare:
    """Return the share of this process, with its own group for the writer's thread."""
    number, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group: Any = torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)

    def exchange(value: Any) -> list[Any]:
        replies: list[Any] = [None] * count
        try:
            torch.distributed.all_gather_object(replies, value, group=group)
        except RuntimeError as error:
            raise RecordingError(
                "another process that records the same run has ended, or has not replied for "
                f"{_TIMEOUT.seconds // 60} minutes; the committed rows are complete ({error})"
            ) from error
        return replies

    def close() -> None:
        """End the group's connections and threads; further calls have no effect."""
        nonlocal group
        ended, group = group, None
        # A process that has left the training has ended all groups.
        if ended is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(ended)

    return TokenShare(number=number, count=count, exchange=exchange, close=close)
