"""The matrix and its logits, of models that do not name them as those of transformers do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import HIDDEN, VOCAB, batches  # noqa: E402
from loops_of_others import about, read  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from trajstore.errors import RecordingError  # noqa: E402
from trajstore.trainers import capture  # noqa: E402

pytestmark = pytest.mark.torch


class OwnModel(nn.Module):
    """Returns its loss only. The hidden layer has as many features as there are tokens."""

    def __init__(self, unembed: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pos_emb = nn.Embedding(2 * VOCAB, HIDDEN)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.inner = nn.Sequential(nn.Linear(HIDDEN, VOCAB), nn.GELU(), nn.Linear(VOCAB, HIDDEN))
        self.unembed = unembed
        if unembed != "functional":
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if unembed == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Any, labels: Any) -> Any:
        x = self.embedding(input_ids) + self.pos_emb(torch.arange(input_ids.shape[1]))
        x = self.inner(x)
        if self.unembed == "functional":
            logits = x @ self.embedding.weight.T
        elif self.unembed == "chunks":
            logits = torch.cat([self.head(part) for part in x.split(2)])
        elif self.unembed == "flat":
            logits = self.head(x.flatten(0, 1)).unflatten(0, input_ids.shape)
        else:
            logits = self.head(x)
        self.logits = logits.detach()
        return cross_entropy(10 * logits.flatten(0, 1).float(), labels.flatten())


class Pairs(nn.Module):
    """As word2vec with two tables: no token has a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.EmbeddingBag(VOCAB, HIDDEN)
        self.outputs = nn.EmbeddingBag(VOCAB, HIDDEN)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return -(self.inputs(input_ids) * self.outputs(labels)).sum(-1).sigmoid().log().mean()


def train(
    model: Any, record: Callable[..., Any], kind: Any = torch.optim.SGD, **options: Any
) -> None:
    optimizer = kind(model.parameters(), lr=0.1)
    with record(optimizer, model, **options):
        for batch in batches(2):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("unembed", "has_logits", "note"),
    [
        ("tied", True, "W is embedding.weight (17 × 8), and not pos_emb.weight (34 × 8), inner.0"),
        ("untied", True, "(34 × 8), inner.0.weight (17 × 8), head.weight (17 × 8)"),
        ("flat", True, "head.weight (17 × 8)"),
        ("functional", False, "W is embedding.weight (17 × 8)"),
        ("chunks", False, "the model calls its unembedding 2 times in a forward pass"),
    ],
)
def test_the_embedding_and_its_logits_are_found(
    unembed: str, has_logits: bool, note: str, record: Any, notes: list[str], tmp_path: Path
) -> None:
    model = OwnModel(unembed)
    train(model, record)
    ds = read(tmp_path)
    assert ds.attrs["recording"]["parameter"] == "embedding.weight"
    assert about(notes, note)
    assert ("logits" in ds) == has_logits
    if has_logits:
        np.testing.assert_array_equal(ds.logits[-1], model.logits[0, -1])


def test_what_makes_no_logits_has_no_note_about_them(
    record: Any, notes: list[str], tmp_path: Path
) -> None:
    train(Pairs(), record, is_dead=np.zeros(VOCAB, bool), strict=True)
    assert notes == ["no parameter= was given, so W is inputs.weight (17 × 8), and not "
                     "outputs.weight (17 × 8)"]  # fmt: skip
    assert {"W", "grad", "loss"} <= set(read(tmp_path))


def test_an_inner_matrix_has_no_logits(record: Any, notes: list[str], tmp_path: Path) -> None:
    train(OwnModel("functional"), record, parameter="inner.0.weight")
    assert "logits" not in read(tmp_path)
    assert not about(notes, "logits")


def test_only_an_embedding_that_is_trained_is_chosen(record: Any, notes: list[str]) -> None:
    model = OwnModel("untied")
    model.embedding.requires_grad_(False)
    train(model, record)
    assert about(notes, "W is pos_emb.weight (34 × 8)")
    model.pos_emb.requires_grad_(False)
    with pytest.raises(
        RecordingError, match=r"no embedding that the optimizer trains.*head\.weight"
    ):
        train(model, record, overwrite=True)


def test_a_model_that_names_its_embeddings_has_no_note(
    tiny: Any, record: Any, notes: list[str]
) -> None:
    train(Losses(tiny), record)
    assert not about(notes, "no parameter= was given")


class Losses(nn.Module):
    """Returns the loss of a model only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.get_output_embeddings = model.get_output_embeddings

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)["loss"]


def test_the_input_embedding_of_a_classifier(record: Any, notes: list[str]) -> None:
    model = OwnModel("functional")
    model.get_output_embeddings = lambda: None
    model.get_input_embeddings = lambda: model.pos_emb
    train(model, record)
    assert about(notes, "W is pos_emb.weight")


def test_state_that_an_optimizer_lacks_is_no_news(record: Any, notes: list[str]) -> None:
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        train(OwnModel("untied"), record, kind, overwrite=True)
    assert not about(notes, "exp_avg")


def test_the_loop_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[4] / "README.md").read_text()
    loop = re.search(r"^with capture\(.*?(?=^```$)", readme, re.DOTALL | re.MULTILINE)
    assert loop is not None
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    exec(loop[0], {
        "capture": capture, "cross_entropy": cross_entropy, "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [tuple(batch.values()) for batch in batches(2)],
    })  # fmt: skip
    assert {"W", "exp_avg", "grad", "logits", "loss"} <= set(read(tmp_path))
