from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trajstore.errors import InvalidArgument, RunExists

torch = pytest.importorskip("torch")
from recorded_models import same  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from trajstore.trainers import checkout  # noqa: E402

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
    from trajstore.trainers.texts.tokenizer import AsciiTokenizer

    with pytest.raises(Exception, match="UNK"):
        AsciiTokenizer().pretrained()("é")
