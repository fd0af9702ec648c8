"""The states of the random generators that a model can draw from.

On a device these are the device's generator and the CPU's: some layers draw on the CPU.
"""

from __future__ import annotations

import torch

from trajstore.errors import InvalidArgument


def random_state(device: torch.device) -> torch.Tensor:
    """Return the states of the generators, one after another, the CPU's last.

    Parameters
    ----------
    device : torch.device
        Device of the model.

    Returns
    -------
    tensor of uint8, (byte,)
        On the CPU.
    """
    host = torch.get_rng_state()
    if device.type == "cuda":
        return torch.cat([torch.cuda.get_rng_state(device), host])
    if device.type == "mps":
        return torch.cat([torch.mps.get_rng_state(), host])
    return host


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the generators to what `random_state` returned.

    Raises
    ------
    InvalidArgument
        If it was taken on another kind of device.
    """
    length, expected = len(torch.get_rng_state()), len(random_state(device))
    if len(state) != expected:
        raise InvalidArgument(
            f"random_state: got {len(state)} bytes, expected {expected} on {device}; use the kind "
            "of device that recorded them"
        )
    # Copies, as torch reads a part of a tensor from the beginning of the whole.
    own, host = state[:-length].clone(), state[-length:].clone()
    if device.type == "cuda":
        torch.cuda.set_rng_state(own, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(own)
    torch.set_rng_state(host)
