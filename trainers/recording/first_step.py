"""The check at the first step: what a recording will not be able to answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch

from trajstore.trainers.products import choose_products, modes_of_products
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.trainers.recording.parameters import gradient_of, rate_of
from trajstore.trainers.recording.sharding import is_sharded
from trajstore.trainers.recording.torch_internals import name_outside_compile

_LOOKED_AT = 4096  # elements of each parameter
_SHOWN = 3


class FirstStep:
    """Looks at the first step with a learning rate above 0.

    Parameters
    ----------
    model : Module
        Not wrapped.
    optimizer : JoinedOptimizer
    """

    def __init__(self, model: torch.nn.Module, optimizer: JoinedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_over = False

    def begin(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Copy some elements of each parameter that an optimizer with these groups may change."""
        if self.is_over:
            return
        trained = set()
        for group in groups:
            rate = rate_of(group)
            if rate is None or rate.item() > 0:
                trained |= {id(parameter) for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            gradient = gradient_of(parameter) if id(parameter) in trained else None
            if gradient is not None:
                used = (_part(gradient) != 0).any()
                self._before[name_outside_compile(name)] = _part(parameter).clone(), used

    def notes(self, kinds_of_autocast: Set[torch.dtype] = frozenset()) -> Iterator[str]:
        """Yield sentences about the step, once.

        Parameters
        ----------
        kinds_of_autocast : set of torch.dtype
            Types that autocast has chosen in forward passes on the CPU.
        """
        if not self._before:
            return
        self.is_over = True
        now = {name_outside_compile(name): p for name, p in self._model.named_parameters()}
        used = [name for name, (_, is_used) in self._before.items() if bool(is_used)]
        stuck = [name for name in used if torch.equal(self._before[name][0], _part(now[name]))]
        self._before.clear()
        if stuck:
            reason = "the updates round away in the type of the weights"
            if stuck == used:
                reason += ", or the optimizer only collects gradients at first"
            yield (
                f"the first step changed nothing in {_named(stuck)}, which had a gradient: {reason}"
            )
        known = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if outside := [name for name, p in now.items() if p.requires_grad and id(p) not in known]:
            yield (
                f"the optimizer lacks {len(outside)} parameters with requires_grad=True "
                f"({outside[0]}); if another optimizer trains them, pass a list of both"
            )
        kinds = {p.dtype for p in now.values()} | kinds_of_autocast
        device = next(iter(now.values())).device
        if not modes_of_products() and choose_products(kinds, device)[0] == "float32":
            yield (
                "this processor multiplies 16-bit matrices slowly; train inside "
                "trajstore.trainers.float32_products() to be several times as fast"
            )
        for one in self._optimizer.members:
            name = type(one).__name__
            if "scheduled_lr" in one.param_groups[0] or "ScheduleFree" in name:
                yield (
                    f"{name} computes its own rate from lr during warm-up; lr is that of the group"
                )


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first elements, or those of this process."""
    local = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local.detach().flatten()[:_LOOKED_AT]


def _named(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more parameters" if more > 0 else "")
