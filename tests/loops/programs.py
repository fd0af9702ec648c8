"""The words of programs: what a training loop does between its steps.

A program is a text such as ``zero pass:/2 pass:/2 clip step``: its words are the methods ``do_…``
of `Program`, their arguments stand after a colon. Steps are separated by ``|``, and taken in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.optimizer import register_optimizer_step_post_hook

from .loop import BATCHES, Gradients, Loop, Pass, copy_of
from .optimizers import innermost

CHANGES: dict[str, Callable[..., Any]] = {
    "hand": lambda grad, factor=0.3: grad.mul_(float(factor)),
    "data": lambda grad: grad.data.mul_(0.7),
    "noise": lambda grad: grad.add_(0.01),
    "mask": lambda grad: grad[::2].zero_(),
}
"""Words that change each gradient in place."""
REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda p: p.grad.clone(),
    "third": lambda p: p.grad / 3,
    "decay": lambda p: p.grad + 0.01 * p.detach(),
}
"""Words that assign another gradient to each parameter that has one."""
SHORT: dict[str, Callable[[Any], Any]] = {
    "zero": lambda loop: loop.zero(True),
    "zeros": lambda loop: loop.zero(False),
    "others": lambda loop: torch.nn.Linear(3, 3)(torch.ones(3)).sum().backward(),
    "probe": lambda loop: torch.autograd.grad(loop.model(BATCHES[-1]).sum(), loop.parameters[1]),
    "evaluate": lambda loop: torch.no_grad()(loop.model)(BATCHES[-1]),
    "value": lambda loop: clip_grad_value_(loop.parameters, 0.002),
    "erase": lambda loop: loop.matrix.grad is None or loop.matrix.grad.zero_(),
    "freeze": lambda loop: loop.matrix.requires_grad_(False),
    "thaw": lambda loop: loop.matrix.requires_grad_(True),
    "next": lambda loop: loop.schedule.step(),
}
"""Words of one line: passes of others, and what a loop does to the matrix."""


class Program(Loop):
    """A loop with all words."""

    def do_word(self, name: str, *arguments: str) -> None:
        if name in SHORT:
            SHORT[name](self)
            return
        for p in self.with_gradient:
            if name in CHANGES:
                CHANGES[name](p.grad, *arguments)
            elif name in REPLACEMENTS:
                p.grad = REPLACEMENTS[name](p)
        if name in REPLACEMENTS:
            self.assigned()
        elif name not in CHANGES:
            super().do_word(name, *arguments)

    # Passes

    def zero(self, to_none: bool) -> None:
        for member in self.members:
            member.zero_grad(set_to_none=to_none)
        self.passes, self.before, self.is_foreign = [], [self.now()], False

    def do_pass(self, *flags: str) -> None:
        """Flags are changes of the loss in turn, and ways to differentiate it."""
        ids = BATCHES[self.batch % len(BATCHES)]
        self.batch += 1
        out = self.model(ids)
        loss = out if out.dim() == 0 else cross_entropy(out.flatten(0, 1), ids.flatten())
        if "aux" in flags:
            loss = 0.01 * self.model[1].weight.square().sum()
        factor, divisor, observed = 1.0, 1.0, None
        for flag in flags:
            if flag == "observed":
                self.run.observe(loss=loss)
                observed = loss.item()
            elif flag[0] in "/*":
                times = float(flag[1:]) if flag[0] == "*" else 1 / float(flag[1:])
                loss = loss * times if flag[0] == "*" else loss / float(flag[1:])
                factor, divisor = factor * times, 1 / times if times else 0.0
        value = loss.item()
        own = Pass(value, divisor, value / factor if out.dim() == 0 else value, observed)
        self.passes.append(own)
        self.differentiate(self.scaled(loss), own, flags)
        if "later" in flags:
            self.run.observe(loss=loss)
            own.observed = value
        self.before = [self.now()]
        self.is_foreign |= "assigned" in flags

    def scaled(self, loss: Any) -> Any:
        if self.scaler is None:
            return loss
        loss, self.scale = self.scaler.scale(loss), self.scaler.get_scale()
        return loss

    def differentiate(self, loss: Any, own: Pass, flags: tuple[str, ...]) -> None:
        trained = [p for p in self.parameters if p.requires_grad]
        if "assigned" in flags:
            for p, grad in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                p.grad = grad if p.grad is None else p.grad + grad
        elif "parts" in flags:
            loss.backward(retain_graph=True, inputs=trained[:1])
            loss.backward(inputs=trained[1:])
        elif "twice" in flags:
            loss.backward(retain_graph=True)
            loss.backward()
            self.passes.append(own)
        else:
            loss.backward()

    # Changes of gradients

    def do_clip(self, limit: str = "0.05") -> None:
        self.take_foreign()
        clip_grad_norm_(self.parameters, float(limit))

    def do_put(self) -> None:
        """Gradients of no pass, to which passes add."""
        for p in self.parameters:
            p.grad = torch.full_like(p, 0.01)
        self.assigned()

    def do_drop(self, which: str = "1") -> None:
        self.parameters[int(which)].grad = None

    def do_aside(self, how: str = "") -> None:
        """Put gradients aside: themselves, or copies while they stay."""
        grads = [p.grad for p in self.parameters]
        if how == "copies":
            grads = [copy_of(grad) for grad in grads]
        else:
            for p in self.parameters:
                p.grad = None
        self.aside = grads, self.passes, self.before
        self.passes = [*self.passes] if how == "copies" else []

    def do_back(self) -> None:
        grads, self.passes, self.before = self.aside
        for p, grad in zip(self.parameters, grads, strict=True):
            p.grad = grad
        self.is_foreign = True

    def do_gather(self) -> None:
        """Add copies of the gradients to those that the loop keeps."""
        self.gathered.append(([copy_of(p.grad) for p in self.parameters], self.passes))
        self.passes = []

    def do_use(self) -> None:
        """Assign the sum of all that was gathered."""
        grads = zip(*(kept for kept, _ in self.gathered), strict=True)
        for p, parts in zip(self.parameters, grads, strict=True):
            present = [part for part in parts if part is not None]
            p.grad = torch.stack(present).sum(0) if present else None
        self.passes = [one for _, passes in self.gathered for one in passes]
        self.gathered = []
        self.assigned()

    def do_unscale(self) -> None:
        if self.scaler is not None:
            self.take_foreign()
            self.scaler.unscale_(self.own_group()[0])
            self.divide()
            self.before.append(Gradients(copy_of(self.matrix.grad), self.before[-1].norm))

    # Weights

    def do_outside(self, how: str = "") -> None:
        with torch.no_grad():
            (self.matrix.data if how == "data" else self.matrix).mul_(0.9)
        if self.rows:  # else row 0 holds it
            self.owed.append("outside")

    def do_perturb(self) -> None:
        self.moved = self.moved or [p.detach().clone() for p in self.parameters]
        for p in self.with_gradient:
            p.data.add_(p.grad, alpha=0.5 / self.scale)

    def do_restore(self, how: str = "copy") -> None:
        for p, value in zip(self.parameters, self.moved, strict=True):
            if how == "copy":
                p.data.copy_(value)
            else:
                p.data = value
        self.moved = []

    def do_replace(self, *how: str) -> None:
        """Other parameters in the model, and in the optimizer if it is `given` them."""
        old = self.parameters
        if "all" in how:
            values = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(values, assign=True)
        else:
            self.model[0].weight = torch.nn.Parameter(self.matrix.detach().clone())
        self.owed.append("another|replaced|further|not in the optimizer")
        if "given" in how:
            new = {id(p): q for p, q in zip(old, self.parameters, strict=True)}
            for _, group in self.groups():
                group["params"] = [new[id(p)] for p in group["params"]]

    def do_add(self) -> None:
        extra = torch.nn.Linear(2, 2)
        self.models.append(extra)
        self.own_group()[0].add_param_group({"params": list(extra.parameters()), "lr": 0.5})

    def do_move(self) -> None:
        member, group = self.own_group()
        group["params"] = [p for p in group["params"] if p is not self.matrix]
        member.add_param_group({"params": [self.matrix], "lr": 0.03})

    # Settings

    def do_rate(self, rate: str = "") -> None:
        for _, group in self.groups():
            group["lr"] = float(rate) if rate else group["lr"] * 0.9

    def do_setting(self) -> None:
        for _, group in self.groups():
            group["weight_decay"] = group["weight_decay"] + 0.1

    def do_schedule(self) -> None:
        rates = lambda step: 1 / (step + 1)  # noqa: E731
        owner = innermost(self.members[0])
        self.schedule = torch.optim.lr_scheduler.LambdaLR(owner, rates)

    def do_reload(self) -> None:
        owner, _ = self.own_group()
        owner.load_state_dict(copy.deepcopy(owner.state_dict()))

    def do_clear(self) -> None:
        self.own_group()[0].state.clear()
        self.owed.append("state")

    def do_turn(self) -> None:
        with torch.no_grad():
            self.matrix.copy_(normalize(self.matrix, dim=-1))

    def do_hook(self, word: str) -> None:
        """A hook of the step: changes of the gradient before it, of W or the rate after it."""
        owner, _ = self.own_group()
        register = owner.register_step_pre_hook
        if word in ("turn", "rate"):
            register = owner.register_step_post_hook
        elif word == "global":
            register, word = register_optimizer_step_post_hook, "turn"
        self.handles.append(register(lambda *_: self.do(word)))

    def do_twin(self) -> None:
        """A deep copy of the model and its optimizer, which then takes a step of its own."""
        model, member = copy.deepcopy((self.model, self.members[0]))
        cross_entropy(model(BATCHES[-2]).flatten(0, 1), BATCHES[-2].flatten()).backward()
        member.step()
        member.zero_grad()
        self.models.append(model)
