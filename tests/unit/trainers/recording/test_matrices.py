"""Recorded matrices that a loop replaces, computes or writes: followed, or noted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn.utils import parametrizations, prune  # noqa: E402
from trainings import Lists, adamw, batches, steps, take_steps  # noqa: E402

from trajstore.trainers import replay  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_pruned_matrix_is_followed(record: Any, tiny: Any) -> None:
    optimizer, W = adamw(tiny), tiny.embedding.weight
    lists = Lists(W)
    with record(optimizer, parameter="embedding.weight"):
        take_steps(tiny, optimizer, 2, lists=lists)
        prune.l1_unstructured(tiny.embedding, "weight", 0.3)
        take_steps(tiny, optimizer, 2, lists=lists)
    ds = lists.agree_with(record.path)
    np.testing.assert_array_equal(ds.exp_avg[-1], optimizer.state[W]["exp_avg"])
    assert record.noted("computes embedding.weight from embedding.weight_orig")
    assert replay(record.path).clean


def test_a_recording_does_not_read_a_parametrization(record: Any) -> None:
    """Spectral normalization changes its state whenever the weight is read."""
    states = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(29, 8), torch.nn.Linear(8, 29))
        parametrizations.spectral_norm(model[0])
        optimizer = adamw(model)
        run = record(optimizer, model, parameter="0.parametrizations.weight.original")
        if is_recorded:
            run.__enter__()
        for _ in range(3):
            model(torch.arange(29)).square().mean().backward()
            optimizer.step()
        if is_recorded:
            run.__exit__(None, None, None)
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_a_model_that_changes_its_type(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    with record(optimizer):
        take_steps(tiny, optimizer, 1)
        tiny.double()
        take_steps(tiny, optimizer, 2)
    assert record.noted("recording ended in step 2", "float64")
    ds = record.read()
    assert (ds.attrs["status"], ds.sizes["step"]) == ("interrupted", 2)


def test_a_new_optimizer(tiny: Any, record: Any) -> None:
    first, second = adamw(tiny), adamw(tiny)
    with record(first):
        take_steps(tiny, first, 3)
        take_steps(tiny, second, 3)
    ds = record.read()
    assert ds.sizes["step"] == 4
    assert any("after the last row" in entry["note"] for entry in ds.attrs["notes"])


@pytest.mark.parametrize(("through_data", "every"), [(False, 1), (True, 3)])
def test_weights_that_are_written_outside_the_step(
    through_data: bool, every: int, tiny: Any, record: Any
) -> None:
    optimizer, W = adamw(tiny), tiny.embedding.weight
    start = W.detach().clone()
    with record(optimizer, every=every):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number:
                with torch.no_grad():
                    (W.data if through_data else W)[13:] = start[13:]
    (entry,) = [e for e in record.read().attrs["notes"] if "outside optimizer.step()" in e["note"]]
    assert (entry["first_step"], entry["count"], entry["unproven"]) == (2, 3, [[2, 4]])
    if every == 1:
        result = replay(record.path)
        assert (result.clean, result.replayed) == (True, 1)
        assert [(span.first, span.last) for span in result.unreplayed] == [(2, 4)]


def test_weights_loaded_before_the_first_step(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, variables="everything"):
        tiny.load_state_dict({k: v + 1 for k, v in tiny.state_dict().items()})
        W, mix = (p.detach().clone() for p in (tiny.embedding.weight, tiny.mix.weight))
        take_steps(tiny, optimizer)
    ds = record.read()
    np.testing.assert_array_equal(ds.W[0], W)
    np.testing.assert_array_equal(ds.traj.parameter("mix.weight").W[0], mix)


def test_a_group_that_is_added_in_the_middle(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.AdamW([tiny.embedding.weight], lr=0.01)
    with record(optimizer, variables="everything"):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number == 1:
                optimizer.add_param_group({"params": list(tiny.mix.parameters()), "lr": 0.1})
    assert record.read().sizes["step"] == 5
    assert record.noted("params_lr", "shape (2,)")


def test_usual_loops_have_no_notes(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, every=2, is_dead=np.arange(17) >= 13):
        for batch in batches(3):
            for _ in range(2):
                (tiny(**batch)["loss"] / 2).backward()
            with torch.no_grad():
                tiny(**batch)
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert record.notes == []
