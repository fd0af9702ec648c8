"""Every row that the callback records in a Trainer, bit for bit what a list kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from hf_trainings import FailAfter, examples, tiny_gpt2, trainer_of  # noqa: E402
from list_recorder import Lists, TinyModel  # noqa: E402
from transformers import PretrainedConfig, Trainer, TrainerCallback  # noqa: E402

from trajstore.errors import RecordingError, RunExists  # noqa: E402
from trajstore.trainers import TrajectoryCallback  # noqa: E402

pytestmark = pytest.mark.torch


class ListTrainer(Trainer):
    """Keeps lists as the notebooks do: the gradient after the backward pass, W after the step."""

    lists: Lists
    losses: list[Any]

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


@pytest.mark.parametrize(("dtype", "accumulation"), [(torch.float32, 2), (torch.bfloat16, 1)])
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
    "given", [{"label_smoothing_factor": 0.2}, {"loss": preferred}, {"kind": PenaltyTrainer}]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_what_the_trainer_differentiates(
    given: dict[str, Any], accumulation: int, tmp_path: Path, tiny: Any
) -> None:
    """The Trainer divides each loss by the number of micro-batches, and logs their sum."""
    tiny.config = PretrainedConfig()  # smoothing of labels looks into it
    kept = trained(
        tiny,
        tmp_path / "run.zarr",
        steps=3,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        **given,
    )
    expected = np.reshape(kept.losses, (3, accumulation)).sum(axis=1)
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
        trained(tiny, tmp_path / "run.zarr", kind=Full, steps=3, options=options, **arguments)

    if at:
        with pytest.raises(RecordingError, match="pass overwrite=True"):
            train()
        refused.clear()
    train(overwrite=bool(at))
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert (refused, ds.attrs["status"]) == ([4], "complete")
    assert ds.step.values.tolist() == [0, 1, 2, 3]


def test_after_a_training_that_failed_the_next_one_begins_anew(tmp_path: Path, tiny: Any) -> None:
    """As in a notebook, where nobody closes the first callback, and the process lives on."""
    path = tmp_path / "run.zarr"
    failing = trainer_of(tiny, tmp_path, TrajectoryCallback(path), FailAfter(2))
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    with pytest.raises(RecordingError, match="create a new callback"):
        failing.train()
    assert xr.open_zarr(path).attrs["status"] == "interrupted"
    assert xr.open_zarr(path).step.values.tolist() == [0, 1, 2]

    failing = trainer_of(tiny, tmp_path, TrajectoryCallback(path, overwrite=True), FailAfter(3))
    with pytest.raises(KeyboardInterrupt):
        failing.train()
    trainer_of(tiny, tmp_path, TrajectoryCallback(path, overwrite=True)).train()
    assert xr.open_zarr(path).step.values.tolist() == [0, 1, 2, 3, 4]
    assert xr.open_zarr(path).attrs["status"] == "complete"


def test_an_interrupted_training_has_its_rows_and_is_resumed_in_its_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.zarr"

    def trainer(*callbacks: Any) -> Any:
        torch.manual_seed(1)
        saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7}
        return trainer_of(tiny_gpt2(), tmp_path, *callbacks, **saved)

    with pytest.raises(KeyboardInterrupt):
        trainer(TrajectoryCallback(path), FailAfter(5)).train()
    ds = xr.open_zarr(path)
    assert (ds.attrs["status"], ds.step.values.tolist()) == ("interrupted", [0, 1, 2, 3, 4, 5])

    resumed = TrajectoryCallback(path, resume=True)
    trainer(resumed).train(resume_from_checkpoint=True)
    ds = xr.open_zarr(path)
    assert (ds.attrs["status"], ds.step.values.tolist()) == ("complete", [*range(8)])
    assert [entry["step"] for entry in ds.attrs["provenance"]["resumed"]] == [4]


class Committed(TrainerCallback):
    """Keeps the last committed step whenever the Trainer has saved a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[int] = []

    def on_save(self, *_: Any, **kwargs: Any) -> None:
        self.steps.append(int(xr.open_zarr(self.path).step[-1]))


def test_the_rows_up_to_a_checkpoint_are_committed(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    committed = Committed(path)
    callbacks = TrajectoryCallback(path, commit_every=None), committed
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    trainer_of(tiny_gpt2(), tmp_path, *callbacks, max_steps=5, **saving).train()
    assert committed.steps == [2, 4, 5]
