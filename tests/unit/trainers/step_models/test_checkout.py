from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trajstore.errors import InvalidArgument, RunExists

torch = pytest.importorskip("torch")
from recorded_models import same  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel  # noqa: E402

from trajstore.trainers import capture, checkout  # noqa: E402

pytestmark = pytest.mark.torch


def test_transformers_loads_the_model_the_tokenizer_and_the_optimizer(
    recorded: Any, tmp_path: Path
) -> None:
    found = checkout(recorded.path, tmp_path / "step", step=4, optimizer=True)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert same(dict(model.state_dict()), dict(recorded.models[4]))
    assert model.generation_config.eos_token_id is None
    text = "a 'b' , c .\n\t" + "".join(map(chr, range(128)))
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer(text)["input_ids"] == [*text.encode()]
    assert tokenizer.decode([*text.encode()]) == text
    assert same(torch.load(found.path / "optimizer.pt"), recorded.optimizers[4])
    assert (found.tokenizer, found.notes) == ("ascii", ())
    with pytest.raises(RunExists, match="already exists"):
        checkout(recorded.path, tmp_path / "step", step=4)


def test_a_model_that_transformers_cannot_load(own: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"model_at with a constructor"):
        checkout(own.path, tmp_path / "step", step=4)
    assert [*tmp_path.iterdir()] == []


def test_a_character_that_is_not_ascii_is_an_error() -> None:
    from trajstore.trainers.texts import AsciiTokenizer

    with pytest.raises(Exception, match="UNK"):
        AsciiTokenizer().pretrained()("é")


def test_the_states_of_two_optimizers(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1))
    model.loss_type = "ForCausalLM"
    hidden = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is one for one in hidden)]
    pair = torch.optim.Muon(hidden), torch.optim.AdamW(others)
    ids = torch.arange(12).reshape(2, 6)
    with capture(model, pair, tmp_path / "run.zarr", variables="everything"):
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    found = checkout(tmp_path / "run.zarr", tmp_path / "step", step=2, optimizer=True)
    states = torch.load(found.path / "optimizer.pt")
    assert same(states, [one.state_dict() for one in pair])
