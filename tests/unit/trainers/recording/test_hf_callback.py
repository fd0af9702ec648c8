"""Every row that the callback records in a Trainer, bit for bit what a list kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from list_recorder import Lists, TinyModel, batches  # noqa: E402
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from trajstore import verify  # noqa: E402
from trajstore.errors import RecordingError, RunExists  # noqa: E402
from trajstore.trainers import TrajectoryCallback  # noqa: E402

pytestmark = pytest.mark.torch


class ListTrainer(Trainer):
    """Keeps lists as the notebooks do: the gradient after the backward pass, W after the step."""

    lists: Lists
    losses: list[Any]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.gradient = self.lists.parameter.grad.clone()
        return loss


class AfterStep(TrainerCallback):
    def __init__(self, trainer: ListTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.lists.add(grad=self.trainer.gradient)
        self.trainer.lists.after_step(self.trainer.optimizer.optimizer)


def examples(count: int) -> list[dict[str, Any]]:
    return [{name: values[0] for name, values in row.items()} for row in batches(count)]


def trained(model: Any, path: Path, *, steps: int = 7, **arguments: Any) -> ListTrainer:
    arguments = {
        "output_dir": str(path.parent / "out"),
        "max_steps": steps,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.01,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
    } | arguments
    options, kind = arguments.pop("options", {}), arguments.pop("trainer", ListTrainer)
    trainer = kind(
        model=model,
        compute_loss_func=arguments.pop("compute_loss_func", None),
        args=TrainingArguments(**arguments),
        train_dataset=examples(11),
        callbacks=[TrajectoryCallback(path, **options)],
    )
    trainer.lists = Lists(model.embedding.weight)
    trainer.add_callback(AfterStep(trainer))
    trainer.train()
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_row_equals_that_of_lists(
    dtype: Any, accumulation: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    path = tmp_path / "run.zarr"
    # 11 examples in batches of 3: epochs end in short batches and in short groups of them.
    trainer = trained(
        TinyModel(dtype),
        path,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.3,
        bf16=dtype is torch.bfloat16,
    )
    ds = trainer.lists.agree_with(path)
    assert f"Recorded 8 rows to {path}\n" in capsys.readouterr().out
    assert ds.step.values.tolist() == list(range(8))
    assert ds.attrs["status"] == "complete"
    assert (ds.clip_coef.values[1:] < 1).any()
    assert np.isfinite(ds.clip_coef.values[1:]).all()
    assert abs(ds.loss.values[1] - np.log(17)) < 1
    assert ds.lr.values[1] == 0.01
    assert ds.attrs["optimizer"]["schedule"]["max_grad_norm"] == 0.3
    json.dumps(ds.attrs)


def test_all_parameters_of_another_training(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    path = tmp_path / "run.zarr"
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, use_cpu=True, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        learning_rate=0.01, max_grad_norm=0.1,
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in model.parameters()]
    callback = TrajectoryCallback(path, variables="norms")
    Trainer(model=model, args=arguments, train_dataset=examples(9), callbacks=[callback]).train()
    ds = xr.open_zarr(path).load()
    names = [name for name, _ in model.named_parameters()]  # the head is tied
    assert ds.parameter.values.tolist() == names
    for row, parameters in ((0, before), (-1, model.parameters())):
        norms = [parameter.detach().norm().item() for parameter in parameters]
        np.testing.assert_allclose(ds.param_norm[row], norms, rtol=1e-6)
    raw = np.linalg.norm(ds.param_grad_norm.values[1:].astype(np.float64), axis=1)
    np.testing.assert_allclose(raw, ds.grad_norm.values[1:], rtol=1e-5)  # what was clipped
    assert (ds.param_update_norm.values[1:] > 0).all()
    assert (ds.param_update_lost.values[1:] < 1).all()
    assert not verify(path).problems


def test_the_loss_of_a_causal_model_counts_all_micro_batches(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=1, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    path = tmp_path / "run.zarr"
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2,
        gradient_accumulation_steps=3, use_cpu=True, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        learning_rate=0.01, warmup_steps=5, optim="sgd",
    )  # fmt: skip
    data = examples(6)
    with torch.no_grad():
        stacked = {name: torch.stack([row[name] for row in data]) for name in data[0]}
        expected = model(**stacked).loss.item()
    Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[TrajectoryCallback(path)]
    ).train()
    ds = xr.open_zarr(path)
    assert ds.loss.values[1] == pytest.approx(expected, rel=1e-5)
    assert "exp_avg" not in ds


class PenaltyTrainer(ListTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        loss = output["loss"] + model.embedding.weight.square().sum()
        return (loss, output) if return_outputs else loss


def preferred(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss as that of DPO."""
    chosen, other = output["logits"].log_softmax(-1)[..., :2].mean((0, 1))
    return -torch.nn.functional.logsigmoid(chosen - other)


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        (ListTrainer, {"label_smoothing_factor": 0.2}),
        (ListTrainer, {"compute_loss_func": preferred}),
        (PenaltyTrainer, {}),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_what_the_trainer_differentiates(
    trainer: Any, given: dict[str, Any], accumulation: int, tmp_path: Path, tiny: Any
) -> None:
    """The Trainer divides each loss by the number of micro-batches, and logs their sum."""

    tiny.config = PretrainedConfig()  # smoothing of labels looks into it
    losses = []

    class Kept(trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    kept = trained(
        tiny,
        tmp_path / "run.zarr",
        trainer=Kept,
        steps=3,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        **given,
    )
    expected = np.reshape(losses, (3, accumulation)).sum(axis=1)
    ds = kept.lists.agree_with(tmp_path / "run.zarr")
    np.testing.assert_allclose(ds.loss.values[1:], expected, rtol=1e-6)


@pytest.mark.parametrize("at", [0, 1])
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
        trained(tiny, tmp_path / "run.zarr", trainer=Full, steps=3, options=options, **arguments)

    if at:
        with pytest.raises(RecordingError, match="pass overwrite=True"):
            train()
        refused.clear()
    train(overwrite=bool(at))
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert (refused, ds.attrs["status"]) == ([4], "complete")
    assert ds.step.values.tolist() == [0, 1, 2, 3]


def test_early_stop_records_the_last_step(tmp_path: Path, tiny: Any) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 5

    path = tmp_path / "run.zarr"
    trainer = Trainer(
        model=tiny,
        args=TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=50,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=examples(40),
        callbacks=[TrajectoryCallback(path, every=3), Stop()],
    )
    trainer.train()
    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == [0, 3, 5]
    assert np.array_equal(ds.W.values[-1], tiny.embedding.weight.detach().numpy())


def test_a_callback_records_once_and_never_over_a_run(tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "run.zarr"
    trainer = trained(tiny, path, steps=1)
    with pytest.raises(RecordingError, match="create a new callback"):
        trainer.train()
    with pytest.raises(RunExists):
        TrajectoryCallback(path)


FAILING = """
import sys
import torch
from list_recorder import TinyModel, batches
from transformers import Trainer, TrainerCallback, TrainingArguments
from trajstore.trainers import TrajectoryCallback


class Fail(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise RuntimeError("the training failed")


rows = [{name: values[0] for name, values in batch.items()} for batch in batches(40)]
arguments = TrainingArguments(
    output_dir="out", max_steps=12, use_cpu=True, save_strategy="no", report_to="none",
    disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
)
callback = TrajectoryCallback("run.zarr", block_rows=4)
Trainer(model=TinyModel(), args=arguments, train_dataset=rows, callbacks=[callback, Fail()]).train()
"""


@pytest.mark.nightly
def test_a_script_whose_trainer_fails_leaves_all_whole_rows(tmp_path: Path) -> None:
    """Nobody closes the callback then but the interpreter's end, where pools take no more work."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("RuntimeError: the training failed")
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert np.isfinite(ds.W.values).all()


class FailAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer_of(tiny: Any, path: Path, *callbacks: TrainerCallback) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(path.parent / "out"), max_steps=4, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(
        model=tiny, args=arguments, train_dataset=examples(40), callbacks=list(callbacks)
    )


def test_after_a_training_that_failed_the_next_one_begins_anew(tmp_path: Path, tiny: Any) -> None:
    """As in a notebook, where nobody closes the first callback, and the process lives on."""
    path = tmp_path / "run.zarr"
    failing = trainer_of(tiny, path, TrajectoryCallback(path), FailAt(2))
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    with pytest.raises(RecordingError, match="create a new callback"):
        failing.train()
    assert xr.open_zarr(path).attrs["status"] == "interrupted"
    assert xr.open_zarr(path).step.values.tolist() == [0, 1, 2]

    failing = trainer_of(tiny, path, TrajectoryCallback(path, overwrite=True), FailAt(3))
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    trainer_of(tiny, path, TrajectoryCallback(path, overwrite=True)).train()
    assert xr.open_zarr(path).step.values.tolist() == [0, 1, 2, 3, 4]
    assert xr.open_zarr(path).attrs["status"] == "complete"


def test_in_a_notebook_it_is_closed_when_the_cell_ends(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Events:
        def __init__(self) -> None:
            self.callbacks: dict[str, list[Any]] = {"post_run_cell": []}

        def register(self, event: str, function: Any) -> None:
            self.callbacks[event].append(function)

        def unregister(self, event: str, function: Any) -> None:
            self.callbacks[event].remove(function)

    events = Events()
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    path = tmp_path / "run.zarr"
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tiny, path, TrajectoryCallback(path), FailAt(2)).train()
    for function in list(events.callbacks["post_run_cell"]):
        function(None)
    assert xr.open_zarr(path).attrs["status"] == "interrupted"
    assert xr.open_zarr(path).sizes["step"] == 3
    assert events.callbacks["post_run_cell"] == []
