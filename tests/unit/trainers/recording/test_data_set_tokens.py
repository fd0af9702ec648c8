"""What a Trainer's data set tells of the tokens, held against counts made by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from list_recorder import HIDDEN, VOCAB, TinyModel, batches  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments  # noqa: E402

from trainers import TrajectoryCallback  # noqa: E402
from trainers.recording import data_set_tokens  # noqa: E402
from trainers.recording.data_set_tokens import facts_of_trainer  # noqa: E402
from trainers.recording.options import RecordingOptions  # noqa: E402
from trainers.recording.parameters import find_parameters  # noqa: E402
from trajstore import verify  # noqa: E402

pytestmark = pytest.mark.torch

EXAMPLES = [
    {"input_ids": [1, 2, 2, 0], "attention_mask": [1, 1, 1, 0], "labels": [2, 2, 5, -100]},
    {"input_ids": [3, 3, 3], "attention_mask": [1, 1, 1], "labels": [3, 3, -100]},
]
COUNTS = [0, 1, 2, 3, 0, 1] + [0] * (VOCAB - 6)


def told(data_set: Any, tokenizer: Any = None, processes: int = 1, **options: Any) -> Any:
    model = TinyModel()
    wanted = RecordingOptions(**options)
    parameters = find_parameters(model, torch.optim.SGD(model.parameters()), wanted.parameter)
    return facts_of_trainer(
        model, parameters, wanted, data_set=data_set, tokenizer=tokenizer, processes=processes
    )


def tensors() -> list[dict[str, Any]]:
    return [{name: torch.tensor(row[name]) for name in row} for row in EXAMPLES]


def table() -> Any:
    library = pytest.importorskip("datasets")
    return library.Dataset.from_list([*EXAMPLES, {**EXAMPLES[0], "input_ids": [9] * 4}]).select(
        [1, 0]
    )


def transformed() -> Any:
    library = pytest.importorskip("datasets")
    made = library.Dataset.from_list([{"row": 0}, {"row": 1}])
    made.set_transform(lambda rows: {
        name: [EXAMPLES[row][name] for row in rows["row"]] for name in EXAMPLES[0]
    })  # fmt: skip
    return made


@pytest.mark.parametrize("made", [lambda: EXAMPLES, tensors, table, transformed])
def test_tokens_are_counted_where_they_are_attended_to_or_predicted(made: Any) -> None:
    facts = told(made())
    assert facts.options["token_count"].tolist() == COUNTS
    assert facts.options["is_dead"].tolist() == [count == 0 for count in COUNTS]
    assert facts.origin == {"tokens_counted": {"examples": 2, "tokens": 7}}
    assert f"2 examples of the Trainer's data set: {VOCAB - 4} of {VOCAB}" in facts.notes[0]


def failing() -> Any:
    class Failing(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            raise RuntimeError("no such file")

    return Failing([0])


@pytest.mark.parametrize(
    ("data_set", "reason"),
    [
        (iter(EXAMPLES), "the Trainer's data set is streamed"),
        ([{"text": "a"}], "have no input_ids"),
        ([[1, 2, 3]], "have no input_ids"),
        ([{"input_ids": [VOCAB]}], f"its input_ids go beyond the {VOCAB} tokens"),
        ([{"input_ids": [-1]}], "its input_ids go beyond"),
        (failing(), "example 0 of its data set cannot be read: RuntimeError('no such file')"),
    ],
)
def test_what_cannot_be_counted_is_said(data_set: Any, reason: str) -> None:
    facts = told(data_set)
    assert not facts.options
    (note,) = facts.notes
    assert reason in note
    assert "trajstore annotate" in note


def test_a_data_set_that_takes_too_long_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_set_tokens, "COUNTING_SECONDS", -1.0)
    assert "takes more than" in told(EXAMPLES).notes[0]


def test_several_processes_do_not_count() -> None:
    assert "several processes train" in told(EXAMPLES, processes=2).notes[0]


def test_what_is_given_wins_and_what_goes_on_is_kept() -> None:
    for given in ({"is_dead": [True] * VOCAB}, {"token_count": [1] * VOCAB}, {"resume": True}):
        facts = told(EXAMPLES, **given)
        assert not facts.options
        assert not facts.notes
    assert told(EXAMPLES, resume=True, tokens="dead").options
    assert HIDDEN != VOCAB
    assert not told(EXAMPLES, parameter="mix.weight").options


def test_texts_are_of_the_tokenizer() -> None:
    words = {"a": 0, "b\t": 1, "c": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert told([], tokenizer).options["token_text"] == ["a", "b\\t", "c"] + [""] * (VOCAB - 3)
    assert "token_text" not in told([], tokenizer, token_text=["x"] * VOCAB).options


def test_training_draws_what_it_would_have_drawn() -> None:
    class Drawing(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(number)

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    TinyModel()
    expected = drawn()
    seed()
    assert told(Drawing(EXAMPLES)).options
    assert drawn() == expected


def test_a_trainer_with_the_path_of_a_run_tells_dead_tokens_from_live_ones(tmp_path: Path) -> None:
    examples = [{name: values[0] for name, values in row.items()} for row in batches(4)]
    notes: list[str] = []
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    callback = TrajectoryCallback(tmp_path / "run.zarr", on_note=notes.append)
    Trainer(TinyModel(), arguments, train_dataset=examples, callbacks=[callback]).train()
    ds = xr.open_zarr(tmp_path / "run.zarr")
    seen = torch.stack([row["input_ids"] for row in examples]).unique()
    assert set(np.flatnonzero(~ds.is_dead.values)) >= set(seen.tolist())
    assert ds.is_dead.values[13:].all()
    assert ds.attrs["provenance"]["tokens_counted"]["examples"] == 4
    assert any("are counted in the 4 examples" in note for note in notes)
    assert not verify(tmp_path / "run.zarr").problems
