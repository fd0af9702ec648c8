"""Rules of the verdict that few training loops show, on tapes that are written by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trajstore.trainers.recording.gradient import gradient
from trajstore.trainers.recording.loss import (
    loss_of_step,
    observed_values,
    used_passes,
)
from trajstore.trainers.recording.rates import GroupRates, stepped
from trajstore.trainers.recording.tape import (
    OLD,
    Assigned,
    Backward,
    Begin,
    Clip,
    End,
    Gradients,
    Mark,
    Moment,
    Observed,
    Root,
    Tape,
    Unscale,
    Void,
)

LIMIT, SGD = 0.5, object()
ROOTS: dict[str, Any] = {
    "2": {"divisor": 2.0}, "scaled": {"scale": torch.tensor(4.0)},
    "multiple": {"is_multiple": True}, "share": {"is_share": True},
    "half": {"of_model": 2.0}, "third": {"of_model": 3.0},
}  # fmt: skip
"""Of a root, by flags of the word ``pass``; ``of_model`` times the value."""


class Story:
    """Writes the tape of one matrix from words: each is an event, or a change by the loop."""

    def __init__(self, words: str) -> None:
        self.tape, self.W = Tape(), torch.nn.Parameter(torch.zeros(2, 2))
        self.base: Any = None
        self.norm: Any = None
        self.bases: list[Any] = []
        for word in words.split():
            name, _, flags = word.partition(":")
            getattr(self, f"do_{name}")(*filter(None, flags.split(",")))
        if not self.tape.all(Begin):
            self.do_begin()
        self.add(End(SGD, self.marks(), []))

    def add(self, event: Any) -> Any:
        self.tape.events.append(event)
        return event

    def marks(self) -> list[Mark | None]:
        return [Mark.of(self.W.grad)]

    def taken(self) -> tuple[Moment, list[Mark | None], Any]:
        self.raw = self.W.grad.clone()
        return Moment([self.W.grad]), self.marks(), torch.linalg.vector_norm(self.raw)

    def root(self, flags: Any) -> Root:
        value = torch.tensor(float(2 ** len(self.tape.all(Backward))))
        given = {key: kept for flag in flags if flag in ROOTS for key, kept in ROOTS[flag].items()}
        if "of_model" in given:
            given["of_model"] = value * given["of_model"]
        return Root(None if "many" in flags else value, **{"source": object()} | given)

    def do_pass(self, *flags: str) -> None:
        """The value of pass n is 2**n; n is also the number of its forward pass."""
        number = len(self.tape.all(Backward))
        if self.W.grad is None or self.base is None:
            self.W.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + number
        else:
            self.W.grad.add_(torch.tensor([[0.5, 0.1], [0.7, 0.3]]))
        self.bases.append(self.W.grad)
        forwards = [SimpleNamespace(number=number)]
        event = Backward(self.root(flags), self.base, {0}, 0, *self.taken(), forwards, False)
        self.base = self.add(event)

    def do_old(self) -> None:
        """The gradient of the step before stays."""
        self.W.grad, self.base = torch.ones(2, 2), OLD

    def do_zero(self) -> None:
        self.W.grad = self.base = None

    def do_zeros(self) -> None:
        self.W.grad.zero_()
        self.base = None

    def do_back(self) -> None:
        """Put the gradient of the first pass back."""
        self.W.grad = self.bases[0]
        self.norm = torch.linalg.vector_norm(self.W.grad)

    def do_grads(self, *flags: str) -> None:
        """`torch.autograd.grad`, whose result a loop may assign."""
        self.result = torch.full((2, 2), 0.25)
        forwards = [SimpleNamespace(number=len(self.tape.all(Gradients)))]
        self.call = self.add(Gradients(self.root(flags), [Mark.of(self.result)], forwards))

    def do_assign(self, origin: str = "") -> None:
        found = {"call": getattr(self, "call", None), "old": OLD}.get(origin)
        self.W.grad = self.result if origin == "call" else torch.full((2, 2), 0.75)
        self.add(Assigned(found, *self.taken()))

    def do_noise(self) -> None:
        self.W.grad.add_(0.01)

    def do_observe(self, *flags: str) -> None:
        value = torch.tensor(10.0 * (1 + len(self.tape.all(Observed))))
        roots = [self.base.root] if "graph" in flags else []
        self.add(Observed(0, value, "quotient" in flags, {}, roots))

    def do_unscale(self, *flags: str) -> None:
        self.add(Unscale(SGD, ["changed" not in flags], *self.taken()[1:]))

    def do_clip(self) -> None:
        total, begins = torch.linalg.vector_norm(self.W.grad), self.marks()
        self.W.grad.mul_(torch.clamp(LIMIT / (total + 1e-6), max=1.0))
        self.add(Clip(LIMIT, total, begins, self.marks()))

    def do_void(self) -> None:
        self.add(Void())
        self.tape.has_reached = False

    def do_begin(self) -> None:
        self.used = self.W.grad.clone()
        self.tape.used = {} if torch.equal(self.used, self.raw) else {0: self.used}
        self.add(Begin(SGD, self.marks(), [], self.base, self.norm))

    def gradient(self, **options: Any) -> Any:
        raw = options.pop("raw", self.raw)
        return gradient(self.tape, 0, self.W, raw, optimizer=SGD, **options)

    def loss(self) -> tuple[Any, str]:
        gradients = [self.gradient()]
        used = used_passes(self.tape, gradients)
        observed = observed_values(self.tape, used, set(), 0, 9)
        loss, about = loss_of_step(self.tape, used, gradients, observed)
        return loss if loss is None else float(loss), " ".join(about)


def test_a_gradient_that_is_not_known_or_comes_back() -> None:
    kept = Story("pass void zero pass").gradient()
    assert kept.is_gone
    assert "may have kept gradients" in kept.doubts[0]
    scaled = Story("pass noise unscale:changed").gradient()
    assert "while it was scaled" in scaled.doubts[0]
    assert Story("assign:old").gradient().coef == 1
    assert Story("pass begin noise").gradient().coef == 1  # torch may write to it in its step
    clipped = Story("pass clip")
    assert torch.equal(clipped.raw * clipped.gradient(raw=None).coef, clipped.used)
    unseen = Story("pass noise").gradient(raw=None)
    assert "only the factor of clip_grad_norm_ is known" in unseen.doubts[0]
    back = Story("pass zero pass pass back")
    assert (back.gradient().coef, back.gradient().source) == (1, back.tape.events[0])
    assert torch.equal(back.gradient().norm, back.norm)
    assert all(math.isnan(read.coef) for read in (kept, scaled, unseen))


@pytest.mark.parametrize(
    ("words", "loss", "doubt"),
    [
        ("pass pass", 3.0, "the sum of what 2 backward passes"),
        ("pass:2 pass:2 pass:2", 7.0, "the sum of what 3"),
        ("pass:share pass:share", 3.0, ""),
        ("pass:half pass:half", 3.0, ""),  # the mean of 2 and 4
        ("pass:half pass:third", 3.0, "the sum of what 2"),
        ("old pass", 1.0, "accumulated into the gradient of the step before"),
        ("pass:many", None, ""),
        ("assign:old", None, ""),
        ("grads assign:call", 1.0, ""),
        ("grads grads assign:call", 1.0, ""),
        ("grads grads assign", None, ""),
        ("pass:multiple unscale", None, ""),
        ("pass:multiple,scaled unscale", 1.0, ""),
        ("pass zero pass noise", None, ""),
        ("pass zeros", None, ""),
        ("pass observe zero pass observe", 20.0, ""),
        ("observe pass zero observe pass", 20.0, ""),
        ("observe:quotient pass observe:quotient pass", 15.0, "several quotients"),
        ("pass observe:graph zero pass observe:graph", 20.0, ""),
    ],
)
def test_the_loss(words: str, loss: float | None, doubt: str) -> None:
    got, said = Story(words).loss()
    assert got == (loss if loss is None else pytest.approx(loss, nan_ok=True))
    assert doubt in said
    assert bool(said) == bool(doubt)


def test_the_forward_passes_are_those_of_the_assigned_gradient() -> None:
    story = Story("grads grads assign:call")
    used = used_passes(story.tape, [story.gradient()])
    assert [forward.number for forward in used.forwards] == [1]


def test_the_rates_are_those_of_the_innermost_begin() -> None:
    begin = GroupRates({"beta1": 0.9, "eps": 1e-8}, 0.1)
    end = GroupRates({"beta1": 0.8, "eps": 1e-8}, 0.2)
    usual: dict[str, Any] = {"has_closure": False, "is_first": True}
    assert stepped(begin, begin, **usual) == (begin, set(), False)
    taken, changed, has_changed = stepped(begin, end, **usual)
    assert (math.isnan(taken.settings["beta1"]), taken.settings["eps"]) == (True, 1e-8)
    assert (math.isnan(taken.rate), changed, has_changed) == (True, {"beta1"}, True)
    taken, _, has_changed = stepped(begin, end, **usual | {"has_closure": True})
    assert (taken, has_changed) == (end, False)
    again, _, _ = stepped(begin, begin, **usual | {"is_first": False})
    assert all(map(math.isnan, (*again.settings.values(), again.rate)))
