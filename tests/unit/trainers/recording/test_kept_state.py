"""The state of any optimizer: recorded, restored, replayed, and computed by a rule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits_and_calls import nightly_but
from stored_forms import stored_forms
from torch.nn.functional import cross_entropy
from trainings import OwnModel, same

from trajstore import open_run
from trajstore.errors import VariableNotRecorded
from trajstore.trainers import capture, optimizer_state_at, replay, restore
from trajstore.trainers.recording.model_state import ModelState
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    find_parameters,
)

STEPS = 12
PAGE = Path(__file__).parents[4] / "docs" / "howto" / "your-loop.md"


class Lion(torch.optim.Optimizer):
    """An optimizer of a user, which also counts in a number of Python."""

    def __init__(self, parameters: Any, lr: float = 0.01, decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("velocity", torch.zeros_like(p))
                state["warm"] = state.get("warm", 0.5) * 0.9
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(average.lerp(p.grad, 0.1).sign(), alpha=group["lr"] * (1 - state["warm"]))
                average.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop, centered, momentum": lambda p: torch.optim.RMSprop(
        p, lr=0.01, centered=True, momentum=0.9
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "your own": Lion,
}
QUICK = ("SGD, momentum", "AdamW, amsgrad", "NAdam", "your own")


def build(name: str) -> tuple[Any, Any]:
    """A model with a parameter that is not trained, and one without a gradient before step 4."""
    torch.manual_seed(5)
    model = OwnModel()
    if name == "Muon":
        for vector in (p for p in model.parameters() if p.ndim < 2):
            vector.requires_grad_(False)
    return model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def train(model: Any, optimizer: Any, path: Path, first: int, last: int, **options: Any) -> Any:
    """Record some steps, and return a copy of both states after each."""
    chosen = {"parameter": "embedding.weight", "variables": "everything", "fsync": False}
    chosen |= options
    states = []
    with capture(model, optimizer, path, first_step=first, **chosen) as run:
        for step in range(first + 1, last + 1):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 11, (2, 9), generator=generator)
            loss = cross_entropy(model(ids, whole=step >= 4), ids.flatten())
            loss.backward()
            run.observe(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    return states


def rows_of_the_page() -> dict[str, list[str]]:
    table = PAGE.read_text().partition("| optimizer | replay")[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.mark.parametrize("name", nightly_but(OPTIMIZERS, *QUICK))
def test_the_table_of_optimizers(name: str, path: Path) -> None:
    whole = train(*build(name), path, 0, STEPS, encoding="compact")
    ds = open_run(path, chunks=None)
    _, kept = whole[-1]
    names = [key for key, value in kept["state"].get(0, {}).items() if np.ndim(value) == 2]
    recorded = all(key in ds for key in names)
    for step, (weights, state) in enumerate(whole, 1):
        assert torch.equal(torch.from_numpy(ds.W.values[step]), weights["embedding.weight"])
        for key in names:
            assert torch.equal(torch.from_numpy(ds[key].values[step]), state["state"][0][key])

    proof, forms = replay(path), stored_forms(path)
    assert not proof.total
    if name == "your own":
        assert "Lion cannot be replayed" in proof.unreplayed[0].reason

    model, optimizer = build(name)
    assert restore(path, model, optimizer, step=3) == 3
    again = train(model, optimizer, path, 3, 6, resume=True)
    continued = all(same(new, old) for new, old in zip(again, whole[3:6], strict=True))
    assert recorded
    assert continued
    cells = [proof.replayed == STEPS, "corrected" in forms.get("W", ())]
    assert rows_of_the_page()[name] == ["yes" if cell else "no" for cell in cells]


def test_a_run_of_an_older_version_goes_on_with_counts_of_python() -> None:
    model, optimizer = build("SGD")
    optimizer.state[model.embedding.weight]["step"] = 3
    joined = JoinedOptimizer(optimizer)
    (matrix,) = find_parameters(model, joined, "embedding.weight")
    state = ModelState(model, joined, matrix, {"params_count"}, whole_state=True)
    state.resume(state.attributes(), {"params_count"})  # without what the optimizer keeps
    values = state.after_step({"params_count"}, first=False)
    assert values["params_count"][state.names.index("embedding.weight")] == 3


def test_numbers_keep_their_type_beside_16_bits(tmp_path: Path) -> None:
    model = OwnModel().bfloat16()
    whole = train(model, torch.optim.NAdam(model.parameters()), tmp_path / "run.zarr", 0, 3)
    fresh = torch.optim.NAdam(model.parameters())
    restore(tmp_path / "run.zarr", model, fresh)
    assert same(fresh.state_dict()["state"], whole[-1][1]["state"])


class Late(torch.optim.Optimizer):
    """Keeps odd names, a matrix of another shape and a number that float64 cannot hold.

    It counts in its group, and keeps something new from its third step on.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        for p in group["params"]:
            state = self.state[p]
            state["rows"], state["lr"], state["a.b"] = torch.ones(5), p.clone(), p.clone()
            state["seed"] = 2**53 + 1
            if group["count"] > 2:
                state["late"] = p.clone()
            p.mul_(0.9)


@pytest.mark.parametrize(("variables", "rows"), [("matrix", 5), ("everything", 3)])
def test_what_no_row_can_hold_is_named(
    variables: str, rows: int, tmp_path: Path, notes: list[str]
) -> None:
    model, path = OwnModel(), tmp_path / "run.zarr"
    optimizer = Late(model.parameters(), {"lr": 0.1})
    train(model, optimizer, path, 0, 4, variables=variables, on_note=notes.append)
    ds = open_run(path, chunks=None)
    assert ds.sizes["step"] == rows
    assert {"late", "params_late", "a.b", "rows", "seed"}.isdisjoint(ds.variables)
    late = "now keeps late, but did not in the first row" if rows == 3 else "does not hold late"
    form = "rows, lr, a.b, seed not recorded: the optimizer keeps them in another form"
    changed = ["count changed while optimizer.step() ran"] * (rows == 3)
    for words in (form, late, *changed):
        assert sum(words in note for note in notes) == 1
    if rows == 3:
        with pytest.raises(VariableNotRecorded, match=r"does not hold the .* of its optimizer"):
            optimizer_state_at(path, 2)


class EightBits(torch.optim.Optimizer):
    """Keeps its state in blocks of 8 bits, of some parameters in float32, as bitsandbytes does.

    Its kernel writes to the memory of a parameter, which torch does not notice.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            if not state and p.numel() in group["quantized"]:
                state["state1"] = torch.zeros_like(p, dtype=torch.uint8)
                state |= {"qmap1": torch.ones(256), "absmax1": torch.ones(1)}
            elif not state:
                state["state1"] = torch.zeros_like(p)
            state["step"] = state.get("step", 0) + 1
            state["state1"].add_(1)
            p.numpy()[...] -= group["lr"] * p.grad.numpy()


@pytest.mark.parametrize(
    ("variables", "quantized", "every"),  # 44: matrices, 4: vectors
    [("matrix", {44}, 1), ("matrix", {4}, 1), ("everything", {4}, 2), ("everything", {44, 4}, 1)],
)
def test_state_in_8_bits_is_named_and_ends_no_recording(
    variables: str, quantized: set[int], every: int, tmp_path: Path, notes: list[str]
) -> None:
    """Also if the first step has no row."""
    model, path = OwnModel(), tmp_path / "run.zarr"
    model.sometimes.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = EightBits(trained, {"lr": 0.1, "quantized": quantized})
    options = {"variables": variables, "every": every, "on_note": notes.append}
    whole = train(model, optimizer, path, 0, 3, **options)
    ds = open_run(path, chunks=None)
    assert ds.step.values.tolist() == [0, *range(every, 3, every), 3]
    for step in ds.step.values[1:].tolist():
        W = torch.from_numpy(ds.W.sel(step=step).values)
        assert torch.equal(W, whole[step - 1][0]["embedding.weight"])
    assert np.isfinite(ds[["grad", "loss", "lr"]].isel(step=slice(1, None)).to_array()).all()
    is_kept = variables == "matrix" and 44 not in quantized
    assert ("state1" in ds) == is_kept
    assert not is_kept or (ds.state1.values[1:] == [[[1]], [[2]], [[3]]]).all()
    named = [note for note in notes if "not recorded: the optimizer keeps them in another" in note]
    assert [note.startswith("state1") for note in named] == [True] * (not is_kept)
    assert not any("exp_avg" in note for note in notes)
    if variables == "everything":
        with pytest.raises(VariableNotRecorded, match="does not hold the state1"):
            optimizer_state_at(path, 2)
