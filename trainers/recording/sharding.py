"""A recorded parameter whose rows are sharded over processes: what each has of it, and all of it.

FSDP2 (`torch.distributed.fsdp.fully_shard`) and tensor parallelism both hold a parameter as a
`DTensor` that is ``Shard(0)``: each process has consecutive tokens. Each records those, into one
run (`trajstore.store.writing.token_share`); nobody gathers a matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from trajstore.errors import RecordingError
from trajstore.schema import MODEL, OF_EXAMPLES, VARIABLES
from trajstore.store.writing.token_share import TokenShare
from trajstore.trainers.recording.parameters import RecordedParameter, unwrap

__all__ = [
    "agreed",
    "find_shares",
    "has_rows_of",
    "is_distributed",
    "is_sharded",
    "own_logits",
    "own_rows",
    "total_norm",
    "whole",
]

_PATIENCE = timedelta(minutes=5)
"""How long a process waits for what the others have to say of a block."""

_KNOWN = (
    "known is Shard(0) over one dimension of all processes, in their order, as fully_shard(model) "
    "makes it"
)


def is_distributed() -> bool:
    """Whether several processes train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is held by several processes together."""
    if not is_distributed():
        return False
    from torch.distributed.tensor import DTensor  # takes long, and not every torch has it

    return isinstance(tensor, DTensor)


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Tokens that this process holds of a matrix, where they lie; all if it is not shared.

    Parameters
    ----------
    tensor : tensor, (token, hidden)
        Of a gradient, tensor parallelism may leave all tokens in each process, or a summand: then
        every process asks for its tokens at once.
    """
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Shard

    shared: Any = tensor
    local: torch.Tensor = shared.redistribute(placements=[Shard(0)]).to_local()
    return local


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Where it is shared, every process asks for it at once."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` has it.

    Where gradients are sharded over one mesh of processes it is added up as that does, and may
    differ in the last bit from the norm of gradients that one process holds. Where only some are
    sharded, it is the norm of their norms.

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
    """Whether something holds in all processes that share a parameter.

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
    """Logits of the recorded tokens of this process; None if they are of another vocabulary.

    Every process that trains sees its own batch: they are those of the first one. Where the head
    itself is sharded, each process has made its own part of them.

    Parameters
    ----------
    logits : tensor, (token,)
        Of this process, or its part of them.
    parameter : tensor, (token, hidden)
    """
    if not is_sharded(parameter):
        return logits if len(logits) == len(parameter) else None
    logits = whole(logits)
    own = own_rows(parameter)
    if len(logits) != len(parameter):
        return logits if len(logits) == len(own) else None
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    logits = logits.clone()
    torch.distributed.broadcast(logits, 0, group=mesh.get_group())
    share = _share_of(mesh.get_local_rank(), mesh.size())
    return logits[share.tokens(len(parameter))]


def has_rows_of(share: TokenShare | None, variable: str) -> bool:
    """Whether a process records anything of a variable: without tokens it is the first one's."""
    return share is None or share.is_first or "token" in VARIABLES[variable].dims


def find_shares(
    model: torch.nn.Module,
    parameters: Sequence[RecordedParameter],
    variables: Collection[str],
    *,
    all_tokens: bool,
) -> list[TokenShare | None]:
    """Share of this process in the run of each parameter; None for those that are not sharded.

    Called by all processes of a training at once.

    Parameters
    ----------
    model : Module
    parameters : sequence of RecordedParameter
    variables : collection of str
        That are to be recorded.
    all_tokens : bool
        Whether that is done of all tokens.

    Raises
    ------
    RecordingError
        If a parameter is sharded in a way, or something is recorded of it, that is not known here.
    """
    trained = [tensor for tensor in unwrap(model).parameters() if tensor.requires_grad]
    if not any(map(is_sharded, trained)):
        return [None] * len(parameters)
    for parameter in parameters:
        _check_placement(parameter)
    _check_variables(model, variables, all_tokens=all_tokens)
    return [_new_share() for _ in parameters]


def _check_placement(parameter: RecordedParameter) -> None:
    tensor: Any = parameter.tensor
    if not is_sharded(tensor):
        raise RecordingError(
            f"{parameter.name} is no DTensor, and other parameters of the model are; {_KNOWN}"
        )
    mesh, world = tensor.device_mesh, torch.distributed.get_world_size()
    in_order = mesh.ndim == 1 and mesh.mesh.tolist() == list(range(world))
    if not in_order or not tensor.placements[0].is_shard(0):
        raise RecordingError(
            f"{parameter.name} is {', '.join(map(str, tensor.placements))} over the processes "
            f"{mesh.mesh.tolist()}; {_KNOWN}"
        )


def _check_variables(
    model: torch.nn.Module, variables: Collection[str], *, all_tokens: bool
) -> None:
    if not all_tokens:
        raise RecordingError(
            "tokens: of a parameter that is sharded over processes all tokens are recorded; leave "
            "the choice out, or take the tokens from the run afterwards"
        )
    from torch.distributed.fsdp import FSDPModule

    of_model = [name for name in MODEL if name in variables]
    if of_model:
        raise RecordingError(
            f"{', '.join(of_model)}: of sharded parameters no norms are recorded; record weights, "
            "weights+grads or all"
        )
    of_examples = [name for name in OF_EXAMPLES if name in variables]
    if of_examples and not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise RecordingError(
            f"{', '.join(of_examples)}: in a tensor-parallel training every process sees the same "
            "examples, and they would be recorded once for each; leave them out"
        )


def _new_share() -> TokenShare:
    """Of this process, with a group of its own, through which the writer's thread speaks."""
    share = _share_of(torch.distributed.get_rank(), torch.distributed.get_world_size())
    channel = _Channel(share.count)
    return replace(share, exchange=channel.exchange, close=channel.close)


def _share_of(number: int, count: int) -> TokenShare:
    return TokenShare(number=number, count=count, exchange=lambda value: [value])


class _Channel:
    """A group of all processes, until it is closed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def exchange(self, value: Any) -> list[Any]:
        said: list[Any] = [None] * self._count
        try:
            torch.distributed.all_gather_object(said, value, group=self._group)
        except RuntimeError as error:
            raise RecordingError(
                "another process that records the same run has ended, or has said nothing for "
                f"{_PATIENCE.seconds // 60} minutes; what was committed is whole ({error})"
            ) from error
        return said

    def close(self) -> None:
        """End its connections and threads. Twice does no harm."""
        group, self._group = self._group, None
        # Whoever has left the training altogether has ended all groups.
        if group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(group)
