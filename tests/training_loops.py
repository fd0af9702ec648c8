"""Training loops of every kind, each with the body that `develop` gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
from list_recorder import TinyModel, batches  # noqa: E402
from muon_runs import SmallGPT, muon_and_adamw  # noqa: E402
from recorded_models import OwnModel  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from trajstore.trainers import capture, develop, restore  # noqa: E402

STEPS, EVERY = 7, 3  # keyframes: 0, 3, 6, 7


class Loop:
    """A training loop. `step` is its body, which `develop` gets."""

    optimizers: Any
    model: Any
    scaler: Any = None
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.observe: Callable[..., None] = lambda **values: None

    def inputs(self, number: int) -> list[Any]:
        """The inputs of the micro-batches of a step."""
        return batches(1, number)

    def step(self, inputs: list[Any]) -> None:
        raise NotImplementedError  # each loop has a body of its own

    def after(self, number: int) -> None:
        """What the loop does between the steps."""

    def train(self, path: Path, first: int = 0, last: int = STEPS, **options: Any) -> list[Any]:
        """Record the loop; the states after each step."""
        options = {"variables": "keyframes", "keyframe_every": EVERY, "block_rows": 2,
                   "scaler": self.scaler, **self.options, **options}  # fmt: skip
        states = [self.state()]
        with capture(self.model, self.optimizers, path, first_step=first, **options) as run:
            self.observe = run.observe
            for number in range(first, last):
                self.step(self.inputs(number))
                states.append(self.state())
                self.after(number)
        return states

    def develop(self, path: Path, at: int, **options: Any) -> Any:
        return develop(path, self.model, self.optimizers, self.step, at=at, scaler=self.scaler,
                       **options)  # fmt: skip

    def resume(self, path: Path, **options: Any) -> None:
        """Restore the last step that the run holds, and train the rest."""
        first = restore(path, self.model, self.optimizers)
        self.train(path, first=first, resume=True, **options)

    def state(self) -> Any:
        """A copy of everything that torch keeps."""
        made = self.optimizers if isinstance(self.optimizers, tuple) else (self.optimizers,)
        states = [optimizer.state_dict()["state"] for optimizer in made]
        return copy.deepcopy((dict(self.model.state_dict()), states))


class Scheduled(Loop):
    """The loop computes the loss and clips; the rate of each step is another."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel(torch.bfloat16)
        self.optimizers = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def inputs(self, number: int) -> list[Any]:
        (batch,) = super().inputs(number)
        return [{"ids": batch["input_ids"], "targets": batch["labels"]}]

    def step(self, inputs: list[Any]) -> None:
        for part in inputs:
            logits = self.model(part["ids"])["logits"]
            loss = cross_entropy(logits.flatten(0, 1).float(), part["targets"].flatten())
            loss.backward()
            self.observe(loss=loss, inputs=part)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.take()

    def take(self) -> None:
        self.optimizers.step()
        self.optimizers.zero_grad()

    def after(self, number: int) -> None:
        self.optimizers.param_groups[0]["lr"] = 0.02 / (1 + abs(number - 3))


class Accumulated(Loop):
    """Micro-batches of several lengths, dropout, buffers, and a loop that draws numbers, too."""

    options: ClassVar[dict[str, Any]] = {"parameter": "embedding.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.model = OwnModel(dropout=0.1)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    def inputs(self, number: int) -> list[Any]:
        generator = torch.Generator().manual_seed(number)
        whole = torch.tensor(number % 2 == 0)
        return [
            {"ids": torch.randint(0, 11, (2, 3 + part), generator=generator), "whole": whole}
            for part in range(3)
        ]

    def step(self, inputs: list[Any]) -> None:
        for part in inputs:
            logits = self.model(part["ids"], whole=bool(part["whole"]))
            (cross_entropy(logits, part["ids"].flatten()) / len(inputs)).backward()
            self.observe(inputs=part)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizers.step()
        self.optimizers.zero_grad()

    def after(self, number: int) -> None:
        torch.rand(number + 1)


class Scaled(Loop):
    """A float16 loop whose scaler skips the first steps, and grows again."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel()
        self.optimizers = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)

    def step(self, inputs: list[Any]) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = self.model(**inputs[0])["loss"]
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizers)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizers)
        self.scaler.update()
        self.optimizers.zero_grad()


class Pair(Loop):
    """Muon and AdamW, whose rates fall."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SmallGPT()
        self.optimizers = muon_and_adamw(self.model)

    def step(self, inputs: list[Any]) -> None:
        self.model(**inputs[0])["loss"].backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def after(self, number: int) -> None:
        for group in [group for one in self.optimizers for group in one.param_groups]:
            group["lr"] *= 0.8
