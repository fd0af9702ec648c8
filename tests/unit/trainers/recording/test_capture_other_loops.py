"""Loops that others wrote: each row is what the training did, or the run notes that it is not."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import HIDDEN, VOCAB, Lists, TinyModel, batches  # noqa: E402

from trajstore import open_run  # noqa: E402
from trajstore.trainers import capture  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def record(tiny: Any, tmp_path: Path, notes: list[str]) -> Callable[..., Any]:
    def begin(optimizer: Any, model: Any = tiny, **options: Any) -> Any:
        options = {"on_note": notes.append} | options
        return capture(model, optimizer, tmp_path / "run.zarr", **options)

    return begin


def read(tmp_path: Path) -> Any:
    return open_run(tmp_path / "run.zarr").load()


def adamw(model: Any, lr: Any = 0.01, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def about(notes: list[str], *words: str) -> bool:
    return any(all(word in note for word in words) for note in notes)


def steps(model: Any, optimizer: Any, count: int = 3, seed: int = 0) -> Iterator[Any]:
    """A plain loop; yields after each backward pass."""
    for batch in batches(count, seed):
        optimizer.zero_grad()
        output = model(**batch)
        output["loss"].backward()
        yield output
        optimizer.step()


# 1. Facts of the attachment ----------------------------------------------------------------------


def test_the_rate_of_a_loaded_optimizer(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny, lr=0.005)
    with record(optimizer, record=("all", "model")):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        for batch in batches(4):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
    ds = read(tmp_path)
    assert ds.lr.values[1:].tolist() == [0.0, 0.00125, 0.0025, 0.00375]
    assert np.isfinite(ds.param_update_lost.values[2:]).all()


def test_a_group_that_is_added_in_the_middle(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW([tiny.embedding.weight], lr=0.01)
    with record(optimizer, record="everything"):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number == 1:
                optimizer.add_param_group({"params": list(tiny.mix.parameters()), "lr": 0.1})
    ds = read(tmp_path)
    assert ds.sizes["step"] == 5
    assert about(notes, "params_lr", "shape (2,)")
    assert np.isfinite(ds.lr.values[1:]).all()


def test_a_rate_that_is_a_tensor_or_a_list_of_one(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny, lr=torch.tensor([0.01]))
    with record(optimizer, record=("all", "everything")):
        for _ in steps(tiny, optimizer):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    expected = [np.float32(0.01) / 2**n for n in (1, 2, 3)]
    np.testing.assert_allclose(read(tmp_path).lr.values[1:], expected)


def test_a_parameter_that_is_replaced(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for number, batch in enumerate(batches(4)):
            if number == 2:
                new = torch.nn.Parameter(tiny.embedding.weight.detach().clone() * 2)
                tiny.embedding.weight = tiny.head.weight = lists.parameter = new
                optimizer.param_groups[0]["params"][0] = new
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            lists.add(grad=lists.parameter.grad)
            optimizer.step()
            lists.add(W=lists.parameter)
    lists.agree_with(tmp_path / "run.zarr")
    assert about(notes, "another tensor")


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_changes_its_type(
    strict: bool, tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    taken = []

    def loop() -> None:
        with record(optimizer, strict=strict):
            for number, _ in enumerate(steps(tiny, optimizer, 4)):
                if number == 1:
                    tiny.double()
                    optimizer.zero_grad()
                taken.append(number)

    if strict:
        with pytest.raises(Exception, match="float64"):
            loop()
    else:
        loop()
        assert len(taken) == 4, "the training was ended"
        assert about(notes, "recording ended in step 2", "float64")
    ds = read(tmp_path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.sizes["step"] == 2


# 2. Gradients wherever they come from ------------------------------------------------------------


def test_flags_of_accelerate_do_not_concern_others(tiny: Any, record: Any, tmp_path: Path) -> None:
    from accelerate.state import GradientState

    optimizer = adamw(tiny)
    state = GradientState()
    state._set_sync_gradients(False)
    try:
        with record(optimizer):
            for _ in steps(tiny, optimizer):
                pass
    finally:
        GradientState._reset_state()
    ds = read(tmp_path)
    assert np.isfinite(ds.grad.values[1:]).all()
    assert np.isfinite(ds.clip_coef.values[1:]).all()


def test_gradients_that_are_assigned(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer) as run:
        for batch in batches(3):
            loss = tiny(**batch)["loss"]
            gradients = torch.autograd.grad(loss, list(tiny.parameters()))
            for parameter, gradient in zip(tiny.parameters(), gradients, strict=True):
                parameter.grad = gradient * 2
            run.observe(loss=loss)
            lists.add(grad=lists.parameter.grad, loss=loss)
            optimizer.step()
            lists.add(W=lists.parameter)
    lists.agree_with(tmp_path / "run.zarr")
    assert about(notes, "not that of a backward pass")


def test_masked_gradients(tiny: Any, record: Any, notes: list[str], tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer, record=("all", "grad_token_norm")):
        for _ in steps(tiny, optimizer):
            lists.parameter.grad[::2] = 0
            lists.add(grad=lists.parameter.grad)
    ds = lists_of(lists, tmp_path, "grad")
    assert np.isnan(ds.clip_coef.values[1:]).all()
    assert (ds.grad_token_norm.values[1:, ::2] == 0).all()
    assert about(notes, "not by one factor")
    assert not about(notes, "max_grad_norm")


def lists_of(lists: Lists, tmp_path: Path, *names: str) -> Any:
    lists.rows = {name: lists.rows[name] for name in names}
    return lists.agree_with(tmp_path / "run.zarr").load()


def test_a_gradient_that_is_discarded(tiny: Any, record: Any, tmp_path: Path) -> None:
    for set_to_none in (True, False):
        optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
        with record(optimizer, overwrite=True):
            for number, output in enumerate(steps(tiny, optimizer)):  # noqa: B007
                if number == 1:
                    optimizer.zero_grad(set_to_none=set_to_none)
        ds = read(tmp_path)
        assert np.isnan(ds.loss.values[2]), "the loss of a discarded gradient"
        assert not np.nan_to_num(ds.grad.values[2]).any()
        assert ds.loss.values[3] == output["loss"].item()
        assert np.array_equal(ds.W.values[2], ds.W.values[1])


# 3. Passes that did not train --------------------------------------------------------------------


def test_a_step_that_is_skipped_by_hand(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    losses = []
    with record(optimizer):
        for number, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            if number == 1:
                continue  # before its backward pass
            loss.backward()
            if number == 3:
                continue  # after it
            losses.append(loss.item())
            optimizer.step()
    assert read(tmp_path).loss.values[1:].tolist() == losses


def test_a_pass_that_probes(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    losses, logits = [], []
    probe, *_ = batches(1, 9)
    with record(optimizer):
        for output in steps(tiny, optimizer):
            losses.append(output["loss"].item())
            logits.append(output["logits"][0, -1].detach())
            torch.autograd.grad(tiny(**probe)["loss"], tiny.mix.weight)
            tiny(**probe)
    ds = read(tmp_path)
    assert ds.loss.values[1:].tolist() == losses
    assert np.array_equal(ds.logits.values[1:], torch.stack(logits))


def test_a_closure_at_the_perturbed_weights_of_sam(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(3):
            tiny(**batch)["loss"].backward()
            before = [p.detach().clone() for p in tiny.parameters()]
            for p in tiny.parameters():
                p.data.add_(p.grad, alpha=0.05)
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            loss.backward()
            for p, value in zip(tiny.parameters(), before, strict=True):
                p.data.copy_(value)
            lists.add(grad=lists.parameter.grad, loss=loss)
            optimizer.step()
            lists.add(W=lists.parameter)
            optimizer.zero_grad()
    lists.agree_with(tmp_path / "run.zarr")


def test_closures_of_lbfgs(tiny: Any, record: Any, notes: list[str], tmp_path: Path) -> None:
    optimizer = torch.optim.LBFGS(tiny.parameters(), lr=0.1, max_iter=4)
    firsts: list[Any] = []
    with record(optimizer):
        for batch in batches(2):
            losses = []

            def closure(batch: Any = batch, losses: Any = losses) -> Any:
                optimizer.zero_grad()
                loss = tiny(**batch)["loss"]
                loss.backward()
                losses.append((loss.item(), tiny.embedding.weight.grad.clone()))
                return loss

            optimizer.step(closure)
            assert len(losses) > 1
            firsts.append(losses[0])
    ds = read(tmp_path)
    assert ds.loss.values[1:].tolist() == [loss for loss, _ in firsts]
    assert np.array_equal(ds.grad.values[1:], torch.stack([gradient for _, gradient in firsts]))
    assert about(notes, "several times")


def test_copies_of_the_model(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    losses = []
    with record(optimizer) as run:
        for output in steps(tiny, optimizer):
            losses.append(output["loss"].item())
            client = copy.deepcopy(tiny)
            client(**batches(1, 5)[0])["loss"].backward()
    assert read(tmp_path).loss.values[1:].tolist() == losses
    before = len(run._backwards)
    client(**batches(1, 5)[0])["loss"].backward()
    assert len(run._backwards) == before == 0


# 4. Hooks ----------------------------------------------------------------------------------------


def test_models_are_saved_and_copied_while_they_are_recorded(
    tiny: Any, record: Any, tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, record=("everything", "hidden_mean")):
        for _ in steps(tiny, optimizer):
            file = io.BytesIO()
            torch.save(tiny, file)
            copied = copy.deepcopy(tiny)
    assert b"trajstore.trainers" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (loaded, copied, pickle.loads(pickle.dumps(copied))):
        assert other(**batches(1)[0])["loss"].isfinite()


# 5. A training that no longer goes through the recorder ------------------------------------------


def test_a_new_optimizer(tiny: Any, record: Any, notes: list[str], tmp_path: Path) -> None:
    first = adamw(tiny)
    with record(first):
        for _ in steps(tiny, first, 3):
            pass
        second = adamw(tiny)
        for _ in steps(tiny, second, 3):
            pass
    ds = read(tmp_path)
    assert ds.sizes["step"] == 4
    assert about(notes, "is not that of the last row at the end")
    assert about([one["note"] for one in ds.attrs["notes"]], "is not that of the last row")


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_are_written_after_the_step(
    through_data: bool, every: int, tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    W = tiny.embedding.weight
    start = W.detach().clone()
    with record(optimizer, every=every):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number:
                with torch.no_grad():
                    (W.data if through_data else W)[13:] = start[13:]
    assert about(notes, "was changed outside optimizer.step()")
    (entry,) = [one for one in read(tmp_path).attrs["notes"] if "outside" in one["note"]]
    assert (entry["first_step"], entry["count"]) == (2, 3)


def test_usual_loops_have_no_such_note(tiny: Any, record: Any, notes: list[str]) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, every=2, is_dead=np.arange(VOCAB) >= 13):
        for batch in batches(3):
            for _ in range(2):
                (tiny(**batch)["loss"] / 2).backward()
            with torch.no_grad():
                tiny(**batch)
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert notes == []


# 7., 19. Optimizers of others --------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and does not call the constructor of its base class."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Odd(torch.optim.Optimizer):
    """Without a rate; with moments of another shape and type, and an infinite setting."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"d": float("inf")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("exp_avg", torch.zeros(3, dtype=torch.int8))
                p.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize("record_", ["all", "everything"])
def test_optimizers_that_wrap_or_have_no_rate(
    record_: str, tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    for optimizer in (Lookahead(adamw(tiny)), Odd(tiny.parameters()),
                      torch.optim.Adafactor(tiny.parameters())):  # fmt: skip
        lists = Lists(tiny.embedding.weight)
        notes.clear()
        with record(optimizer, overwrite=True, record=record_):
            for batch in batches(3):
                optimizer.zero_grad()
                tiny(**batch)["loss"].backward()
                lists.add(grad=lists.parameter.grad)
                optimizer.step()
                lists.add(W=lists.parameter)
        lists.agree_with(tmp_path / "run.zarr")
        assert about(notes, "has no rate lr") == isinstance(optimizer, Odd)
        assert not about(notes, "outside optimizer.step()")


# 8. to 10., 13. Losses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (lambda out: out["loss"] + 10, lambda out: out["loss"] + 10),
        (lambda out: out["logits"].square().mean(), lambda out: out["logits"].square().mean()),
        (lambda out: out["loss"] / 2, lambda out: out["loss"]),
        (lambda out: out["loss"].div_(2), lambda out: out["loss"] * 2),
        (lambda out: 0.5 * out["loss"] + 3 * out["logits"].mean(),
         lambda out: 0.5 * out["loss"] + 3 * out["logits"].mean()),
    ],
    ids=["term", "other", "divided", "divided in place", "weighted"],
)  # fmt: skip
def test_the_loss_is_what_is_differentiated(
    loss_of: Any, expected: Any, tiny: Any, record: Any, tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    losses = []
    with record(optimizer):
        for batch in batches(3):
            output = tiny(**batch)
            loss_of(output).backward()
            losses.append(expected(output).item())
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_array_equal(read(tmp_path).loss.values[1:], np.float32(losses))


def test_a_loss_from_two_passes_and_a_gradient_penalty(
    tiny: Any, record: Any, tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for one, two in zip(batches(3), batches(3, 1), strict=True):
            first, second = tiny(**one), tiny(**two)
            (slope,) = torch.autograd.grad(first["loss"], tiny.mix.weight, create_graph=True)
            loss = first["loss"] + 2 * second["loss"] + slope.square().sum()
            loss.backward()
            lists.add(loss=loss, grad=lists.parameter.grad, logits=first["logits"][0, -1])
            optimizer.step()
            lists.add(W=lists.parameter)
            optimizer.zero_grad()
    lists.agree_with(tmp_path / "run.zarr")


def test_a_loss_observed_after_the_step(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    losses = []
    with record(optimizer) as run:
        for batch in batches(3):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            loss.backward()
            optimizer.step()
            run.observe(loss=loss)
            losses.append(loss.item())
    assert read(tmp_path).loss.values[1:].tolist() == losses
    assert about(notes, "after optimizer.step()")


def test_weights_loaded_before_the_first_step(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, record="everything"):
        tiny.load_state_dict({k: v + 1 for k, v in tiny.state_dict().items()})
        lists = Lists(tiny.embedding.weight)
        mix = tiny.mix.weight.detach().clone()
        for _ in steps(tiny, optimizer):
            pass
    ds = read(tmp_path)
    assert np.array_equal(ds.W.values[0], lists.rows["W"][0])
    np.testing.assert_array_equal(ds.traj.parameter("mix.weight").W[0], mix)


# 9., 14. Recomputation and several backward passes -----------------------------------------------


class Checkpointed(TinyModel):
    reentrant = False

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        from torch.utils.checkpoint import checkpoint

        hidden = self.embedding(input_ids)
        hidden = checkpoint(lambda x: torch.tanh(self.mix(x)), hidden, use_reentrant=self.reentrant)
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_count_once(reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Checkpointed()
    model.reentrant = reentrant
    optimizer = adamw(model)
    norms = []
    options = {"hidden_from": "mix", "record": ("all", "hidden_states", "model")}
    with capture(model, optimizer, tmp_path / "run.zarr", **options):
        for _ in steps(model, optimizer):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    ds = read(tmp_path)
    assert ds.hidden_states.shape == (4, 3, 5, HIDDEN)
    assert np.isfinite(ds.hidden_states.values[1:]).all()
    np.testing.assert_allclose(ds.grad_norm.values[1:], torch.stack(norms), rtol=1e-6)
    whole = np.sqrt((ds.param_grad_norm.values[1:] ** 2).sum(1))
    np.testing.assert_allclose(whole, ds.grad_norm.values[1:], rtol=1e-5)


def test_a_head_that_is_called_in_chunks(record: Any, notes: list[str], tmp_path: Path) -> None:
    class Chunked(TinyModel):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            hidden = torch.tanh(self.mix(self.embedding(input_ids)))
            parts = zip(hidden.chunk(2, 1), labels.chunk(2, 1), strict=True)
            return sum(
                torch.nn.functional.cross_entropy(
                    self.head(one).flatten(0, 1), target.flatten(), reduction="sum"
                )
                for one, target in parts
            )

    model = Chunked()
    optimizer = adamw(model)
    with record(optimizer, model, record=("all", "hidden_mean")):
        for batch in batches(2):
            model(**batch).backward()
            optimizer.step()
    ds = read(tmp_path)
    assert "logits" not in ds
    assert about(notes, "calls its unembedding 2 times")
    assert np.isfinite(ds.loss.values[1:]).all()


def test_a_second_backward_pass_without_the_matrix(tiny: Any, record: Any, tmp_path: Path) -> None:
    tiny.extra = torch.nn.Linear(2, 1)
    optimizer = adamw(tiny)
    norms = []
    with record(optimizer, record=("all", "model")):
        for _ in steps(tiny, optimizer):
            (100 * tiny.extra(torch.ones(2))).sum().backward()
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in tiny.parameters()]))
    ds = read(tmp_path)
    np.testing.assert_allclose(ds.grad_norm.values[1:], torch.stack(norms), rtol=1e-6)
    assert np.isfinite(ds.param_grad_norm.values[1:]).all()


# 15. What the optimizer consumed -----------------------------------------------------------------


def test_clipping_and_a_rate_inside_a_closure(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    factors = []
    with record(optimizer):
        for number, batch in enumerate(batches(3)):

            def closure(batch: Any = batch, number: int = number) -> Any:
                optimizer.zero_grad()
                loss = tiny(**batch)["loss"]
                loss.backward()
                lists.add(grad=lists.parameter.grad, loss=loss)
                norm = torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3)
                factors.append((0.3 / (norm + 1e-6)).item())
                optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
                return loss

            optimizer.step(closure)
            lists.add(W=lists.parameter)
    ds = lists.agree_with(tmp_path / "run.zarr")
    np.testing.assert_allclose(ds.clip_coef.values[1:], factors, rtol=1e-6)
    assert ds.lr.values[1:].tolist() == [0.01, 0.02, 0.03]


def test_clipping_in_a_later_hook(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer = adamw(tiny)
    with record(optimizer):
        optimizer.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3) and None
        )
        for _ in steps(tiny, optimizer):
            pass
    ds = read(tmp_path)
    expected = 0.3 / (ds.grad_norm.values[1:] + 1e-6)
    np.testing.assert_allclose(ds.clip_coef.values[1:], expected, rtol=1e-6)


# 16. The first step ------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["matrix", "backward"])
def test_a_first_step_without_a_gradient(
    without: str, tiny: Any, record: Any, tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for number, batch in enumerate(batches(3)):
            optimizer.zero_grad()
            if number:
                tiny(**batch)["loss"].backward()
            elif without == "matrix":
                tiny.mix(torch.ones(HIDDEN)).sum().backward()
            gradient = lists.parameter.grad
            nan = torch.full_like(lists.parameter, float("nan"))
            lists.add(grad=nan if gradient is None else gradient)
            optimizer.step()
            lists.add(W=lists.parameter)
            state = optimizer.state.get(lists.parameter, {})
            zero = torch.zeros_like(lists.parameter)
            lists.add(exp_avg=state.get("exp_avg", zero))
    ds = lists.agree_with(tmp_path / "run.zarr")
    assert np.isfinite(ds.loss.values[2:]).all()


# 18. Scalers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_is_not_passed(
    fused: bool, tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = adamw(tiny, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            scaler.scale(loss).backward()
            lists.add(grad=lists.parameter.grad / scaler.get_scale(), loss=loss)
            scaler.step(optimizer)
            scaler.update()
            lists.add(W=lists.parameter)
    ds = lists.agree_with(tmp_path / "run.zarr")
    assert ds.skipped.values[1:].tolist() == [0, 0, 0]
    assert about(notes, "GradScaler that was not passed")


def test_two_recordings_with_one_scaler(tiny: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    models = [tiny, TinyModel()]
    optimizers = [adamw(model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with (
        capture(models[0], optimizers[0], tmp_path / "a.zarr", scaler=scaler),
        capture(models[1], optimizers[1], tmp_path / "b.zarr", scaler=scaler),
    ):
        for batch in batches(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(**batch)["loss"]).backward()
                scaler.step(optimizer)
            scaler.update()
    for name, model in zip("ab", models, strict=True):
        ds = open_run(tmp_path / f"{name}.zarr")
        assert ds.attrs["status"] == "complete"
        assert np.array_equal(ds.W.values[-1], model.embedding.weight.detach())
    assert "step" not in vars(scaler)


# 19., 20. Compilers, and errors in hooks ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_of_the_optimizer(tiny: Any, record: Any, tmp_path: Path) -> None:
    torch._dynamo.reset()
    optimizer = adamw(tiny)
    step = torch.compile(optimizer.step, backend="eager")
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            step()
            lists.add(W=lists.parameter)
    lists_of(lists, tmp_path, "W")


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interruption_in_a_hook(at: int, tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A row and its step are complete together, or the recording ends."""
    from trajstore.trainers.recording.parameter_rows import ParameterRows

    calls = {"count": 0}

    def interrupted(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls["count"] += 1
            if calls["count"] == 40 + at:
                raise KeyboardInterrupt
            return original(self, *args, **kwargs)

        return call

    for name in ("set", "end_row", "_store_row", "set_change_norms"):
        monkeypatch.setattr(ParameterRows, name, interrupted(getattr(ParameterRows, name)))
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with capture(tiny, optimizer, tmp_path / "run.zarr"):
        for batch in batches(12):
            try:
                optimizer.zero_grad()
                tiny(**batch)["loss"].backward()
                optimizer.step()
            except KeyboardInterrupt:
                pass
            lists.add(W=lists.parameter)
    ds = read(tmp_path)
    assert ds.attrs["status"] == "interrupted"
    assert about([one["note"] for one in ds.attrs["notes"]], "recording ended in step")
    kept = torch.stack(lists.rows["W"])[: ds.sizes["step"]]
    assert ds.step.values.tolist() == list(range(len(kept)))
    assert np.array_equal(ds.W.values, kept)


def test_clipping_inside_a_dispatch_mode(tiny: Any, record: Any, tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    optimizer = adamw(tiny)
    with FlopCounterMode(display=False), record(optimizer):
        for _ in steps(tiny, optimizer):
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3, foreach=True)
    ds = read(tmp_path)
    expected = 0.3 / (ds.grad_norm.values[1:] + 1e-6)
    np.testing.assert_allclose(ds.clip_coef.values[1:], expected, rtol=1e-6)


# 21. The end of the interpreter ------------------------------------------------------------------

GENERATOR = """
import torch
from list_recorder import TinyModel, batches
from trajstore.trainers import capture


def losses(model, optimizer):
    with capture(model, optimizer, "run.zarr"):
        for batch in batches(9):
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


model = TinyModel()
left_open = losses(model, torch.optim.AdamW(model.parameters()))
for _ in range(4):
    next(left_open)
"""


def test_a_generator_that_is_left_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GENERATOR],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    ds = read(tmp_path)
    assert (ds.attrs["status"], ds.step.values.tolist()) == ("interrupted", [0, 1, 2, 3, 4])


# Found by trying other loops ---------------------------------------------------------------------


def losses_of(tmp_path: Path) -> list[float]:
    return [float(loss) for loss in read(tmp_path).loss.values[1:]]


class OwnStep(torch.optim.AdamW):
    """Clips, and clears the gradients, in its own step."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step(closure)
        for parameter in parameters:
            parameter.grad = None


def test_a_step_that_calls_that_of_its_base_class(tiny: Any, record: Any, tmp_path: Path) -> None:
    adamw(torch.nn.Linear(1, 1))  # torch adds hooks to the base class when it is first used
    optimizer, expected = OwnStep(tiny.parameters(), lr=0.01), []
    with record(optimizer):
        for output in steps(tiny, optimizer):
            expected.append(output["loss"].item())
    assert losses_of(tmp_path) == expected
    assert (read(tmp_path).clip_coef.values[1:] < 0.2).all()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_has_failed(error: Any, tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer, calls, expected = adamw(tiny), [0], []

    def fails_once(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise error("no step")

    with record(optimizer):
        optimizer.register_step_pre_hook(fails_once)
        for batch in batches(4):
            try:
                optimizer.zero_grad(set_to_none=False)
                loss = tiny(**batch)["loss"]
                loss.backward()
                norm = torch.nn.utils.get_total_norm([p.grad for p in tiny.parameters()])
                optimizer.step()
            except error:
                continue
            expected.append((loss.item(), float(norm)))
    ds = read(tmp_path)
    assert losses_of(tmp_path) == [loss for loss, _ in expected]
    np.testing.assert_allclose(ds.grad_norm[1:], [norm for _, norm in expected], rtol=1e-6)


def test_a_loss_observed_before_backward(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    """Tensors are freed at once, so that their addresses are used again."""
    optimizer, expected = adamw(tiny), []

    def train(batch: Any) -> None:
        logits = tiny(batch["input_ids"])["logits"]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        run.observe(loss=loss.detach())
        expected.append(loss.item())
        optimizer.zero_grad()
        (loss + 0.1 * logits.square().mean()).backward()
        optimizer.step()

    with record(optimizer) as run:
        for batch in batches(30):
            train(batch)
    assert losses_of(tmp_path) == expected
    assert not about(notes, "observe")


class TwoLosses(torch.autograd.Function):
    """Two losses from one node, as of a fused kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        ctx.save_for_backward(logits)
        return logits.mean(), logits.square().mean()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (logits,) = ctx.saved_tensors
        return (given[0] + 2 * given[1] * logits) / logits.numel()


class WithTotal(TinyModel):
    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        loss, total = TwoLosses.apply(super().forward(input_ids)["logits"])
        return {"loss": loss, "total": total}


def test_another_loss_of_the_same_node(record: Any, tmp_path: Path) -> None:
    model, expected = WithTotal(), []
    optimizer = adamw(model)
    with record(optimizer, model=model):
        for batch in batches(3):
            total = model(**batch)["total"]
            optimizer.zero_grad()
            total.backward(gradient=torch.ones_like(total))
            optimizer.step()
            expected.append(total.item())
    assert losses_of(tmp_path) == expected


def test_a_backward_pass_for_another_optimizer(tiny: Any, record: Any, tmp_path: Path) -> None:
    tiny.critic = torch.nn.Linear(1, 1)
    critic = torch.optim.SGD(tiny.critic.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW([*tiny.embedding.parameters(), *tiny.mix.parameters()])
    expected = []
    with record(optimizer):
        for output in steps(tiny, optimizer):
            expected.append(output["loss"].item())
            critic.zero_grad()
            tiny.critic(torch.ones(1, 1)).sum().backward()
            critic.step()
    assert losses_of(tmp_path) == expected


@pytest.mark.parametrize("zeroed", [False, True])
def test_the_gradient_of_the_matrix_is_discarded(
    zeroed: bool, tiny: Any, record: Any, tmp_path: Path
) -> None:
    optimizer, expected = adamw(tiny), []
    with record(optimizer):
        for output in steps(tiny, optimizer):
            expected.append(output["loss"].item())
            if zeroed:
                tiny.embedding.weight.grad.zero_()
            else:
                tiny.embedding.weight.grad = None
    ds = read(tmp_path)
    assert losses_of(tmp_path) == expected
    assert np.nan_to_num(ds.grad.values[1:]).any() == 0
    assert "clip_coef" not in ds or np.isnan(ds.clip_coef.values[1:]).all()


def test_a_pass_that_has_failed(tiny: Any, record: Any, tmp_path: Path) -> None:
    """The loop then calls the modules itself."""
    optimizer = adamw(tiny)
    with record(optimizer):
        with pytest.raises(IndexError):
            tiny(torch.tensor([[10**6]]))
        for batch in batches(3):
            optimizer.zero_grad()
            states = torch.tanh(tiny.mix(tiny.embedding(batch["input_ids"])))
            loss = tiny.head(states).flatten(0, 1)
            torch.nn.functional.cross_entropy(loss, batch["labels"].flatten()).backward()
            optimizer.step()
    assert np.isfinite(read(tmp_path).logits.values[1:]).all()


def test_gradients_of_single_examples(tiny: Any, record: Any, tmp_path: Path) -> None:
    optimizer, lists = adamw(tiny), Lists(tiny.embedding.weight)

    def loss(parameters: Any, ids: Any, labels: Any) -> Any:
        given = (ids[None], labels[None])
        return torch.func.functional_call(tiny, parameters, given)["loss"]

    with record(optimizer):
        for batch in batches(3):
            named = {name: p.detach() for name, p in tiny.named_parameters()}
            one = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
            gradients = one(named, batch["input_ids"], batch["labels"])
            for name, parameter in tiny.named_parameters():
                parameter.grad = gradients[name].mean(0)
            lists.add(grad=tiny.embedding.weight.grad)
            optimizer.step()
            lists.add(W=tiny.embedding.weight)
    lists.agree_with(tmp_path / "run.zarr")


def test_a_scheduler_that_a_hook_of_the_step_calls(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer = adamw(tiny)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with record(optimizer, record=("all", "everything")):
        for _ in steps(tiny, optimizer):
            pass
    ds = read(tmp_path)
    assert np.isnan(ds.lr.values[1:]).all()
    assert np.isnan(ds.params_lr.values[1:]).all()
    assert about(notes, "lr is NaN", "scheduler")


def test_a_probe_beside_an_assigned_gradient(
    tiny: Any, record: Any, notes: list[str], tmp_path: Path
) -> None:
    optimizer, parameters = adamw(tiny), list(tiny.parameters())
    with record(optimizer):
        for probe, batch in zip(batches(2, seed=1), batches(2), strict=True):
            torch.autograd.grad(tiny(**probe)["loss"], parameters)
            found = torch.autograd.grad(tiny(**batch)["loss"], parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert "logits" not in read(tmp_path)
    assert about(notes, "several forward passes")
