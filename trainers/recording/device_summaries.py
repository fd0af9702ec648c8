"""Summaries of a step that are computed on its device: of each token, and of each parameter.

Those of a token are defined by `trajstore.values.norms`. This second implementation in torch is for
weights on an accelerator. IEEE 754 defines the rounding of each of its operations, and the sums
have the same order, so both agree to the last bit on any device. All are computed in float64 (on
the CPU for MPS, which has no float64) and stored as float32.

Those of parameters are four vectors, with one number per parameter. Nothing larger leaves the
device. During the optimizer's step a copy of the parameters that it may change stays there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from trajstore.trainers.recording.parameters import as_float64, gradient_of, unwrap
from trajstore.trainers.recording.torch_internals import (
    copy_each,
    differences,
    multiply_each,
    name_outside_compile,
    norms,
    sign_each,
    signs,
)
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.norms import hidden_sum

_OF_UPDATES = ("param_update_norm", "param_update_lost")


class ModelParameters:
    """All parameters of a model; tied ones once, by the first of their names.

    `param_update_lost` counts elements with a nonzero gradient in the step, for any optimizer. It
    is the fraction whose value the step did not change. −0 and +0 are the same value.

    Parameters
    ----------
    model : Module
        Wrapped or not.
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
        self._before: dict[int, torch.Tensor] = {}
        self._found: dict[str, torch.Tensor] = {}  # of the step so far
        self._nan = torch.tensor(float("nan"), device=device)

    @torch.no_grad()
    def initial(self) -> dict[str, torch.Tensor]:
        """Return the values before the first step by variable."""
        return {"param_norm": self._vector(dict(enumerate(norms(self._tensors))))}

    def after_backward(self, unscale: float, consumed: Set[torch.Tensor] = frozenset()) -> None:
        """Take the gradients before clipping; `unscale` multiplies their norms.

        Parameters that were stepped in this step, `consumed`, keep the norms that they have.
        """
        if "param_grad_norm" not in self._variables:
            return
        gradients = self._gradients()
        lengths = zip(gradients, norms(list(gradients.values())), strict=True)
        places = [place for place, p in enumerate(self._tensors) if p not in consumed]
        self._put({"param_grad_norm": self._vector(dict(lengths)) * unscale}, places)

    def before_step(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Copy the values that an optimizer with these groups is about to change."""
        if self._variables.isdisjoint(_OF_UPDATES):
            return
        places = list(self._places(groups))
        for place in places:
            if place not in self._before:
                self._before[place] = torch.empty_like(self._tensors[place])
        copy_each([self._before[p] for p in places], [self._tensors[p] for p in places])

    def _places(self, groups: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Return the group of each parameter that is in one of the groups."""
        group_of = {id(p): group for group in groups for p in group["params"]}
        tensors = enumerate(self._tensors)
        return {place: group_of[id(p)] for place, p in tensors if id(p) in group_of}

    def _put(self, values: dict[str, torch.Tensor], places: Collection[int]) -> None:
        """Keep the values of some parameters; those of others stay."""
        if len(places) < len(self._tensors) and not self._found.keys().isdisjoint(values):
            has_tensor = [place in places for place in range(len(self._tensors))]
            mask = torch.tensor(has_tensor, device="cpu")
            mask = mask.to(self._nan.device, non_blocking=True)  # without a wait for the device
            values = {n: torch.where(mask, new, self._found[n]) for n, new in values.items()}
        self._found |= values

    def after_update(self, groups: Iterable[Mapping[str, Any]], *, skipped: bool) -> None:
        """Take the updates of an optimizer with these groups, right after its step."""
        if not self._variables.isdisjoint(_OF_UPDATES):
            places = self._places(groups)
            self._put(self._updates(places, skipped=skipped), places)

    def after_step(self) -> dict[str, torch.Tensor]:
        """Return the results of the step by variable.

        Returns
        -------
        dict of str to tensor of float32, (parameter,)
            NaN for a parameter without a gradient. In `param_update_lost` also NaN for a learning
            rate of 0, a gradient of zeros, and a step that the gradient scaler skipped.
        """
        values, self._found = self._found, {}
        if "param_norm" in self._variables:
            values |= self.initial()
        return values

    def _updates(
        self, groups: Mapping[int, Mapping[str, Any]], *, skipped: bool
    ) -> dict[str, torch.Tensor]:
        gradients = {p: grad for p, grad in self._gradients().items() if p in groups}
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
            "param_update_lost": (wanted - moved)
            / wanted
            * self._one_where_trained({place: groups[place].get("lr") for place in gradients}),
        }

    def _one_where_trained(self, rates: Mapping[int, Any]) -> torch.Tensor:
        """Return 1 if the learning rate is not 0, NaN otherwise."""
        full = torch.ones_like(self._nan)
        return self._vector(
            {
                place: torch.where(rate.to(full.device) != 0, full, self._nan)
                if isinstance(rate, torch.Tensor)
                else full
                for place, rate in rates.items()
                if isinstance(rate, torch.Tensor) or rate != 0
            }
        )

    def _gradients(self) -> dict[int, torch.Tensor]:
        gradients = ((place, gradient_of(tensor)) for place, tensor in enumerate(self._tensors))
        return {place: gradient for place, gradient in gradients if gradient is not None}

    def _vector(self, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return one number for each parameter; NaN if it has none."""
        nan = self._nan
        numbers: Sequence[torch.Tensor] = [
            values[place].to(nan.device, nan.dtype).reshape(()) if place in values else nan
            for place in range(len(self._tensors))
        ]
        return torch.stack(list(numbers))


_NATIVE = {getattr(torch, name): native for name, native in NATIVE_TYPES.items()}

ULP_TYPES = tuple(_NATIVE)
"""Types whose spacing is known."""


def pairwise_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, one addition after the other, in the order of `hidden_sum`.

    Parameters
    ----------
    values : tensor of float64, (hidden, …)

    Returns
    -------
    tensor of float64, (…)
    """
    total: torch.Tensor
    length = len(values)
    if length > 128:
        half = length // 2 // 8 * 8
        if 2 * half == length:  # both at once
            left, right = pairwise_sum(values.unflatten(0, (2, half)).transpose(0, 1))
        else:
            left, right = pairwise_sum(values[:half]), pairwise_sum(values[half:])
        total = left + right
        return total
    if whole := length // 8 * 8:
        first, *others = values[:whole].unflatten(0, (-1, 8)).unbind()
        sums = first.clone()
        for other in others:
            sums += other
        while len(sums) > 1:
            sums = sums[0::2] + sums[1::2]
        (total,) = sums
    else:
        total = torch.zeros_like(values[0])
    for value in values[whole:].unbind():
        total += value
    return total


def _hidden_sum(values: torch.Tensor) -> torch.Tensor:
    # On the host one call of NumPy takes less time than many calls of torch.
    if values.device.type == "cpu":
        return torch.from_numpy(hidden_sum(values.numpy()))
    return pairwise_sum(values.movedim(-1, 0))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    rounded = values.float()
    return rounded.masked_fill_(rounded.isnan(), math.nan)


def token_norm(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Return the L2 norm over hidden, of a tensor or of its change.

    Parameters
    ----------
    tensor, before : tensor, (token, hidden)

    Returns
    -------
    tensor of float32, (token,)
    """
    change = as_float64(tensor)
    if before is not None:
        change -= as_float64(before)
    return _rounded(_hidden_sum(change.square_()).sqrt_())


def ulp(tensor: torch.Tensor) -> torch.Tensor:
    """Return the spacing of the tensor's own type at each element, as float64.

    Parameters
    ----------
    tensor : tensor of one of `ULP_TYPES`

    Returns
    -------
    tensor of float64, same shape
        As in `trajstore.values.native_types.spacing`: subnormals and zero have the smallest
        one; NaN for infinite values and NaN.
    """
    native, exponent = _NATIVE[tensor.dtype], NATIVE_TYPES["float64"].infinity_bits
    # The power of two is taken from the bits, because exp2 is not exact on every device.
    binade = (as_float64(tensor).view(torch.int64) & exponent).view(torch.float64)
    spacing = binade.clamp_(min=native.least_normal).mul_(native.epsilon)
    return spacing.masked_fill_(spacing.isinf(), math.nan)


def ulp_l1(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the L1 norm over hidden of the change, in spacings of the type at `before`.

    Returns
    -------
    tensor of float32, (token,)
        0 if and only if no bit changed.
    """
    hops = as_float64(tensor).sub_(as_float64(before)).abs_().div_(ulp(before))
    # An unchanged infinity or NaN has not moved, although inf − inf is NaN.
    integer = getattr(torch, f"int{8 * before.itemsize}")
    unchanged = tensor.detach().view(integer) == before.detach().view(integer)
    return _rounded(_hidden_sum(hops.masked_fill_(unchanged.to(hops.device), 0)))
