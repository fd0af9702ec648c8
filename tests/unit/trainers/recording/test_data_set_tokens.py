"""What a Trainer's data set tells of the tokens, held against counts made by hand."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from hf_trainings import examples, trainer_of  # noqa: E402
from list_recorder import HIDDEN, VOCAB, TinyModel  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch.utils.data import ConcatDataset, Subset  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from trajstore import verify  # noqa: E402
from trajstore.trainers import TrajectoryCallback  # noqa: E402
from trajstore.trainers.recording import hf_callback  # noqa: E402
from trajstore.trainers.recording.hf_callback import facts_of_trainer  # noqa: E402
from trajstore.trainers.recording.options import RecordingOptions  # noqa: E402
from trajstore.trainers.recording.parameters import (  # noqa: E402
    JoinedOptimizer,
    find_parameters,
)

pytestmark = pytest.mark.torch

EXAMPLES = [
    {"input_ids": [1, 2, 2, 0], "attention_mask": [1, 1, 1, 0], "labels": [2, 2, 5, -100]},
    {"input_ids": [3, 3, 3], "attention_mask": [1, 1, 1], "labels": [3, 3, -100]},
]
COUNTS = [0, 1, 2, 3, 0, 1] + [0] * (VOCAB - 6)


def facts_of(
    data_set: Any, tokenizer: Any = None, processes: int = 1, model: Any = None, **options: Any
) -> Any:
    model = model or TinyModel()
    wanted = RecordingOptions(**options)
    optimizer = JoinedOptimizer(torch.optim.SGD(model.parameters()))
    parameters = find_parameters(model, optimizer, wanted.parameter)
    loader = SimpleNamespace(dataset=data_set)
    return facts_of_trainer(
        model, parameters, wanted, data_loader=loader, tokenizer=tokenizer, processes=processes
    )


def tensors() -> list[dict[str, Any]]:
    return [{name: torch.tensor(row[name]) for name in row} for row in EXAMPLES]


def hugging_face(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def table() -> Any:
    return hugging_face([*EXAMPLES, {**EXAMPLES[0], "input_ids": [9] * 4}]).select([1, 0])


def parts() -> Any:
    return ConcatDataset([Subset(tensors(), [1]), Subset(table(), np.array([1]))])


def shown() -> Any:
    return table().with_format("torch", columns=["labels"], output_all_columns=True)


def weighted() -> Any:
    return [{**row, "attention_mask": torch.tensor(row["attention_mask"]) / 2} for row in EXAMPLES]


def weighted_table() -> Any:
    return hugging_face([{**row, "attention_mask": [*map(float, row["attention_mask"])]}
                         for row in EXAMPLES])  # fmt: skip


@pytest.mark.parametrize(
    "made", [lambda: EXAMPLES, tensors, table, parts, shown, weighted, weighted_table]
)
def test_tokens_are_counted_where_they_are_attended_to_or_predicted(made: Any) -> None:
    facts = facts_of(made())
    assert facts.options["token_count"].tolist() == COUNTS
    assert facts.options["is_dead"].tolist() == [count == 0 for count in COUNTS]
    assert facts.origin == {"tokens_counted": {"examples": 2, "tokens": 7}}
    assert f"2 examples of the Trainer's data set: {VOCAB - 4} of {VOCAB}" in facts.notes[0]


def test_columns_that_a_table_does_not_show_are_not_counted() -> None:
    inputs = facts_of(table().with_format("torch", columns=["input_ids"])).options["token_count"]
    assert inputs.tolist() == [1, 1, 2, 3] + [0] * (VOCAB - 4)
    assert (
        "have no input_ids" in facts_of(table().with_format("torch", columns=["labels"])).notes[0]
    )


class Examples(torch.utils.data.Dataset[Any]):
    """Draws, and counts what is read, as data sets of users do."""

    reads = 0

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, number: Any) -> Any:
        self.reads += 1
        return EXAMPLES[number]


class Failing(list[Any]):
    def __getitem__(self, number: Any) -> Any:
        raise RuntimeError("no such file")


def transformed() -> Any:
    made = table()
    made.set_transform(lambda rows: rows)
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: None, "the Trainer has no data set"),
        (lambda: iter(EXAMPLES), "the Trainer's data set is streamed"),
        (lambda: [{"text": "a"}], "have no input_ids"),
        (lambda: [[1, 2, 3]], "are list, not dicts"),
        (lambda: [{"input_ids": [0.5]}], "are not integers"),
        (lambda: [{"input_ids": [VOCAB]}], f"its input_ids exceed the {VOCAB} tokens"),
        (lambda: [{"input_ids": [-1]}], "its input_ids exceed"),
        (lambda: [{"input_ids": [[1, 2], [3]]}], "because of an error: ValueError"),
        (lambda: Subset(EXAMPLES, [7]), "because of an error: IndexError"),
        (lambda: hugging_face([{"input_ids": [1, None]}]), "input_ids of its data set have nulls"),
        (lambda: hugging_face([{"input_ids": [1]}, {"input_ids": None}]), "have nulls"),
        (lambda: hugging_face([{"input_ids": ["a"]}]), "are not integers"),
        (lambda: hugging_face([{"input_ids": 1}]), "have no input_ids"),
        (transformed, "its data set has a transform"),
        (lambda: Failing([0]), "has the class Failing"),
        (lambda: Subset(Examples(), [0]), "has the class Examples"),
    ],
)
def test_what_cannot_be_counted_is_reported(made: Any, reason: str) -> None:
    facts = facts_of(made())
    assert not facts.options
    (note,) = facts.notes
    assert reason in note
    assert "trajstore annotate" in note


def test_a_data_set_that_a_pass_could_change_is_not_read() -> None:
    data_set = Examples()
    assert not facts_of(data_set).options
    assert not facts_of(ConcatDataset([EXAMPLES, data_set])).options
    assert data_set.reads == 0


def test_a_module_of_the_users_may_be_called_as_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Examples))
    assert facts_of(EXAMPLES).options["token_count"].tolist() == COUNTS
    assert "has the class Examples" in facts_of(Examples()).notes[0]


def test_a_data_set_that_takes_too_long_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_callback, "COUNTING_SECONDS", -1.0)
    assert "takes more than" in facts_of(EXAMPLES).notes[0]


def test_several_processes_do_not_count() -> None:
    assert "several processes train" in facts_of(EXAMPLES, processes=2).notes[0]


def test_given_labels_take_precedence_over_counted_ones() -> None:
    for given in ({"is_dead": [True] * VOCAB}, {"token_count": [1] * VOCAB}, {"resume": True}):
        facts = facts_of(EXAMPLES, **given)
        assert not facts.options
        assert not facts.notes
    assert facts_of(EXAMPLES, resume=True, tokens="dead").options
    assert HIDDEN != VOCAB
    assert not facts_of(EXAMPLES, parameter="mix.weight").options


def test_texts_are_of_the_tokenizer() -> None:
    words = {"a": 0, "b\t": 1, "c": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert facts_of([], tokenizer).options["token_text"] == ["a", "b\\t", "c"] + [""] * (VOCAB - 3)
    assert "token_text" not in facts_of([], tokenizer, token_text=["x"] * VOCAB).options
    more = {str(number): number for number in range(VOCAB + 1)}
    backend = Tokenizer(models.WordLevel(more, unk_token="0"))
    longer = facts_of([], PreTrainedTokenizerFast(tokenizer_object=backend))
    assert "token_text" not in longer.options
    assert any(f"has {VOCAB + 1} tokens, and the matrix {VOCAB} rows" in n for n in longer.notes)


def test_a_tokenizer_that_fails_is_reported() -> None:
    facts = facts_of(EXAMPLES, SimpleNamespace(backend_tokenizer="none"))
    assert set(facts.options) == {"is_dead", "token_count"}
    assert "does not record the texts of its tokens" in facts.notes[1]


def test_a_model_that_cannot_tell_its_embeddings_is_reported() -> None:
    class Unknown(TinyModel):
        def get_output_embeddings(self) -> Any:
            raise NotImplementedError  # as models of transformers do that have none

    facts = facts_of(EXAMPLES, model=Unknown(), parameter="embedding.weight")
    assert not facts.options
    assert "NotImplementedError" in facts.notes[0]


class Untied(TinyModel):
    """Whose embeddings are two matrices, and a third has as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = torch.nn.Parameter(self.head.weight.detach().clone())
        self.square = torch.nn.Linear(VOCAB, VOCAB)

    def get_input_embeddings(self) -> Any:
        return self.embedding


@pytest.mark.parametrize(
    ("parameter", "known"),
    [
        ("head.weight", True),
        ("embedding.weight", True),
        (["head.weight", "mix.weight"], True),
        ("square.weight", False),
        (["head.weight", "square.weight"], False),
    ],
)
def test_only_rows_of_embeddings_are_tokens(parameter: Any, known: bool) -> None:
    facts = facts_of(EXAMPLES, model=Untied(), parameter=parameter)
    assert bool(facts.options) is known


def test_training_draws_what_it_would_have_drawn() -> None:
    data_set, model = table(), TinyModel()
    states = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    assert facts_of(data_set, model=model).options
    assert states == (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist())


def test_a_trainer_with_the_path_of_a_run_tells_dead_tokens_from_live_ones(tmp_path: Path) -> None:
    data, notes = examples(4), []
    callback = TrajectoryCallback(tmp_path / "run.zarr", on_note=notes.append)
    trainer_of(TinyModel(), tmp_path, callback, data=data, max_steps=2).train()
    ds = xr.open_zarr(tmp_path / "run.zarr")
    seen = torch.stack([row["input_ids"] for row in data]).unique()
    assert set(np.flatnonzero(~ds.is_dead.values)) >= set(seen.tolist())
    assert ds.is_dead.values[13:].all()
    assert ds.attrs["provenance"]["tokens_counted"]["examples"] == 4
    assert any("come from the 4 examples" in note for note in notes)
    assert not verify(tmp_path / "run.zarr").problems
