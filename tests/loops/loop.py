"""A training loop that keeps rows of its own in plain lists, and its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from .optimizers import OPTIMIZERS, Scratch, innermost

STEPS, TOKENS = 5, 29
PARAMETER = "0.weight"
BATCHES = torch.randint(TOKENS, (99, 3, 6), generator=torch.Generator().manual_seed(5))


class Returning(torch.nn.Sequential):
    """Returns its loss."""

    def forward(self, ids: Any) -> Any:
        return cross_entropy(super().forward(ids).flatten(0, 1), ids.flatten())


class Checkpointed(torch.nn.Sequential):
    reentrant = False

    def forward(self, ids: Any) -> Any:
        return checkpoint(self[1], self[0](ids), use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


@dataclass(frozen=True)
class Situation:
    """A loop: its program, and what it is made of.

    Attributes
    ----------
    name : str
        The kind, a slash, and what is special.
    steps : str
        Program of the steps.
    before, once : str
        Programs before the recording begins, and before its first step.
    """

    name: str
    steps: str
    optimizer: str = "adamw"
    scaler: str = ""
    net: type[torch.nn.Sequential] = torch.nn.Sequential
    before: str = ""
    once: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    def __str__(self) -> str:
        made = filter(None, (self.optimizer, self.scaler, self.before, self.once))
        return f"{self.name} ({', '.join(made)}: {self.steps})"


@dataclass
class Pass:
    """A backward pass: the differentiated value, its last divisor, and the undivided value."""

    value: float
    divisor: float
    undivided: float
    observed: float | None = None


@dataclass
class Gradients:
    """The gradient of the matrix and the norm of all, at one moment before the step."""

    grad: Any
    norm: float

    def divided(self, scale: float) -> Gradients:
        return Gradients(None if self.grad is None else self.grad / scale, self.norm / scale)


@dataclass
class OwnRow:
    """What is true after a step. A list holds several values, each of which may be recorded."""

    W: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    rate: float | None = None
    used: Any = None
    """What the innermost step got. None: not known, or the matrix had no gradient."""
    at_begin: Any = None
    """What the outermost step got."""
    before: list[Gradients] = field(default_factory=list)
    """At the end of the last pass, and after each replacement by the loop."""
    losses: list[float] = field(default_factory=list)
    """Empty: no pass led to the gradient, so that the loss is missing."""
    is_sum: bool = False
    """True if a note has to say that the loss may be a sum."""
    is_skipped: bool = False


def losses_of(passes: list[Pass]) -> tuple[list[float], bool]:
    """Return the losses that may be recorded, and whether a note has to name a sum."""
    observed = [one.observed for one in passes if one.observed is not None]
    if observed or not passes:
        return [sum(observed) / len(observed)] if observed else [], False
    values = [one.value for one in passes]
    undivided = [one.undivided for one in passes]
    is_sum = any(one.divisor != len(values) for one in passes) and len(values) > 1
    allowed = [sum(values)] + [sum(values) / len(values)] * is_sum
    return allowed + [sum(undivided) / len(undivided)] * (undivided != values), is_sum


def copy_of(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()


def norm_of(parameters: Iterable[Any]) -> float:
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class Interruption(Exception):
    """Raised by a hook of the loop."""


SILENT = SimpleNamespace(observe=lambda **_: None)
"""Stands for the recorder in a loop that is not recorded."""

Recording = Callable[["Loop"], contextlib.AbstractContextManager[Any]]


class Loop:
    """One situation, from the same seed each time.

    Attributes
    ----------
    rows : list of OwnRow
    owed : list of str
        Patterns of notes that the recording must have.
    models : list of Module
        All that is trained.
    """

    def __init__(self, situation: Situation) -> None:
        torch.manual_seed(0)
        self.situation = situation
        net = situation.net(torch.nn.Embedding(TOKENS, 8), torch.nn.Linear(8, TOKENS))
        self.model, self.models = net, [net]
        self.optimizer = OPTIMIZERS[situation.optimizer](list(net.parameters()))
        several = isinstance(self.optimizer, list)
        self.members = self.optimizer if several else [self.optimizer]
        self.calls = [member.step for member in self.members]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if situation.scaler else None
        self.run: Any = SILENT
        self.rows: list[OwnRow] = []
        self.owed: list[str] = []
        self.handles: list[Any] = []
        self.is_early = False
        self.batch = 0
        self.moved: list[Any] = []
        self.gathered: list[Any] = []
        self.stepped: set[int] = set()
        self.begin_row()
        for member in map(innermost, self.members):
            if hasattr(type(member), "look"):
                member.look = self.look

    def train(self, recording: Recording | None = None) -> None:
        """Take the steps, and one more without the recording."""
        torch.manual_seed(1)
        steps = self.situation.steps.split("|")
        try:
            self.do(self.situation.before)
            with recording(self) if recording else contextlib.nullcontext(SILENT) as self.run:
                self.do(self.situation.once)
                for number in range(STEPS):
                    self.do(steps[number % len(steps)])
            self.run, rows, owed = SILENT, [*self.rows], [*self.owed]
            self.do(steps[0])
            self.rows, self.owed = rows, owed
        finally:
            for handle in self.handles:
                handle.remove()

    def do(self, program: str) -> None:
        for word in program.split():
            name, _, arguments = word.partition(":")
            self.do_word(name, *filter(None, arguments.split(",")))

    def do_word(self, name: str, *arguments: str) -> None:
        getattr(self, f"do_{name}")(*arguments)

    @property
    def matrix(self) -> Any:
        return self.model[0].weight

    @property
    def parameters(self) -> list[Any]:
        return list(self.model.parameters())

    @property
    def with_gradient(self) -> list[Any]:
        return [p for p in self.parameters if p.grad is not None]

    def groups(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for member in map(innermost, self.members):
            for group in member.param_groups:
                yield member, group

    def own_group(self) -> tuple[Any, dict[str, Any]]:
        """Return the innermost optimizer and the group of the matrix."""
        for member, group in self.groups():
            if any(p is self.matrix for p in group["params"]):
                return member, group
        return next(self.groups())

    # Gradients

    def now(self) -> Gradients:
        return Gradients(copy_of(self.matrix.grad), norm_of(self.parameters))

    def assigned(self) -> None:
        self.before.append(self.now())
        self.is_foreign = True

    def take_foreign(self) -> None:
        """A recorder sees gradients that no pass has left when torch is given them first."""
        if self.is_foreign:
            self.assigned()
        self.is_foreign = False

    def begin_row(self) -> None:
        self.row = OwnRow()
        self.passes: list[Pass] = []
        self.passes_of_steps: list[list[Pass]] = []
        self.before = [self.now()]
        self.scale = 1.0
        self.is_foreign = self.has_looked = False

    def look(self, optimizer: Any) -> None:
        """Keep what the innermost step begins with."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.has_looked |= any(grad is not None for grad in grads)
        if id(self.matrix) not in mine:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a fused step
        grad = self.matrix.grad
        self.row.used = grad / scale if grad is not None and scale is not None else copy_of(grad)
        group = self.own_group()[1]
        self.row.rate = float(group["lr"])
        found = {name: group[name] for name in ("momentum", "weight_decay") if name in group}
        if "betas" in group:
            found |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        self.row.settings = {name: float(value) for name, value in found.items()}

    def divide(self) -> None:
        self.before = [one.divided(self.scale) for one in self.before]
        self.scale = 1.0

    # Steps

    def do_step(self, which: str = "") -> None:
        for number in range(len(self.members)) if which == "" else [int(which)]:
            self.take_step(number, is_scaled=self.scaler is not None)
        if len(self.stepped) == len(self.members):
            if self.scaler is not None:
                self.scaler.update()
            self.end_step(is_scaled=self.scaler is not None)

    def do_plain(self) -> None:
        """The step of a loop that scales, without the scaler."""
        self.before.append(Gradients(None, self.before[-1].norm / self.scale))
        self.take_step(0, is_scaled=False)
        self.end_step(is_scaled=False)

    def take_step(self, number: int, *, is_scaled: bool) -> None:
        member = self.members[number]
        inner = innermost(member)
        self.take_foreign()
        self.passes_of_steps.append([*self.passes])
        if len(self.members) == 1 or inner is self.own_group()[0]:
            divisor = self.scale if is_scaled else 1.0
            self.row.at_begin = None if self.matrix.grad is None else self.matrix.grad / divisor
            self.row.before = [*self.before]
            self.row.losses, self.row.is_sum = losses_of(self.passes)
        hook = None
        if not hasattr(type(inner), "look"):
            hook = inner.register_step_pre_hook(lambda *_: self.look(inner))
        try:
            if is_scaled:
                self.scaler.step(member)
            elif self.is_early:
                self.calls[number]()
            else:
                member.step(*[None] * isinstance(member, Scratch))  # as accelerate does
        finally:
            if hook:
                hook.remove()
        self.stepped.add(number)

    def end_step(self, *, is_scaled: bool) -> None:
        self.stepped.clear()
        if is_scaled:
            self.row.before = [one.divided(self.scale) for one in self.row.before]
        self.row.is_skipped = is_scaled and not self.has_looked
        if len(self.members) > 1:
            self.row.losses += self.losses_of_all()
            self.row.is_sum = False
        if self.has_looked or self.row.is_skipped:
            self.end_row()

    def losses_of_all(self) -> list[float]:
        """Return sum and mean of the passes of several optimizers."""
        together = {id(one): one.value for passes in self.passes_of_steps for one in passes}
        total = sum(together.values())
        return [total, total / max(1, len(together))]

    def end_row(self) -> None:
        owner, _ = self.own_group()
        self.row.W = copy_of(self.matrix)
        self.row.state = {
            name: copy_of(value)
            for name, value in owner.state.get(self.matrix, {}).items()
            if torch.is_tensor(value) and value.shape == self.matrix.shape
        }
        self.rows.append(self.row)
        self.begin_row()

    def do_each(self) -> None:
        """Steps inside the backward pass."""
        self.squares = 0.0
        for p, member in zip(self.parameters, self.members, strict=True):

            def step(p: Any, member: Any = member) -> None:
                self.squares += float(p.grad.double().square().sum())
                if p is self.matrix:
                    self.row.at_begin = copy_of(p.grad)
                self.look(member)
                member.step()
                member.zero_grad()

            p.register_post_accumulate_grad_hook(step)

    def do_row(self) -> None:
        self.row.before = [Gradients(self.row.used, self.squares**0.5)]
        self.row.losses, self.row.is_sum = losses_of(self.passes)
        self.squares = 0.0
        self.end_row()

    def do_closure(self, change: str = "") -> None:
        first: list[Any] = []

        def closure() -> Any:
            self.do("zero pass:assigned" if change == "assigned" else "zero pass")
            first[:] = first or [losses_of(self.passes), self.before]
            self.do(change.removesuffix("assigned"))
            return torch.tensor(self.passes[-1].value)

        member = self.members[0]
        member.step(closure)
        (self.row.losses, self.row.is_sum), self.row.before = first
        self.look(member)
        self.row.at_begin = self.row.used
        if isinstance(member, torch.optim.LBFGS):
            self.row.used, self.row.at_begin = None, self.row.before[0].grad
        self.end_row()

    def do_fails(self) -> None:
        """A step that raises before its update; the loop goes on."""

        def interrupt(*_: Any) -> None:
            raise Interruption

        hook = innermost(self.members[0]).register_step_pre_hook(interrupt)
        with contextlib.suppress(Interruption):
            self.members[0].step()
        hook.remove()

    def do_early(self) -> None:
        """The loop calls the method that it has bound before the recording began."""
        self.is_early = True

    def do_first_step(self) -> None:
        self.members[0].first_step()
