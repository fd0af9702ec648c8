"""Summaries per token, computed while recording, so that common questions read no big array.

All are accumulated in float64 on the device of the weights (on the CPU for MPS, which has no
float64) and kept as float32.
"""

from __future__ import annotations

import torch

__all__ = ["ULP_TYPES", "token_norm", "ulp", "ulp_l1"]

# Number of mantissa bits, and biased exponent of the spacing at 1 counted from the smallest:
# spacing = 2^(max(exponent, 1) - offset).
_LAYOUT = {
    torch.bfloat16: (torch.int16, 7, 0xFF, 134),
    torch.float16: (torch.int16, 10, 0x1F, 25),
    torch.float32: (torch.int32, 23, 0xFF, 150),
}

ULP_TYPES = tuple(_LAYOUT)
"""Types whose spacing is known here."""


def _double(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def token_norm(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """L2 norm over hidden, of a tensor or of its change.

    Parameters
    ----------
    tensor, before : tensor, (token, hidden)

    Returns
    -------
    tensor of float32, (token,)
    """
    change = _double(tensor)
    if before is not None:
        change = change - _double(before)
    return torch.linalg.vector_norm(change, dim=-1).float()


def ulp(tensor: torch.Tensor) -> torch.Tensor:
    """Spacing of the tensor's own type at each element, as float64.

    2^(max(E, 1) - offset) with E the biased exponent: subnormals and zero have the least spacing.

    Parameters
    ----------
    tensor : tensor of one of `ULP_TYPES`
    """
    integer, mantissa, mask, offset = _LAYOUT[tensor.dtype]
    exponent = (tensor.detach().view(integer).long() >> mantissa) & mask
    # Assembled from its bits: a power computed by exp2 need not be exact on every device.
    return ((exponent.clamp(min=1) - offset + 1023) << 52).view(torch.float64)


def ulp_l1(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """L1 norm over hidden of the change, in spacings of the type at `before`.

    Returns
    -------
    tensor of float32, (token,)
        0 exactly where no bit changed.
    """
    if before.device.type == "mps":
        before = before.cpu()
    hops = (_double(tensor) - _double(before)).abs() / ulp(before)
    # An infinity or NaN that stays has not moved, though inf − inf is NaN.
    integer = _LAYOUT[before.dtype][0]
    still = tensor.detach().view(integer).to(before.device) == before.detach().view(integer)
    return hops.masked_fill(still.to(hops.device), 0).sum(dim=-1).float()
