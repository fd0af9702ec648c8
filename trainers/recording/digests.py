"""Digests of parameters, gradients and buffers of a step: 64 bits that depend on every bit.

The bytes of a tensor, and zeros up to a multiple of 8, are read as words: signed integers of 64
bits, little-endian. Each word is mixed twice: z = word · F, then the lower half of z becomes lower
xor upper half. The digest is the sum of the mixed words, each times a weight of its place, modulo
2⁶⁴. The weight of place i is w(i mod ROW) · w(ROW + i div ROW), where w(n) is number n of the
generator splitmix64, made odd.

Each change of a single word changes the digest: the mixing can be inverted, and weights are odd.
Several changes cancel only if the sum of the changes of the mixed words times the weights is 0. For
weights that were drawn at random, this has the probability 2⁻⁶³⁺ᵛ, where 2ᵛ is the largest power of
2 that divides all these changes. The mixing makes v small: a flip of any bit also changes low bits.

All operations are on integers modulo 2⁶⁴, so each device and each number of threads has the same
result.

Source: Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from trajstore.trainers.recording.parameters import as_dense
from trajstore.trainers.recording.torch_internals import name_outside_compile

ROW = 1 << 14
"""Words of a row: those that are mixed together, in the cache of a processor."""

_FACTOR = 0x94D049BB133111EB - (1 << 64)
_ROWS_ON_DEVICE = 128  # that are mixed together: fewer calls, and 16 MiB each


def weights(first: int, count: int) -> npt.NDArray[np.int64]:
    """Return the weights w of some numbers: those of splitmix64, made odd.

    >>> [hex(int(weight) & (1 << 64) - 1) for weight in weights(0, 2)]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f5']
    """
    with np.errstate(over="ignore"):
        z = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


@functools.cache
def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights(first, count)).to(device)


@functools.lru_cache(16)  # the gradients of a step may lack some
def _joined(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights of short tensors, one after another, and their first and last places."""
    table = _weights(0, ROW, device) * _weights(ROW, 1, device)
    ends = torch.tensor(lengths, device="cpu").cumsum(0)
    joined = torch.cat([table[:length] for length in lengths])
    return joined, (ends - torch.tensor(lengths, device="cpu")).to(device), ends.to(device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = as_dense(tensor.detach()).contiguous().flatten().view(torch.uint8)
    if missing := -len(flat) % 8:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


class _Mixer:
    """Mixes words, in memory that is used again."""

    def __init__(self, device: torch.device) -> None:
        self.most = ROW * (1 if device.type == "cpu" else _ROWS_ON_DEVICE)
        self._memory = torch.empty(self.most, dtype=torch.int64, device=device)

    def mixed(self, words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the mixed words times factors, (row, place), until the next call."""
        z = self._memory[: words.numel()]
        low, high = z.view(torch.int32).view(-1, 2).unbind(1)
        torch.mul(words.view(-1), _FACTOR, out=z)
        low.bitwise_xor_(high)
        z.mul_(_FACTOR)
        low.bitwise_xor_(high)
        return z.view(words.shape).mul_(factors)


def _of_long(words: torch.Tensor, mixer: _Mixer) -> torch.Tensor:
    """Return the digest of the words of a long tensor."""
    table = _weights(0, ROW, words.device)
    whole = len(words) // ROW * ROW
    sums = [
        part.sum(1)
        for part in (
            mixer.mixed(words[first : min(first + mixer.most, whole)].view(-1, ROW), table)
            for first in range(0, whole, mixer.most)
        )
    ]
    if rest := len(words) - whole:
        sums.append(mixer.mixed(words[-rest:], table[:rest]).sum(0, keepdim=True))
    return (torch.cat(sums) * _weights(ROW, -(-len(words) // ROW), words.device)).sum()


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest of each tensor.

    Parameters
    ----------
    tensors : sequence of tensor
        On one device.

    Returns
    -------
    tensor of int64, (len(tensors),)
        On their device; the sums modulo 2⁶⁴ as signed numbers.
    """
    words = [*map(_words, tensors)]
    device = words[0].device if words else torch.device("cpu")
    result = torch.zeros(len(words), dtype=torch.int64, device=device)
    mixer = _Mixer(device)
    first = size = 0
    for number, each in enumerate([*map(len, words), ROW + 1]):
        if size + each > ROW:  # the short ones so far are mixed together
            if size:
                short = words[first:number]
                factors, starts, ends = _joined(tuple(map(len, short)), device)
                total = mixer.mixed(torch.cat(short), factors).cumsum(0)
                before = torch.cat([total.new_zeros(1), total])
                result[first:number] = before[ends] - before[starts]
            first, size = number, 0
        size += each
        if each > ROW and number < len(words):
            result[number] = _of_long(words[number], mixer)
            first, size = number + 1, 0
    return result


class StepDigests:
    """The digests of a step.

    Parameters
    ----------
    model : Module
        Not wrapped.

    Attributes
    ----------
    names : tuple of str
        Names of all parameters of the model, tied ones once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        self.names = tuple(map(name_outside_compile, named))
        self._model = model
        self._parameters = [*named.values()]
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._parameters)}
        self._of_gradients: torch.Tensor | None = None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def of_parameters(self) -> torch.Tensor:
        """Return the digest of each parameter now, (parameter,)."""
        return digests(self._parameters)

    def add_gradients(self, groups: Sequence[Mapping[str, Sequence[torch.Tensor]]]) -> None:
        """Add the gradients that an optimizer uses; a missing one counts as zeros."""
        used = {
            self._numbers[id(parameter)]: parameter.grad
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) in self._numbers
        }
        total = _joint_digest(used)
        before = self._of_gradients
        self._of_gradients = total if before is None else before + total.to(before.device)

    def _of_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the digests of the parameters, and that of all buffers, now."""
        buffers = enumerate(self._model.buffers(), len(self.names))
        return self.of_parameters(), _joint_digest(dict(buffers))

    def is_still(self) -> bool:
        """Return True if parameters and buffers are those after the last step."""
        pairs = zip(self._last or (), self._of_state(), strict=True)
        return all(torch.equal(last, now) for last, now in pairs)

    def after_step(self) -> dict[str, torch.Tensor]:
        """Return the variables of the step, and begin the next one."""
        self._last = of_parameters, total = self._of_state()
        of_gradients, self._of_gradients = self._of_gradients, None
        if of_gradients is not None:
            total = of_gradients + total.to(of_gradients.device)
        return {"params_digest": of_parameters, "step_digest": total}


def _joint_digest(tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the digests of numbered tensors, each times the weight of its number."""
    numbers = sorted(tensors)
    of_each = digests([tensors[number] for number in numbers])
    factors = _weights(0, max(numbers, default=0) + 1, of_each.device)[numbers]
    return (of_each * factors).sum()
