"""Hidden states of a model whose logits no module computes, and whose loss the loop computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hf_trainings import examples, tiny_gpt2, trainer_of  # noqa: E402
from small_trainings import TEXT, small_config  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from trainings import HIDDEN, Lists, TinyModel, adamw, batches  # noqa: E402  # noqa: E402
from transformers import GPT2LMHeadModel  # noqa: E402

from trajstore import (  # noqa: E402
    analysis,
    open_run,
)
from trajstore.errors import InvalidArgument, RecordingError  # noqa: E402
from trajstore.trainers import (  # noqa: E402
    TrajectoryCallback,
    capture,
    record,
)

pytestmark = pytest.mark.torch

VOCAB, WIDTH, CONTEXT = 17, 8, 5
VARIABLES = ("W", "grad", "loss", "hidden_mean", "hidden_trace", "hidden_cosine", "hidden_states")


class OwnModel(torch.nn.Module):
    """A transformer with learned positions; its unembedding is the embedding's weight."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.position = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.encoder(x, mask=mask, is_causal=True)
        return hidden @ self.embedding.weight.T, hidden


def train(path: Path, *, observe: Any = None, **options: Any) -> Any:
    """Train with micro-batches, and return the hidden states of each step."""
    model = OwnModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"parameter": "embedding.weight", "variables": VARIABLES, "fsync": False, **options}
    lists = Lists(model.embedding.weight)
    states: list[list[Any]] = []
    with capture(model, optimizer, path, **options) as run:
        for step in range(3):
            optimizer.zero_grad()
            states.append([])
            for batch in batches(2, step):
                logits, hidden = model(batch["input_ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                (loss / 2).backward()
                run.observe(loss=loss)
                if observe is not None:
                    observe(run, hidden)
                states[-1].append(hidden.detach())
            with torch.no_grad():
                model(batch["input_ids"])  # nobody trains on that
            lists.add(grad=model.embedding.weight.grad)
            optimizer.step()
            lists.after_step(optimizer)
    lists.rows = {name: lists.rows[name] for name in ("W", "grad")}
    lists.agree_with(path)
    return states


def from_the_loop(run: Any, hidden: Any) -> None:
    run.observe(hidden=hidden)


@pytest.mark.parametrize(
    ("observe", "options"),
    [(from_the_loop, {}), (None, {"hidden_from": "encoder"}),
     (from_the_loop, {"hidden_from": "embedding"})],
    ids=["observed", "module", "observed instead"],
)  # fmt: skip
def test_states_are_what_the_loop_computes_itself(
    observe: Any, options: dict[str, str], path: Path
) -> None:
    states = train(path, observe=observe, **options)
    ds = open_run(path, chunks=None)
    for row, hidden in enumerate(states, start=1):
        np.testing.assert_array_equal(ds.hidden_states[row], torch.cat(hidden))
        first, second = (part.mean((0, 1)) for part in hidden)
        np.testing.assert_array_equal(ds.hidden_mean[row], first + (second - first) * 0.5)


@pytest.mark.parametrize("name", VARIABLES[3:])
def test_missing_states_are_an_error_that_names_the_fix(name: str, tmp_path: Path) -> None:
    match = rf"{name} not recorded.*observe\(hidden=…\).*hidden_from=…"
    with pytest.raises(RecordingError, match=match):
        train(tmp_path / "run.zarr", variables=("W", "grad", name), strict=True)


class OwnMatrix(OwnModel):
    """Has the matrix as a parameter of its own, so its inputs are ids and no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(VOCAB, CONTEXT))
        self.inner = torch.nn.Linear(WIDTH, CONTEXT)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        hidden = self.inner(super().forward(ids)[1])
        return hidden @ self.W.T, hidden


def step_of(model: Any, path: Path, *, passed: Any = None, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with capture(model, optimizer, path, variables=("W", "hidden_mean"), **options) as run:
        model(batches(1)[0]["input_ids"])[0].sum().backward()
        if passed is not None:
            run.observe(hidden=passed)
        optimizer.step()


class NamedInput(OwnModel):
    """Passes the hidden states to its head by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        self.last = super().forward(ids)[1]
        return self.head(input=self.last), self.last


def test_the_head_takes_the_states_by_name(tmp_path: Path) -> None:
    model = NamedInput()
    step_of(model, tmp_path / "run.zarr", parameter="head.weight")
    recorded = open_run(tmp_path / "run.zarr").hidden_mean[1]
    np.testing.assert_array_equal(recorded, model.last.detach().mean((0, 1)))


def test_what_is_no_hidden_state_is_refused(path: Path) -> None:
    def refused(
        message: str, model: Any, parameter: str = "embedding.weight", **given: Any
    ) -> None:
        with pytest.raises((InvalidArgument, RecordingError), match=message):
            step_of(model, path, parameter=parameter, **given)

    model = OwnModel()
    refused(r"hidden: got float32 of shape \(5, 8\), expected f", model, passed=torch.ones(5, 8))
    refused(r"no such module \(did you mean 'encoder'\?\)", model, hidden_from="encode")
    words = r"hidden_from='position': got float32 of shape \(5"
    refused(words, model, hidden_from="position", strict=True)
    words = r"batch_first=False.*observe\(hidden=output\.trans"
    refused(words, OwnModel(batch_first=False), hidden_from="encoder")
    # Its inputs are as many ids as W is wide.
    refused("hidden_mean not recorded", OwnMatrix(), "W", strict=True)
    assert not path.exists()


SEEN = ("W", "hidden_mean", "hidden_trace", "hidden_cosine", "batch", "example_loss")
ALL = (*SEEN, "hidden_states")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_stand_behind_one_another(dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = TinyModel(dtype)
    states: list[Any] = []
    model.head.register_forward_pre_hook(lambda _, args: states.append(args[0].detach().float()))
    optimizer = adamw(model)
    told: list[tuple[Any, Any]] = []
    with capture(model, optimizer, tmp_path / "run.zarr", variables=ALL) as run:
        for step in range(4):
            optimizer.zero_grad()
            for number, whole in enumerate(batches(2, step)):
                part = slice(1 if step == 2 and number == 1 else 3), slice(4 if number else 5)
                batch = {name: values[part] for name, values in whole.items()}
                model(**batch)["loss"].backward()
                count = len(batch["labels"])
                index = torch.arange(count) + 100 * step + 10 * number
                losses = torch.rand(count)
                told.append((index, losses))
                run.observe(batch=index, example_loss=losses.tolist())
            model.eval()
            model(**batch)  # nobody trains on that
            states.pop()
            model.train()
            optimizer.step()
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    assert ds.hidden_states.attrs["native_dtype"] == str(dtype).removeprefix("torch.")
    assert ds.isel(step=0)[list(ALL[1:])].isnull().all()
    for step in range(4):
        row, these = ds.isel(step=step + 1), slice(2 * step, 2 * step + 2)
        index, losses = (torch.cat(both) for both in zip(*told[these], strict=True))
        expected = np.full((6, 5, HIDDEN), np.nan, np.float32)
        expected[:3], second = states[these][0].numpy(), states[these][1].numpy()
        expected[3 : 3 + len(second), : second.shape[1]] = second
        np.testing.assert_array_equal(row.hidden_states, expected)
        filler = [np.nan] * (6 - len(index))
        np.testing.assert_array_equal(row.batch, [*index.tolist(), *filler])
        np.testing.assert_array_equal(row.example_loss, np.float32([*losses.tolist(), *filler]))
        flat = expected.reshape(-1, HIDDEN).astype("f8")
        flat = flat[~np.isnan(flat).any(1)]
        mean = flat.mean(0)
        np.testing.assert_allclose(row.hidden_mean, mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(row.hidden_trace, flat.var(0).sum(), rtol=1e-5)
        cosines = flat @ mean / np.linalg.norm(flat, axis=1) / np.linalg.norm(mean)
        np.testing.assert_allclose(row.hidden_cosine, cosines.mean(), rtol=1e-5)


def test_losses_of_a_causal_language_model(tmp_path: Path) -> None:
    model = tiny_gpt2()
    optimizer = adamw(model)
    expected, losses = [], []
    with capture(model, optimizer, tmp_path / "run.zarr", variables=("W", "loss", *ALL)):
        for number, batch in enumerate(batches(3)):
            labels = batch["labels"].clone()
            labels[0, :3] = -100  # targets that do not count
            optimizer.zero_grad()
            index = torch.arange(3) + number
            output = model(batch["input_ids"], labels=labels, example_index=index)
            output.loss.backward()
            each = torch.nn.functional.cross_entropy(
                output.logits.detach()[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
            )
            expected.append([float(e[t != -100].mean())
                             for e, t in zip(each, labels[:, 1:], strict=True)])  # fmt: skip
            losses.append(output.loss.item())
            optimizer.step()
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    np.testing.assert_allclose(ds.example_loss[1:], expected, rtol=1e-6)
    np.testing.assert_allclose(ds.example_loss.values[1:] @ [0.2, 0.4, 0.4], losses, rtol=1e-6)
    assert ds.batch.values[1:].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


class Sharper(GPT2LMHeadModel):
    """Returns another loss than the one whose name it has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = 1.2 * output.loss
        return output


def test_a_loss_that_is_another_one_is_not_guessed(path: Path) -> None:
    model = tiny_gpt2(Sharper)
    (batch,) = batches(1)
    with (
        pytest.raises(RecordingError, match=r"observe\(example_loss=…\)"),
        capture(model, adamw(model), path, variables=("W", "example_loss"), strict=True),
    ):
        model(**batch)
    assert not path.exists()


def test_losses_that_were_not_observed_are_an_error(tiny: Any, optimizer: Any, path: Path) -> None:
    tiny(**batches(1)[0])["loss"].backward()
    message = r"example_loss not recorded.*not a causal language model .* observe\(example_loss=…\)"
    with (
        pytest.raises(RecordingError, match=message),
        capture(tiny, optimizer, path, variables=("W", "example_loss"), strict=True),
    ):
        optimizer.step()
    assert not path.exists()


def test_observed_values_of_a_wrong_form_are_errors(tiny: Any, optimizer: Any, path: Path) -> None:
    notes: list[str] = []
    variables = ("W", "batch", "example_loss")
    with capture(tiny, optimizer, path, variables=variables, on_note=notes.append) as run:
        with pytest.raises(InvalidArgument, match=r"example_loss: got .* of shape \(1, 1\)"):
            run.observe(example_loss=[[0.5]])
        wrong = {
            "loss": [0.5, torch.ones(2), torch.ones((), dtype=torch.int64)],
            "logits": [[[0.5]]],
            "batch": [torch.rand(3), [True, False], [1.5, 2], ["1", "2"], [2**53 + 1]],
            "example_loss": [[0.1], torch.tensor([0.1], dtype=torch.float64), [1, 2], ["0.5"]],
        }
        for name, given in ((name, value) for name, values in wrong.items() for value in values):
            with pytest.raises(InvalidArgument, match=f"{name}: got"):
                run.observe(**{name: given})
        tiny(**batches(1)[0])["loss"].backward()
        run.observe(batch=[1, 2, 3], example_loss=[0.25, 0.5, 0.75])
        optimizer.step()
        for given in ({"batch": [1, 2, 3], "example_loss": [0.25, 0.5]},
                      {"batch": [1, 2, 3, 4], "example_loss": [0.0] * 4}):  # fmt: skip
            run.observe(**given)
            tiny(**batches(1)[0])["loss"].backward()
            optimizer.step()
    ds = open_run(path, chunks=None)
    assert ds.example_loss.values[1].tolist() == [0.25, 0.5, 0.75]
    assert np.isnan(ds.example_loss.values[2:]).all()
    assert any("numbers differ: batch 3, example_loss 2" in note for note in notes)
    assert any("has 4 examples, but" in note and "room for 3" in note for note in notes)


def test_a_trainer_gives_the_indices_with_its_examples(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = TinyModel()
    data = [
        row | {"example_index": torch.tensor(number)} for number, row in enumerate(examples(11))
    ]
    inputs: list[Any] = []
    model.embedding.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    callback = TrajectoryCallback(tmp_path / "run.zarr", ("W", "batch", "hidden_states"))
    trainer_of(
        model, tmp_path, callback, data=data, gradient_accumulation_steps=2,
        remove_unused_columns=False,
    ).train()  # fmt: skip
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    assert (ds.sizes["example"], ds.sizes["step"]) == (6, 5)
    ids = torch.stack([row["input_ids"] for row in data])
    told = ds.batch.values[1:]
    indices = told[~np.isnan(told)].astype(int)
    assert torch.equal(ids[indices], torch.cat(inputs))
    assert np.isnan(told).sum(1).tolist() == [0, 1, 0, 1]  # 11 are 6 and 5
    assert np.array_equal(np.isnan(told), np.isnan(ds.hidden_states.values[1:]).all((2, 3)))


def test_the_gradient_of_dead_tokens_is_that_of_the_recorded_states(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    config = small_config(
        ["gatsby"], "model.dtype=float32", "training.autocast=none",
        "training.accumulation=2", "initialization.kind=normal", "initialization.sigma=0.3",
        f"recording.variables={[*ALL, 'grad']}", steps=5,
    )  # fmt: skip
    ds = open_run(record(config, tmp_path / "run.zarr", corpus=text))
    dead = ds.token.values[ds.is_dead.values][::30]
    shares = analysis.explain_gradient(ds, [1, 3, 5], dead).compute()
    assert shares.relative_error.max() < 1e-5
    assert shares.cosine.min() > 1 - 1e-9
    np.testing.assert_allclose(shares.share.sum("example"), 1)
    assert set(shares.batch.values.ravel()) <= set(range(len(TEXT)))
    rounded = analysis.explain_gradient(ds, [1, 3, 5], dead, precision="bfloat16").compute()
    assert rounded.relative_error.min() > 1e-4  # float32 was not rounded like that
