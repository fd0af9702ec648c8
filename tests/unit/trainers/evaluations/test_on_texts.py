from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.errors import InvalidArgument

torch = pytest.importorskip("torch")
from no_float64 import on_mps  # noqa: E402
from recorded_models import OwnModel, gpt2  # noqa: E402

from trajstore.trainers.evaluations import hidden_cosine, loss, on_texts  # noqa: E402

pytestmark = pytest.mark.torch

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
    with pytest.raises(InvalidArgument, match="OwnModel has no get_output_embeddings"):
        on_texts._cosine(IDS, OwnModel())


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
    recorded: Any, own: Any, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat")
    assert loss(recorded.path, text).compute.args[0].tolist() == [*b"the cat sat"]
    assert str(loss(recorded.path, text)) != str(loss(recorded.path, text, length=5))
    own_text = hidden_cosine(own.path, text, tokenizer="ascii", length=3)
    assert own_text.compute.args[0].tolist() == [*b"the"]
    with pytest.raises(InvalidArgument, match="records no tokenizer; give one"):
        loss(own.path, text)
    with pytest.raises(InvalidArgument, match="has 1 tokens, too few"):
        loss(recorded.path, text, length=1)
    with pytest.raises(InvalidArgument, match="cannot read the corpus"):
        loss(recorded.path, tmp_path / "missing.txt")
