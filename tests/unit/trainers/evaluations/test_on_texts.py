"""Ready-made evaluations: what torch and transformers compute from the same model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from bits_and_calls import Cli
from no_float64 import on_mps
from trainings import OwnModel, gpt2

from trajstore.errors import CorpusError, InvalidArgument, StepNotFound
from trajstore.trainers import model_at
from trajstore.trainers.evaluations import (
    attention,
    cka,
    evaluate,
    generation,
    hidden_cosine,
    logit_lens,
    loss,
    on_texts,
)

IDS = np.arange(20) * 7 % 128  # two windows of 8 tokens, and one of 4


def model() -> Any:
    torch.manual_seed(5)
    return gpt2().float().eval()


def evaluated(function: Any, *inputs: Any, of: Any = None) -> Any:
    return on_texts.ReadyMade(name="", compute=partial(function, *inputs))(of or model(), 0)


def windows() -> list[Any]:
    return [torch.from_numpy(IDS[start : start + 8])[None] for start in (0, 8, 16)]


def test_the_loss_is_that_of_transformers_over_all_windows() -> None:
    found = evaluated(on_texts._loss, IDS, 1)
    losses = [model()(ids, labels=ids).loss.item() for ids in windows()]
    expected = np.average(losses, weights=[7, 7, 3])
    assert float(found["text_loss"]) == pytest.approx(expected, rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(expected), rel=1e-6)


def test_a_preset_predicts_the_token_after_next() -> None:
    found = evaluated(on_texts._loss, IDS[:8], 2)
    chances = model()(windows()[0]).logits[0].log_softmax(-1).detach()
    expected = -np.mean([float(chances[at, IDS[at + 2]]) for at in range(6)])
    assert float(found["text_loss"]) == pytest.approx(expected, rel=1e-6)


def test_cosines_to_the_mean_of_the_hidden_states() -> None:
    found = evaluated(on_texts._cosine, IDS)
    states = [model().transformer(ids).last_hidden_state[0].detach() for ids in windows()]
    mean = torch.cat(states).mean(0)
    expected = torch.nn.functional.cosine_similarity(model().lm_head.weight.detach(), mean, dim=1)
    np.testing.assert_allclose(found["hidden_mean_cosine"], expected, rtol=1e-5)
    assert found["hidden_mean_cosine"].dims == ("token",)
    assert found["hidden_mean_norm"] == pytest.approx(float(mean.norm()), rel=1e-5)


class Bigrams(torch.nn.Sequential):
    def get_output_embeddings(self) -> torch.nn.Module:
        return self[1]


def test_evaluations_on_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Bigrams(torch.nn.Embedding(128, 3), torch.nn.Linear(3, 128))
    there = on_mps(copy.deepcopy(plain))
    windows_of = on_texts.windows
    monkeypatch.setattr(on_texts, "windows", lambda ids, model: windows_of(ids, plain))
    for inputs in ((on_texts._loss, IDS, 1), (on_texts._cosine, IDS)):
        found, expected = evaluated(*inputs, of=there), evaluated(*inputs, of=plain)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_text_is_read_with_the_tokenizer_of_the_run(
    recorded: Any, own: Any, trajstore_cli: Cli, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat")
    assert loss(recorded.path, text).compute.args[0].tolist() == [*b"the cat sat"]
    assert str(loss(recorded.path, text)) != str(loss(recorded.path, text, length=5))
    own_text = hidden_cosine(own.path, text, tokenizer="ascii", length=3)
    assert own_text.compute.args[0].tolist() == [*b"the"]
    trajstore_cli("evaluate", recorded.path, "loss", "--text", text, "-o", tmp_path / "loss.zarr")
    expected = loss(recorded.path, text)(model_at(recorded.path, 6), 6)["text_loss"]
    found = float(xr.open_zarr(tmp_path / "loss.zarr").text_loss.sel(step=6))
    assert found == float(expected)


PROMPT = "the cat"


@pytest.fixture
def last_model(recorded: Any) -> Any:
    return model_at(recorded.path, 6).float()


def test_attention_weights_and_their_entropy(recorded: Any, last_model: Any) -> None:
    found = attention(recorded.path, PROMPT)(last_model, 6)
    dims, weights = found["attention"]
    assert dims == ("layer", "head", "query", "key")
    assert weights.shape == (2, 2, 7, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not np.triu(weights, 1).any()
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    expected = -(weights * logs).sum(-1).mean(-1)
    np.testing.assert_allclose(found["attention_entropy"][1], expected, atol=1e-6)


def test_cka_is_that_of_gram_matrices(recorded: Any, tmp_path: Path) -> None:
    """Kornblith et al. define it by HSIC of two centered kernels (position, position)."""
    prompts = ["the cat", "a mat that is long"]  # 7 tokens; windows of 8, 8 and 2
    batches = [[*b"the cat"], [*b"a mat th"], [*b"at is lo"], [*b"ng"]]

    def grams(step: int) -> list[Any]:
        last_model = model_at(recorded.path, step)
        with torch.no_grad():
            outputs = [
                last_model(torch.tensor([ids]), output_hidden_states=True) for ids in batches
            ]
        found = []
        for layer in (1, 2):
            states = torch.cat([output.hidden_states[layer][0] for output in outputs])
            X = states.double().numpy()
            found.append((X - X.mean(0)) @ (X - X.mean(0)).T)
        return found

    evaluate(recorded.path, cka(recorded.path, prompts, against=1), tmp_path / "1.zarr", every=2)
    found = xr.open_zarr(tmp_path / "1.zarr").cka
    assert (found.dims, found.dtype) == (("step", "layer"), np.float64)
    for step, row in zip(found.step.values, found.values, strict=True):
        pairs = zip(grams(step), grams(1), strict=True)
        expected = [(K * L).sum() / np.sqrt((K * K).sum() * (L * L).sum()) for K, L in pairs]
        np.testing.assert_allclose(row, expected, rtol=1e-10)
    assert (found < 1 - 1e-6).all()
    last = cka(recorded.path, "the cat")
    assert str(last).endswith("against step 6")
    np.testing.assert_allclose(last(model_at(recorded.path, 6), 6)["cka"][1], 1, rtol=1e-10)


def test_the_last_depth_of_the_lens_is_the_output(recorded: Any, last_model: Any) -> None:
    found = logit_lens(recorded.path, PROMPT)(last_model, 6)
    chances = last_model(torch.tensor([[*PROMPT.encode()]])).logits[0].log_softmax(-1).detach()
    texts = found["lens_text"][1]
    assert texts.shape == (3, 7)
    from trajstore.trainers.texts import AsciiTokenizer

    names = AsciiTokenizer().texts()
    assert texts[-1].tolist() == [names[at] for at in chances.argmax(-1)]
    np.testing.assert_allclose(
        found["lens_probability"][1][-1], chances.exp().max(-1)[0], rtol=1e-5
    )
    losses = found["lens_loss"][1]
    expected = [-float(chances[at, ord(PROMPT[at + 1])]) for at in range(6)]
    np.testing.assert_allclose(losses[-1, :-1], expected, rtol=1e-5)
    assert np.isnan(losses[:, -1]).all()
    embedded = last_model.transformer.wte.weight[ord("t")] + last_model.transformer.wpe.weight[0]
    first = last_model.lm_head(last_model.transformer.ln_f(embedded)).argmax()
    assert texts[0, 0] == names[first]


def test_generation_is_that_of_transformers(
    recorded: Any, last_model: Any, trajstore_cli: Cli, tmp_path: Path
) -> None:
    found = generation(recorded.path, "th", length=6)(last_model, 6)["generation"]
    ids = torch.tensor([[*b"th"]])
    expected = last_model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert found == bytes(expected[0, 2:].tolist()).decode()
    how = ("--prompt", "th", "--length", 6, "--every", 3, "-o", tmp_path / "texts.zarr")
    said = trajstore_cli("evaluate", recorded.path, "generation", *how).output
    assert "generation of 3 steps, 3 of them new" in " ".join(said.split())
    texts = xr.open_zarr(tmp_path / "texts.zarr").generation
    assert (texts.step.values.tolist(), texts.values[-1]) == ([0, 3, 6], found)


def test_texts_prompts_and_models_that_cannot_be_evaluated(
    recorded: Any, own: Any, last_model: Any, tmp_path: Path
) -> None:
    (text := tmp_path / "text.txt").write_text("the cat sat")
    path, model = recorded.path, OwnModel()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: loss(own.path, text), InvalidArgument, "records no tokenizer; give one"),
        (lambda: loss(path, text, length=1), InvalidArgument, "has 1 tokens, too few"),
        (lambda: loss(path, tmp_path / "no"), InvalidArgument, "cannot read the corpus"),
        (lambda: generation(path, ""), InvalidArgument, "the prompt is empty"),
        (lambda: cka(path, []), InvalidArgument, "got no prompts"),
        (lambda: cka(path, PROMPT, against=7), StepNotFound, "no row of step 7"),
        (lambda: logit_lens(path, "é"), CorpusError, "prompt has 2 bytes that are not ASCII"),
        (lambda: attention(path, "nine char")(last_model, 6), InvalidArgument,
         "the prompt has 9 tokens, but the model reads 8"),
        (lambda: attention(own.path, "a"), InvalidArgument, "records no tokenizer"),
        (lambda: on_texts._cosine(IDS, model), InvalidArgument, "no get_output_embeddings"),
        (lambda: attention(path, PROMPT)(model, 0), InvalidArgument, "not a model of transformers"),
        (lambda: cka(path, PROMPT)(model, 0), InvalidArgument, "not a model of transformers"),
        (lambda: logit_lens(path, PROMPT)(model, 0), InvalidArgument, "no last normaliz.*ln_f"),
    ]  # fmt: skip
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
