"""Four summaries per step of every parameter of the model, computed on its device.

The results are vectors with one number per parameter; nothing larger leaves the device. During the
optimizer's step a copy of the parameters that it may change stays on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.parameters import gradient_of, unwrap
from trajstore.trainers.recording.torch_internals import (
    copy_each,
    differences,
    multiply_each,
    name_outside_compile,
    norms,
    sign_each,
    signs,
)

__all__ = ["ModelParameters"]

_OF_UPDATES = ("param_update_norm", "param_update_lost")


class ModelParameters:
    """All parameters of a model; tied ones once, by the first of their names.

    `param_update_lost` counts elements with a nonzero gradient in the step, for any optimizer. It
    is the fraction whose value the step did not change. −0 and +0 are the same value.

    Parameters
    ----------
    model : Module
        Wrapped or not.
    optimizer : Optimizer
    device : torch.device
        Device of the vectors.
    variables : collection of str
        Recorded variables; others are not computed.

    Attributes
    ----------
    names : tuple of str
        Names of the parameters with a floating-point type.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        variables: Collection[str],
    ) -> None:
        named = {
            name_outside_compile(name): tensor
            for name, tensor in unwrap(model).named_parameters()
            if tensor.is_floating_point()
        }
        self.names = tuple(named)
        self._tensors: list[torch.Tensor] = list(named.values())
        self._variables = frozenset(variables)
        self._optimizer = optimizer
        self._groups: dict[int, dict[str, Any]] = {}  # of the parameters, found in each step
        self._before: dict[int, torch.Tensor] = {}
        self._gradient_norms: torch.Tensor | None = None
        self._nan = torch.tensor(float("nan"), device=device)

    @torch.no_grad()
    def initial(self) -> dict[str, torch.Tensor]:
        """Return the values before the first step by variable."""
        return {"param_norm": self._vector(dict(enumerate(norms(self._tensors))))}

    def after_backward(self, unscale: float) -> None:
        """Take the gradients before clipping; `unscale` multiplies their norms."""
        if "param_grad_norm" not in self._variables:
            return
        gradients = self._gradients()
        lengths = zip(gradients, norms(list(gradients.values())), strict=True)
        self._gradient_norms = self._vector(dict(lengths)) * unscale

    def before_step(self) -> None:
        """Copy the values that the optimizer is about to change."""
        if self._variables.isdisjoint(_OF_UPDATES):
            return
        self._find_groups()
        for place in self._groups.keys() - self._before.keys():
            self._before[place] = torch.empty_like(self._tensors[place])
        copy_each(list(self._before.values()), [self._tensors[place] for place in self._before])

    def _find_groups(self) -> None:
        groups = {id(p): one for one in self._optimizer.param_groups for p in one["params"]}
        self._groups = {
            place: groups[id(p)] for place, p in enumerate(self._tensors) if id(p) in groups
        }

    def after_step(self, *, skipped: bool) -> dict[str, torch.Tensor]:
        """Return the results of the step by variable.

        Returns
        -------
        dict of str to tensor of float32, (parameter,)
            NaN for a parameter without a gradient. In `param_update_lost` also NaN for a learning
            rate of 0, a gradient of zeros, and a step that the gradient scaler skipped.
        """
        values: dict[str, torch.Tensor] = {}
        if "param_norm" in self._variables:
            values |= self.initial()
        if self._gradient_norms is not None:
            values["param_grad_norm"] = self._gradient_norms
            self._gradient_norms = None
        if not self._variables.isdisjoint(_OF_UPDATES):
            values |= self._updates(skipped=skipped)
        return values

    def _updates(self, *, skipped: bool) -> dict[str, torch.Tensor]:
        if skipped:
            self._find_groups()
        gradients = {p: grad for p, grad in self._gradients().items() if p in self._groups}
        if skipped or not gradients:
            zeros = dict.fromkeys(gradients, torch.zeros_like(self._nan))
            return {
                "param_update_norm": self._vector(zeros),
                "param_update_lost": self._vector({}),
            }
        changes = differences(
            [self._tensors[place] for place in gradients],
            [self._before[place] for place in gradients],
        )
        lengths = dict(zip(gradients, norms(changes), strict=True))
        gradient_signs = signs(list(gradients.values()))
        sign_each(changes)
        multiply_each(changes, gradient_signs)
        # Sums of ones are integers, which float32 counts exactly up to 2²⁴.
        wanted = self._vector(dict(zip(gradients, norms(gradient_signs, 1), strict=True)))
        moved = self._vector(dict(zip(gradients, norms(changes, 1), strict=True)))
        return {
            "param_update_norm": self._vector(lengths),
            "param_update_lost": (wanted - moved) / wanted * self._one_where_trained(gradients),
        }

    def _one_where_trained(self, places: Collection[int]) -> torch.Tensor:
        """Return 1 if the learning rate is not 0, NaN otherwise."""
        rates = {place: self._groups[place].get("lr") for place in places}
        one = torch.ones_like(self._nan)
        if not any(isinstance(rate, torch.Tensor) for rate in rates.values()):
            return self._vector({place: one for place, rate in rates.items() if rate != 0})
        return self._vector(
            {
                place: torch.where(torch.as_tensor(rate).to(one.device) != 0, one, self._nan)
                for place, rate in rates.items()
            }
        )

    def _gradients(self) -> dict[int, torch.Tensor]:
        found = ((place, gradient_of(tensor)) for place, tensor in enumerate(self._tensors))
        return {place: gradient for place, gradient in found if gradient is not None}

    def _vector(self, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return one number for each parameter; NaN if it has none."""
        nan = self._nan
        numbers: Sequence[torch.Tensor] = [
            values[place].to(nan.device, nan.dtype).reshape(()) if place in values else nan
            for place in range(len(self._tensors))
        ]
        return torch.stack(list(numbers))
