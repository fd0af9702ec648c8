"""Optimizers of torch, own ones and wrappers.

Own ones without a step of torch call `look` before they change a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

RATE = 0.01


# torch adds hooks to the step of a class when it is first used; `super().step()` then calls them.
torch.optim.AdamW([torch.zeros(1)])


class Halving(torch.optim.AdamW):
    def change(self, parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter)
        return super().step(closure)


class Clamping(Halving):
    def change(self, parameter: Any) -> None:
        parameter.grad = parameter.grad.clamp(-0.002, 0.002)


class Noisy(Halving):
    def change(self, parameter: Any) -> None:
        parameter.grad.data.add_(0.001)


class Collecting(torch.optim.AdamW):
    """Changes parameters in every second call."""

    look: Any = None
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 2:
            return None
        self.look(self)
        return super().step(closure)


class Bare(torch.optim.Optimizer):
    """Without state."""

    look: Any = None

    def __init__(self, parameters: Any, lr: float = RATE) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.look(self)
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, group["lr"])

    def change(self, parameter: Any, rate: float) -> None:
        parameter.sub_(parameter.grad, alpha=rate)


class OfData(Bare):
    """Changes the data of the parameters, which does not count the changes."""

    def change(self, parameter: Any, rate: float) -> None:
        parameter.data.sub_(parameter.grad.data, alpha=rate)


class CollectingData(OfData):
    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            super().step()


class Holding(OfData):
    """Keeps a state of its own name."""

    def change(self, parameter: Any, rate: float) -> None:
        held = self.state[parameter].setdefault("held", torch.zeros_like(parameter))
        held.mul_(0.9).add_(parameter.grad)
        parameter.data.sub_(held, alpha=rate)


class Scratch(Bare):
    """Uses the gradient as scratch memory after it has read it."""

    def change(self, parameter: Any, rate: float) -> None:
        super().change(parameter, rate)
        parameter.grad.div_(parameter.grad.abs() + 1)


class ClearingClip(Halving):
    """Clips in its step, and removes the gradients after it."""

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        torch.optim.AdamW.step(self)
        for parameter in parameters:
            parameter.grad = None


class Wrapper:
    """An object that holds an optimizer, and passes on what a loop calls."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.optimizer.step()


class Clipping(Wrapper):
    def step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.06)
        self.optimizer.step()


class Noam(Wrapper):
    """Sets the rate in its step."""

    calls = 0

    def step(self) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = RATE * self.calls / 5
        self.optimizer.step()


class Retrying(Wrapper):
    """Catches an error of the inner step, and calls it again."""

    def step(self) -> None:
        try:
            self.optimizer.step(lambda: 1 / 0)
        except ZeroDivisionError:
            self.optimizer.step()


class Sometimes(Wrapper):
    """Does not call the inner step in every third call."""

    calls = 0

    def step(self) -> None:
        self.calls += 1
        if self.calls % 3:
            self.optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Changes the weights after the inner step; does not call the constructor of its base."""

    def __init__(self, inner: Any) -> None:
        self.optimizer, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Sam(Wrapper):
    """Goes up the gradient in `first_step`, and back in `step`."""

    @torch.no_grad()
    def first_step(self) -> None:
        self.kept = [(p, p.clone()) for group in self.param_groups for p in group["params"]]
        for parameter, _ in self.kept:
            parameter.add_(parameter.grad, alpha=0.5)

    def step(self) -> None:
        for parameter, value in self.kept:
            parameter.data.copy_(value)
        self.optimizer.step()


def adamw(parameters: Any, **options: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=RATE, **options)


def sgd(parameters: Any, **options: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, **options)


def wrapping(kind: Any) -> Callable[[list[Any]], Any]:
    return lambda parameters: kind(adamw(parameters))


OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "adamw": adamw, "sgd": partial(sgd, momentum=0.9), "plain-sgd": sgd,
    "adam": partial(torch.optim.Adam, lr=RATE, weight_decay=0.1),
    "fused": partial(adamw, fused=True), "rmsprop": torch.optim.RMSprop,
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "halving": Halving, "clamping": Clamping, "noisy": Noisy, "clearing-clip": ClearingClip,
    "collecting": Collecting, "collecting-data": CollectingData, "bare": Bare, "data": OfData,
    "holding": Holding, "scratch": Scratch,
    **{kind.__name__.lower(): wrapping(kind)
       for kind in (Wrapper, Clipping, Noam, Retrying, Sometimes, Lookahead)},
    "sam": lambda parameters: Sam(sgd(parameters)),
    "two": lambda parameters: [sgd(parameters[1:]), adamw(parameters[:1])],
    "two-matrix-first": lambda parameters: [adamw(parameters[:1]), sgd(parameters[1:])],
    "each": lambda parameters: [adamw([parameter]) for parameter in parameters],
}  # fmt: skip
"""By name: what a loop makes of its parameters, and passes to the recorder."""


def innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
