"""Optimizers of `torch.optim` whose state is of a type of its own, and which round once a step.

`torch.optim` keeps an optimizer's state in the type of its parameter, and in a 16-bit type rounds
every intermediate result. Here each parameter, its gradient and its state are widened, the real
class steps, and what comes out is rounded: the parameter to its own type, the state to the type
that is asked for, both to nearest or at random.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from trajstore.errors import InvalidArgument

__all__ = [
    "ROUNDINGS",
    "STATE_DTYPES",
    "RoundedAdam",
    "RoundedAdamW",
    "RoundedOptimizer",
    "RoundedSGD",
    "round_stochastically",
]

STATE_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Types that the state may be of, by their names."""

ROUNDINGS = ("nearest", "stochastic")

_OWN = ("state_dtype", "rounding", "rounding_seed")
_REFUSED = {
    # Their kernels round in an order of their own, and torch chooses them by device.
    "foreach": "steps one parameter at a time, so that its bits do not depend on the others",
    "fused": "steps with the plain kernels, whose rounding is the same on every device",
    "capturable": "seeds its rounding on the host",
    "differentiable": "rounds, which has no gradient",
}
_STEP = "step"  # a count, not to be rounded
_SIGNED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class RoundedOptimizer(Optimizer):
    """What the optimizers of this module have in common.

    ``state_dtype``, ``rounding`` and ``rounding_seed`` are entries of every parameter group, and
    may differ between groups. The state is ``optimizer.state[parameter]`` under the names that the
    real class gives it; only ``step`` is not rounded.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them, of floating-point types.
    *args, **settings
        Of the real class, such as ``lr``.
    state_dtype : {'bfloat16', 'float16', 'float32', 'float64'}
        Type of the state.
    rounding : {'nearest', 'stochastic'}
        Of the parameter and of the state, after each step: to nearest, ties to even, or as
        `round_stochastically` does.
    rounding_seed : int
        Of the random numbers. They are a function of it, the number of the step, the shape of the
        parameter and the place in it; parameters of one shape are rounded with the same ones, so
        that no parameter's bits depend on what is trained beside it.

    Attributes
    ----------
    real_class : type of Optimizer
        That steps.

    Raises
    ------
    InvalidArgument
        If one of these is impossible, a parameter has no floating-point type, or ``foreach``,
        ``fused``, ``capturable`` or ``differentiable`` is set.
    """

    real_class: ClassVar[type[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature(cls.real_class)  # type: ignore[attr-defined]

    def __init__(
        self,
        params: Any,
        *args: Any,
        state_dtype: str,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        **settings: Any,
    ) -> None:
        own = {"state_dtype": state_dtype, "rounding": rounding, "rounding_seed": rounding_seed}
        _check_settings(type(self).__name__, settings | own)
        # Names, checks and defaults of the settings are the real class's.
        real = self.real_class([torch.empty(0)], *args, **settings)
        super().__init__(params, real.defaults | own)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # which may be of a state dict of the real class
            for name in _OWN:
                group.setdefault(name, self.defaults[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own for what it names."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(type(self).__name__, group)
            for parameter in group["params"]:
                if not parameter.is_floating_point():
                    raise InvalidArgument(
                        f"{type(self).__name__}: got a parameter of {parameter.dtype}, expected a "
                        "real floating-point type; train it with torch.optim"
                    )
        except InvalidArgument:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, every value in the type that it has there.

        The first step rounds it to ``state_dtype``, where it is of another type.
        """
        given: dict[str, Any] = {}
        # The last of the hooks, so it sees what the others have made of the state.
        handle = self.register_load_state_dict_pre_hook(lambda _, last: given.update(last))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # Copies, and in their types: what was loaded is of the parameters'.
        saved = [index for group in given["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            for name, value in given["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    device = value.device if name == _STEP else parameter.device
                    self.state[parameter][name] = value.to(device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once.

        Parameters
        ----------
        closure : callable, optional
            Makes the gradients, and returns the loss.

        Returns
        -------
        The loss, where there is a closure.

        Raises
        ------
        InvalidArgument
            If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        real = self.real_class([torch.empty(0)])
        for group in self.param_groups:
            settings = {name: value for name, value in group.items() if name not in _OWN}
            settings |= {"foreach": False, "fused": False}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(real, settings, group, parameter)
        return loss

    def _step_one(
        self,
        real: Optimizer,
        settings: dict[str, Any],
        group: dict[str, Any],
        parameter: torch.Tensor,
    ) -> None:
        """Step one parameter, by the real optimizer that has it alone and none of the history."""
        if parameter.grad.is_sparse:  # type: ignore[union-attr]
            raise InvalidArgument(
                f"{type(self).__name__}: got a sparse gradient, expected a dense one; build the "
                "embedding with sparse=False"
            )
        state = self.state[parameter]
        if self.real_class is SGD and group["rounding"] == "stochastic":  # which does not count
            state[_STEP] = state.get(_STEP, torch.zeros(())) + 1
        state_dtype = getattr(torch, group["state_dtype"])
        held = {parameter.dtype, state_dtype}
        held |= {value.dtype for name, value in state.items() if _is_rounded(name, value)}
        wide = torch.float64 if torch.float64 in held else torch.float32
        shadow = parameter.detach().to(wide, copy=True)
        shadow.grad = parameter.grad.to(wide)  # type: ignore[union-attr]
        real.param_groups[:] = [settings | {"params": [shadow]}]
        real.state.clear()
        real.state[shadow] = {
            name: value.to(wide) if _is_rounded(name, value) else value
            for name, value in state.items()
        }
        real.step()
        number = int(real.state[shadow].get(_STEP, 0))
        for name, value in real.state[shadow].items():
            rounds = _is_rounded(name, value)
            state[name] = _rounded(value, state_dtype, group, number, name) if rounds else value
        parameter.copy_(_rounded(shadow, parameter.dtype, group, number, "parameter"))


def round_stochastically(
    values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Round at random to one of the two neighbours in a type, so that the mean is the value.

    The neighbour further from zero is taken with the probability of the fraction that rounding
    toward zero would discard, in steps of 2⁻²⁴ (2⁻⁵³ for float64). Values that the type holds stay.
    Beyond its largest number there is no second neighbour: those are rounded to nearest, as
    infinities and NaN are.

    Parameters
    ----------
    values : tensor of float32 or float64
    dtype : torch.dtype
        A narrower floating-point type.
    generator : torch.Generator
        Of the device of the values.

    Returns
    -------
    tensor of `dtype`, same shape

    Raises
    ------
    InvalidArgument
        If the type is not narrower than that of the values.

    Examples
    --------
    >>> values = torch.full((1000,), 1 + 2**-9)  # a quarter of the way to the next bfloat16
    >>> rounded = round_stochastically(values, torch.bfloat16, torch.Generator().manual_seed(1))
    >>> sorted(set(rounded.tolist())), 200 < (rounded > 1).sum().item() < 300
    ([1.0, 1.0078125], True)
    """
    narrows = dtype in _SIGNED and dtype.itemsize < values.dtype.itemsize
    if not narrows or not values.is_floating_point():
        raise InvalidArgument(
            f"got {values.dtype} to round to {dtype}, expected float32 or float64 and a narrower "
            "floating-point type"
        )
    magnitude = values.abs()
    nearest = values.to(dtype)
    # Of a sign and a magnitude, the bits of the next number away from zero are the next integer.
    bits = nearest.view(_SIGNED[dtype])
    low = bits - (nearest.to(values.dtype).abs() > magnitude).to(bits.dtype)
    below = low.view(dtype).to(values.dtype).abs()
    above = (low + 1).view(dtype).to(values.dtype).abs()
    drawn = torch.rand(values.shape, dtype=values.dtype, device=values.device, generator=generator)
    up = drawn < (magnitude - below) / (above - below)  # exact: the gap is a power of two
    chosen = (low + up.to(bits.dtype)).view(dtype)
    return torch.where(magnitude <= torch.finfo(dtype).max, chosen, nearest)


def _rounded(
    values: torch.Tensor, dtype: torch.dtype, group: dict[str, Any], number: int, name: str
) -> torch.Tensor:
    """Values rounded as a group asks for, after its step of that number."""
    if values.dtype == dtype or group["rounding"] == "nearest":
        return values.to(dtype)
    key = repr((group["rounding_seed"], number, tuple(values.shape), name))
    # A hash, because the generator of the CPU looks at 32 bits of its seed.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    generator = torch.Generator(values.device).manual_seed(seed)
    return round_stochastically(values, dtype, generator)


def _is_rounded(name: str, value: Any) -> bool:
    """Whether that entry of a state is."""
    return name != _STEP and isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    """Refuse what is impossible of the settings of a group.

    Raises
    ------
    InvalidArgument
    """
    for setting, allowed in (("state_dtype", STATE_DTYPES), ("rounding", ROUNDINGS)):
        if settings[setting] not in allowed:
            raise InvalidArgument(
                f"{name}: {setting} is {settings[setting]!r}, expected one of {', '.join(allowed)}"
            )
    seed = settings["rounding_seed"]
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidArgument(f"{name}: rounding_seed is {seed!r}, expected an integer")
    for setting, reason in _REFUSED.items():
        if settings.get(setting):
            raise InvalidArgument(f"{name} does not take {setting}=True: it {reason}; leave it out")


def _signature(real_class: type[Any]) -> inspect.Signature:
    """Of the real class, and the settings that are added to it."""
    real = inspect.signature(real_class).parameters
    added = inspect.signature(RoundedOptimizer.__init__).parameters
    own = [added[name] for name in _OWN]
    return inspect.Signature([*real.values(), *own])


class RoundedAdam(RoundedOptimizer):
    """`torch.optim.Adam` with a type for its state, which rounds once a step.

    Takes what Adam takes, and what `RoundedOptimizer` adds.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    >>> optimizer = RoundedAdam([W], lr=1e-3, state_dtype="float32", rounding="stochastic")
    >>> W.grad = torch.ones_like(W)
    >>> optimizer.step()
    >>> W.dtype, optimizer.state[W]["exp_avg_sq"].dtype
    (torch.bfloat16, torch.float32)
    """

    real_class = Adam


class RoundedAdamW(RoundedOptimizer):
    """`torch.optim.AdamW` with a type for its state, which rounds once a step.

    Takes what AdamW takes, and what `RoundedOptimizer` adds.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    >>> optimizer = RoundedAdamW([W], weight_decay=0.1, state_dtype="float32")
    >>> optimizer.param_groups[0]["state_dtype"], optimizer.param_groups[0]["rounding"]
    ('float32', 'nearest')
    """

    real_class = AdamW


class RoundedSGD(RoundedOptimizer):
    """`torch.optim.SGD` with a type for its state, which rounds once a step.

    Takes what SGD takes, and what `RoundedOptimizer` adds. With stochastic rounding its state has a
    count ``step``, as that of Adam has anyway.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    >>> optimizer = RoundedSGD([W], lr=0.1, momentum=0.9, state_dtype="float32")
    >>> W.grad = torch.ones_like(W)
    >>> optimizer.step()
    >>> optimizer.state[W]["momentum_buffer"].dtype
    torch.float32
    """

    real_class = SGD
