from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore.errors import CorpusError, InvalidArgument, StepNotFound

torch = pytest.importorskip("torch")
from recorded_models import OwnModel  # noqa: E402

from trajstore.trainers import model_at  # noqa: E402
from trajstore.trainers.evaluations import attention, cka, evaluate, generation, logit_lens  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = "the cat"


@pytest.fixture
def model(recorded: Any) -> Any:
    return model_at(recorded.path, 6).float()


def test_attention_weights_and_their_entropy(recorded: Any, model: Any) -> None:
    found = attention(recorded.path, PROMPT)(model, 6)
    dims, weights = found["attention"]
    assert dims == ("layer", "head", "query", "key")
    assert weights.shape == (2, 2, 7, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not np.triu(weights, 1).any()
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    expected = -(weights * logs).sum(-1).mean(-1)
    np.testing.assert_allclose(found["attention_entropy"][1], expected, atol=1e-6)
    with pytest.raises(InvalidArgument, match="OwnModel is not a model of transformers"):
        attention(recorded.path, PROMPT)(OwnModel(), 0)


def test_cka_is_that_of_gram_matrices(recorded: Any, tmp_path: Path) -> None:
    """Kornblith et al. define it by HSIC of two centered kernels (position, position)."""
    prompts = ["the cat", "a mat that is long"]  # 7 tokens; windows of 8, 8 and 2
    batches = [[*b"the cat"], [*b"a mat th"], [*b"at is lo"], [*b"ng"]]

    def grams(step: int) -> list[Any]:
        model = model_at(recorded.path, step)
        with torch.no_grad():
            outputs = [model(torch.tensor([ids]), output_hidden_states=True) for ids in batches]
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
    with pytest.raises(InvalidArgument, match="OwnModel is not a model of transformers"):
        last(OwnModel(), 0)
    with pytest.raises(StepNotFound, match="no row of step 7"):
        cka(recorded.path, PROMPT, against=7)


def test_the_last_depth_of_the_lens_is_the_output(recorded: Any, model: Any) -> None:
    found = logit_lens(recorded.path, PROMPT)(model, 6)
    chances = model(torch.tensor([[*PROMPT.encode()]])).logits[0].log_softmax(-1).detach()
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
    embedded = model.transformer.wte.weight[ord("t")] + model.transformer.wpe.weight[0]
    first = model.lm_head(model.transformer.ln_f(embedded)).argmax()
    assert texts[0, 0] == names[first]
    with pytest.raises(InvalidArgument, match=r"OwnModel has no last normalization.*ln_f"):
        logit_lens(recorded.path, PROMPT)(OwnModel(), 0)


def test_generation_is_that_of_transformers(recorded: Any, model: Any) -> None:
    found = generation(recorded.path, "th", length=6)(model, 6)["generation"]
    ids = torch.tensor([[*b"th"]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert found == bytes(expected[0, 2:].tolist()).decode()


def test_prompts_that_cannot_be_read(recorded: Any, own: Any, model: Any) -> None:
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        generation(recorded.path, "")
    with pytest.raises(InvalidArgument, match="got no prompts"):
        cka(recorded.path, [])
    with pytest.raises(CorpusError, match="the corpus prompt has 2 bytes that are not ASCII"):
        logit_lens(recorded.path, "é")
    with pytest.raises(InvalidArgument, match="the prompt has 9 tokens, but the model reads 8"):
        attention(recorded.path, "nine char")(model, 6)
    with pytest.raises(InvalidArgument, match="records no tokenizer"):
        attention(own.path, "a")
