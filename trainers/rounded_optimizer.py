"""Optimizers of `torch.optim` with a separate type for the state and one rounding per step.

`torch.optim` keeps an optimizer's state in the type of its parameter, and in a 16-bit type rounds
every intermediate result. Here each parameter, its gradient and its state are widened before the
real class takes the step. Then the parameter is rounded to its own type and the state to the chosen
type, to nearest or at random.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from trajstore.errors import InvalidArgument

STATE_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Names of the types that the state may have."""

ROUNDINGS = ("nearest", "stochastic")

_OWN = ("state_dtype", "rounding", "rounding_seed")
_REFUSED = {
    # Their kernels round in another order, and torch chooses them by device.
    "foreach": "steps one parameter at a time, so that its bits do not depend on the others",
    "fused": "steps with the plain kernels, whose rounding is the same on every device",
    "capturable": "seeds its rounding on the host",
    "differentiable": "rounds, which has no gradient",
}
_STEP = "step"  # a count, which is not rounded
_SIGNED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class RoundedOptimizer(Optimizer):
    """Base class of the optimizers of this module.

    ``state_dtype``, ``rounding`` and ``rounding_seed`` are entries of every parameter group, and
    may differ between groups. The state is ``optimizer.state[parameter]`` under the names that the
    real class gives it; only ``step`` is not rounded.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them, of floating-point types.
    *args, **settings
        Arguments of the real class, such as ``lr``.
    state_dtype : {'bfloat16', 'float16', 'float32', 'float64'}
        Type of the state.
    rounding : {'nearest', 'stochastic'}
        Rounding of the parameter and of the state after each step: to nearest with ties to even,
        or as in `round_stochastically`.
    rounding_seed : int
        Seed of the random numbers. They depend on the seed, the number of the step, the shape of
        the parameter and the position in it. Parameters of one shape use the same numbers, so no
        parameter's bits depend on the other parameters.

    Attributes
    ----------
    real_class : type of Optimizer
        Class of `torch.optim` that takes the steps.

    Raises
    ------
    InvalidArgument
        If an argument is impossible, a parameter has no floating-point type, or ``foreach``,
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
        added = {"state_dtype": state_dtype, "rounding": rounding, "rounding_seed": rounding_seed}
        _check_settings(type(self).__name__, settings | added)
        # The real class defines names, checks and defaults of the settings.
        real = self.real_class([torch.empty(0, device="cpu")], *args, **settings)
        super().__init__(params, real.defaults | added)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # they may come from a state dict of the real class
            for name in _OWN:
                group.setdefault(name, self.defaults[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which may have its own settings."""
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
        """Load a state and keep the types of its values.

        The first step rounds values of other types to ``state_dtype``.
        """
        given: dict[str, Any] = {}
        # The last hook gets the state as the other hooks changed it.
        handle = self.register_load_state_dict_pre_hook(lambda _, last: given.update(last))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # Copies keep the loaded types; the base class converted the values to the parameters' type.
        saved = [index for group in given["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            for name, value in given["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    device = value.device if name == _STEP else parameter.device
                    self.state[parameter][name] = value.to(device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss.

        Returns
        -------
        The loss, if there is a closure.

        Raises
        ------
        InvalidArgument
            If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        real = self.real_class([torch.empty(0, device="cpu")])
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
        """Step one parameter with a temporary real optimizer that has no other parameter."""
        if parameter.grad.is_sparse:  # type: ignore[union-attr]
            raise InvalidArgument(
                f"{type(self).__name__}: got a sparse gradient, expected a dense one; build the "
                "embedding with sparse=False"
            )
        state = self.state[parameter]
        if self.real_class is SGD and group["rounding"] == "stochastic":  # SGD counts no steps
            state[_STEP] = state.get(_STEP, torch.zeros((), device="cpu")) + 1
        state_dtype = getattr(torch, group["state_dtype"])
        dtypes = {parameter.dtype, state_dtype}
        dtypes |= {value.dtype for name, value in state.items() if _is_rounded(name, value)}
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
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
    """Round at random to one of the two neighbors in a type, so that the mean is the value.

    The neighbor further from zero has the probability of the fraction that rounding toward zero
    discards, in steps of 2⁻²⁴ (2⁻⁵³ for float64). Values that the type can represent do not change.
    Values beyond its largest number have no second neighbor. They are rounded to nearest, as are
    infinities and NaN.

    Parameters
    ----------
    values : tensor of float32 or float64
    dtype : torch.dtype
        A narrower floating-point type.
    generator : torch.Generator
        Generator on the device of the values.

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
    # The bits of the next number away from zero, as sign and magnitude, are the next integer.
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
    """Round values with the settings of a group, after a step with this number."""
    if values.dtype == dtype or group["rounding"] == "nearest":
        return values.to(dtype)
    key = repr((group["rounding_seed"], number, tuple(values.shape), name))
    # A hash, because the generator of the CPU uses only 32 bits of its seed.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    generator = torch.Generator(values.device).manual_seed(seed)
    return round_stochastically(values, dtype, generator)


def _is_rounded(name: str, value: Any) -> bool:
    """Return True if an entry of a state is rounded."""
    return name != _STEP and isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    """Check the settings of a group.

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
    """Return the signature of the real class with the added settings."""
    real = inspect.signature(real_class).parameters
    added = inspect.signature(RoundedOptimizer.__init__).parameters
    parameters = [added[name] for name in _OWN]
    return inspect.Signature([*real.values(), *parameters])


class RoundedAdam(RoundedOptimizer):
    """`torch.optim.Adam` with a separate type for its state and one rounding per step.

    Takes the arguments of Adam and of `RoundedOptimizer`.

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
    """`torch.optim.AdamW` with a separate type for its state and one rounding per step.

    Takes the arguments of AdamW and of `RoundedOptimizer`.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    >>> optimizer = RoundedAdamW([W], weight_decay=0.1, state_dtype="float32")
    >>> optimizer.param_groups[0]["state_dtype"], optimizer.param_groups[0]["rounding"]
    ('float32', 'nearest')
    """

    real_class = AdamW


class RoundedSGD(RoundedOptimizer):
    """`torch.optim.SGD` with a separate type for its state and one rounding per step.

    Takes the arguments of SGD and of `RoundedOptimizer`. With stochastic rounding its state has a
    count ``step``, as that of Adam.

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


OPTIMIZERS: dict[str, type[RoundedOptimizer]] = {
    "adam": RoundedAdam,
    "adamw": RoundedAdamW,
    "sgd": RoundedSGD,
}
"""Classes by their names in a configuration; `real_class` is the one of `torch.optim`."""
