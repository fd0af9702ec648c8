"""Summaries per token, computed while recording, so that common questions need no large array.

`trajstore.values.norms` defines them. This second implementation in torch is for weights on
an accelerator. IEEE 754 defines the rounding of each of its operations, and the sums have the same
order. So both agree to the last bit on any device. All are computed in float64 on the device of the
weights (on the CPU for MPS, which has no float64) and stored as float32.
"""

from __future__ import annotations

import math

import torch

from trajstore.trainers.recording.parameters import as_float64
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.norms import hidden_sum

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
            As in `trajstore.values.native_types.spacing`: subnormals and zero have the smallest one;
            NaN for infinite values and NaN.
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
