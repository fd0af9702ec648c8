"""Every row that the callback records in a Trainer, bit for bit what a list kept."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from small_trainings import examples, same_values, tiny_gpt2, trainer_of
from tokenizers import Tokenizer, models
from torch.utils.data import ConcatDataset, Subset
from trainings import HIDDEN, VOCAB, Lists, TinyModel
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)

from trajstore import verify
from trajstore.errors import RecordingError, RunExists
from trajstore.trainers import TrajectoryCallback
from trajstore.trainers.recording.hf_callback import facts_of_trainer
from trajstore.trainers.recording.options import RecordingOptions
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    find_parameters,
)


class ListTrainer(Trainer):
    """Keeps lists as the notebooks do: the gradient after the backward pass, W after the step."""

    lists: Lists
    losses: list[Any]

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(**inputs)["loss"] + model.embedding.weight.square().sum()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        self.gradient = self.lists.parameter.grad.clone()
        return loss


class AfterStep(TrainerCallback):
    def __init__(self, trainer: ListTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.lists.add(grad=self.trainer.gradient)
        self.trainer.lists.after_step(self.trainer.optimizer.optimizer)


def trained(
    model: Any, path: Path, *, steps: int = 7, kind: Any = ListTrainer, **arguments: Any
) -> ListTrainer:
    callback = TrajectoryCallback(path, **arguments.pop("options", {}))
    trainer: ListTrainer = trainer_of(
        model, path.parent, callback, kind=kind, max_steps=steps, **arguments
    )
    trainer.lists, trainer.losses = Lists(model.embedding.weight), []
    trainer.add_callback(AfterStep(trainer))
    trainer.train()
    return trainer


def test_every_row_equals_that_of_lists(
    path: Path, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # 11 examples in batches of 3: epochs end in short batches and in short groups of them.
    trainer = trained(tiny, path, gradient_accumulation_steps=2, max_grad_norm=0.3)
    ds = trainer.lists.agree_with(path)
    assert f"Recorded 8 rows to {path}\n" in capsys.readouterr().out
    assert ds.step.values.tolist() == list(range(8))
    assert ds.attrs["status"] == "complete"
    assert (ds.clip_coef.values[1:] < 1).any()
    assert np.isfinite(ds.clip_coef.values[1:]).all()
    # The Trainer divides each loss by the number of micro-batches: 2, and 2 again.
    expected = np.reshape(trainer.losses[:4], (2, 2)).sum(axis=1)
    np.testing.assert_allclose(ds.loss.values[1:3], expected, rtol=1e-6)
    assert ds.lr.values[1] == 0.01
    assert ds.attrs["optimizer"]["schedule"]["max_grad_norm"] == 0.3
    json.dumps(ds.attrs)
    with pytest.raises(RunExists):
        TrajectoryCallback(path)


def test_the_loss_of_a_causal_model_counts_all_micro_batches(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny_gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    path, data = tmp_path / "run.zarr", examples(6)
    with torch.no_grad():
        stacked = {name: torch.stack([row[name] for row in data]) for name in data[0]}
        expected = model(**stacked).loss.item()
    trainer_of(
        model, tmp_path, TrajectoryCallback(path), data=data, max_steps=1, optim="sgd",
        per_device_train_batch_size=2, gradient_accumulation_steps=3,
    ).train()  # fmt: skip
    ds = xr.open_zarr(path, chunks=None)
    assert ds.loss.values[1] == pytest.approx(expected, rel=1e-5)
    assert "exp_avg" not in ds


class PlainTrainer(ListTrainer):
    """Calls the function of its user in the first step only."""

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        if self.state.global_step:
            self.compute_loss_func = None
        return Trainer.compute_loss(self, *given, **options)


def preferred(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss as that of DPO."""
    chosen, other = output["logits"].log_softmax(-1)[..., :2].mean((0, 1))
    return -torch.nn.functional.logsigmoid(chosen - other)


def test_the_loss_is_what_the_trainer_differentiates(path: Path, tiny: Any) -> None:
    """A function's in the first step, then that of smoothed labels, half of each micro-batch."""

    tiny.config = PretrainedConfig()  # smoothing of labels looks into it
    trainer = trained(
        tiny, path, kind=PlainTrainer, steps=2, loss=preferred, label_smoothing_factor=0.2,
        per_device_train_batch_size=1, gradient_accumulation_steps=2,
    )  # fmt: skip
    expected = np.reshape(trainer.losses, (2, 2)).sum(axis=1)
    np.testing.assert_allclose(xr.open_zarr(path).loss.values[1:], expected, rtol=1e-6)


@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_smaller_batch_begins_the_recording_again(at: int, tmp_path: Path, tiny: Any) -> None:
    """``auto_find_batch_size`` runs the loop again when the memory is full."""
    refused: list[int] = []

    class Full(ListTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            if not refused and self.state.global_step == at:
                refused.append(len(inputs["input_ids"]))
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 TiB")
            return super().training_step(model, inputs, *args)

    def train(**options: Any) -> None:
        arguments = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
        trained(tiny, tmp_path / "run.zarr", kind=Full, steps=3, options=options, **arguments)

    if at:
        with pytest.raises(RecordingError, match="pass overwrite=True"):
            train()
        refused.clear()
    train(overwrite=bool(at))
    ds = xr.open_zarr(tmp_path / "run.zarr", chunks=None)
    assert (refused, ds.attrs["status"]) == ([4], "complete")
    assert ds.step.values.tolist() == [0, 1, 2, 3]


def test_a_training_that_failed_continues_from_its_checkpoint_or_begins_anew(
    tmp_path: Path, path: Path
) -> None:
    """As in a notebook, where nobody closes the first callback, and the process lives on."""
    committed: list[int] = []

    class Saving(Trainer):  # type: ignore[misc]
        def training_step(self, *given: Any) -> Any:
            if failing is self and self.state.global_step == 3:
                raise KeyboardInterrupt
            return super().training_step(*given)

        def save_model(self, *given: Any, **options: Any) -> None:
            committed.append(int(xr.open_zarr(path).step[-1]))
            super().save_model(*given, **options)

    def training(**options: Any) -> Any:
        torch.manual_seed(1)
        chosen = {"variables": "matrix,norms", "block_rows": 4, "commit_every": None, **options}
        return trainer_of(
            tiny_gpt2(), tmp_path, TrajectoryCallback(path, **chosen), kind=Saving,
            data=examples(30), max_steps=5, per_device_train_batch_size=4, save_strategy="steps",
            save_steps=2,
        )  # fmt: skip

    failing = training()
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    with pytest.raises(RecordingError, match="create a new callback"):
        failing.train()
    ds = xr.open_zarr(path)
    assert (ds.attrs["status"], ds.step.values.tolist()) == ("interrupted", [*range(4)])
    training(resume=True).train(resume_from_checkpoint=True)
    resumed = Path(shutil.copytree(path, tmp_path / "resumed.zarr"))
    unbroken = training(overwrite=True)
    unbroken.train()
    assert committed == [2, 4, 5, 2, 4, 5]
    ds = same_values(path, resumed)
    assert (ds.attrs["status"], ds.step.values.tolist()) == ("complete", [*range(6)])
    assert [entry["step"] for entry in ds.attrs["provenance"]["resumed"]] == [2]
    assert np.isfinite(ds.loss.values[1:]).all()
    unbroken.callback_handler.on_save(unbroken.args, unbroken.state, unbroken.control)  # of a user


EXAMPLES = [
    {"input_ids": [1, 2, 2, 0], "attention_mask": [1, 1, 1, 0], "labels": [2, 2, 5, -100]},
    {"input_ids": [3, 3, 3], "attention_mask": [1, 1, 1], "labels": [3, 3, -100]},
]
COUNTS = [0, 1, 2, 3, 0, 1] + [0] * (VOCAB - 6)


def facts_of(
    data_set: Any,
    tokenizer: Any = None,
    *,
    model: Any = None,
    processes: int = 1,
    seconds: float = 60.0,
    **options: Any,
) -> Any:
    model = model or TinyModel()
    wanted = RecordingOptions(**options)
    optimizer = JoinedOptimizer(torch.optim.SGD(model.parameters()))
    parameters = find_parameters(model, optimizer, wanted.parameter)
    loader = SimpleNamespace(dataset=data_set)
    return facts_of_trainer(
        model, parameters, wanted, data_loader=loader, tokenizer=tokenizer, processes=processes,
        seconds=seconds,
    )  # fmt: skip


def tensors() -> list[dict[str, Any]]:
    return [{name: torch.tensor(row[name]) for name in row} for row in EXAMPLES]


def hugging_face(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def table() -> Any:
    return hugging_face([*EXAMPLES, {**EXAMPLES[0], "input_ids": [9] * 4}]).select([1, 0])


WEIGHTED = [row | {"attention_mask": torch.tensor(row["attention_mask"]) / 2} for row in EXAMPLES]


@pytest.mark.parametrize(
    "made",
    [
        lambda: EXAMPLES,
        tensors,
        table,
        lambda: ConcatDataset([Subset(tensors(), [1]), Subset(table(), np.array([1]))]),
        lambda: table().with_format("torch", columns=["labels"], output_all_columns=True),
        lambda: WEIGHTED,
        lambda: hugging_face(WEIGHTED),
    ],
)
def test_tokens_are_counted_where_they_are_attended_to_or_predicted(made: Any) -> None:
    data_set, model = made(), TinyModel()
    states = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    facts = facts_of(data_set, model=model)
    assert states == (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist())
    assert facts.options["token_count"].tolist() == COUNTS
    assert facts.options["is_dead"].tolist() == [count == 0 for count in COUNTS]
    assert facts.origin == {"tokens_counted": {"examples": 2, "tokens": 7}}
    assert f"2 examples of the Trainer's data set: {VOCAB - 4} of {VOCAB}" in facts.notes[0]


def test_columns_that_a_table_does_not_show_are_not_counted() -> None:
    inputs = facts_of(table().with_format("torch", columns=["input_ids"])).options["token_count"]
    assert inputs.tolist() == [1, 1, 2, 3] + [0] * (VOCAB - 4)


class Examples(torch.utils.data.Dataset[Any]):
    """Draws, and counts what is read, as data sets of users do."""

    reads = 0

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, number: Any) -> Any:
        self.reads += 1
        return EXAMPLES[number]


def transformed() -> Any:
    made = table()
    made.set_transform(lambda rows: rows)
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: None, "the Trainer has no data set"),
        (lambda: iter(EXAMPLES), "the Trainer's data set is streamed"),
        (lambda: table().with_format("torch", columns=["labels"]), "have no input_ids"),
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
        (lambda: Subset(Examples(), [0]), "has the class Examples"),
        (lambda: type("Own", (list,), {})(EXAMPLES), "has the class Own"),
        (lambda: EXAMPLES, "takes more than"),
        (lambda: EXAMPLES, "several processes train"),
    ],
)
def test_what_cannot_be_counted_is_reported(made: Any, reason: str) -> None:
    seconds = -1.0 if reason == "takes more than" else 60.0
    facts = facts_of(made(), processes=1 + reason.startswith("several"), seconds=seconds)
    assert not facts.options
    (note,) = facts.notes
    assert reason in note
    assert "trajstore annotate" in note


def test_a_data_set_that_a_pass_could_change_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user may be called as the library."""
    data_set = Examples()
    assert not facts_of(data_set).options
    assert not facts_of(ConcatDataset([EXAMPLES, data_set])).options
    assert data_set.reads == 0
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Examples))
    assert facts_of(EXAMPLES).options["token_count"].tolist() == COUNTS
    assert "has the class Examples" in facts_of(Examples()).notes[0]


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


def test_a_tokenizer_or_a_model_that_fails_is_reported() -> None:
    class Unknown(TinyModel):
        def get_output_embeddings(self) -> Any:
            raise NotImplementedError  # as models of transformers do that have none

    facts = facts_of(EXAMPLES, SimpleNamespace(backend_tokenizer="none"))
    assert set(facts.options) == {"is_dead", "token_count"}
    assert "does not record the texts of its tokens" in facts.notes[1]
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
        ("head.weight", True), ("embedding.weight", True), (["head.weight", "mix.weight"], True),
        ("square.weight", False), (["head.weight", "square.weight"], False),
    ],
)  # fmt: skip
def test_only_rows_of_embeddings_are_tokens(parameter: Any, known: bool) -> None:
    facts = facts_of(EXAMPLES, model=Untied(), parameter=parameter)
    assert bool(facts.options) is known


def test_a_trainer_with_the_path_of_a_run_tells_dead_tokens_from_live_ones(
    tmp_path: Path, tiny: Any
) -> None:
    """Its examples may have their indices, which the model does not get."""
    data = [row | {"example_index": torch.tensor(n)} for n, row in enumerate(examples(4))]
    notes: list[str] = []
    variables = ("W", "batch", "hidden_states")
    callback = TrajectoryCallback(tmp_path / "run.zarr", variables, on_note=notes.append)
    inputs: list[Any] = []
    tiny.embedding.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    options = {"max_steps": 2, "remove_unused_columns": False}
    trainer_of(tiny, tmp_path, callback, data=data, **options).train()
    ds = xr.open_zarr(tmp_path / "run.zarr", chunks=None)
    ids = torch.stack([row["input_ids"] for row in data])
    told = ds.batch.values[1:]
    assert np.isnan(told).sum(1).tolist() == [0, 2]  # 4 are 3 and 1
    assert torch.equal(ids[told[~np.isnan(told)].astype(int)], torch.cat(inputs))
    assert np.array_equal(np.isnan(told), np.isnan(ds.hidden_states.values[1:]).all((2, 3)))
    assert set(np.flatnonzero(~ds.is_dead.values)) >= set(ids.unique().tolist())
    assert ds.is_dead.values[13:].all()
    assert ds.attrs["provenance"]["tokens_counted"]["examples"] == 4
    assert any("come from the 4 examples" in note for note in notes)
    assert not verify(tmp_path / "run.zarr").problems
