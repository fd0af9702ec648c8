"""Every row that the callback records in a Trainer of Lightning, bit for bit what a list kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from trainings import BATCH, CONTEXT, Lists, TinyModel

from trajstore.errors import RunExists
from trajstore.trainers import LightningCallback
from trajstore.trainers.recording.gradient import clip_coefficient

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")

EPOCH = 4


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Keeps lists: what the backward passes left, and what the optimizer's step did."""

    def __init__(self, *, fails_at: int = -1, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = TinyModel()
        self.automatic_optimization = not manual
        self.fails_at = fails_at
        self.lists = Lists(self.model.embedding.weight)
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, number: int) -> Any:
        if self.global_step == self.fails_at:
            raise KeyError("the training failed")
        output = self.model(batch[:, :-1], batch[:, 1:])
        self.outputs.append(output)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(output["loss"])
            self.configure_gradient_clipping(optimizer, gradient_clip_val=0.3)
            optimizer.step()
            self.lists.after_step(optimizer.optimizer)
            self.lr_schedulers().step()
        return output["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any, **options: Any
    ) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.lists.add(
            loss=torch.stack([output["loss"] for output in self.outputs]).mean(),
            logits=self.outputs[0]["logits"][0, -1],
            grad=self.model.embedding.weight.grad,
            clip_coef=clip_coefficient(norm, gradient_clip_val or 0.0),
            lr=optimizer.param_groups[0]["lr"],
        )
        self.outputs.clear()
        super().configure_gradient_clipping(optimizer, gradient_clip_val, **options)

    def optimizer_step(self, *given: Any, **options: Any) -> None:
        super().optimizer_step(*given, **options)
        self.lists.after_step(self.optimizers().optimizer)


def trained(
    path: Path, model: Any = None, *, options: Any = None, ckpt_path: Any = None, **arguments: Any
) -> Any:
    model = model or Lit()
    callback = LightningCallback(path, **{"module": "model", **(options or {})})
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=path.parent, callbacks=[callback, *arguments.pop("callbacks", [])],
        **{"max_epochs": 2, "enable_checkpointing": False, **arguments},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 13, (EPOCH, BATCH, CONTEXT + 1), generator=generator)
    trainer.fit(model, ids, ckpt_path=ckpt_path)
    return model


def test_every_row_equals_that_of_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    model = trained(tmp_path / "run.zarr", **arguments)
    ds = model.lists.agree_with(tmp_path / "run.zarr")
    assert ds.step.values.tolist() == [*range(EPOCH + 1)]
    assert ds.attrs["status"] == "complete"
    assert (ds.clip_coef.values[1:] < 1).any()
    assert np.isfinite(ds.logits.values[1:]).all()
    assert f"Recorded 5 rows to {tmp_path / 'run.zarr'}\n" in capsys.readouterr().out
    with pytest.raises(RunExists):
        LightningCallback(tmp_path / "run.zarr")


def test_after_an_exception_it_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    path, failing, committed = tmp_path / "run.zarr", Lit(fails_at=6), []

    def save(trainer: Any, _: Any) -> None:
        trainer.save_checkpoint(tmp_path / "4.ckpt")
        committed.append(int(xr.open_zarr(path).step[-1]))

    saving = lightning.callbacks.LambdaCallback(on_train_epoch_end=save)
    with pytest.raises(KeyError, match="the training failed"):
        trained(path, failing, options={"commit_every": None}, callbacks=[saving])
    assert committed == [EPOCH]
    interrupted = failing.lists.agree_with(path)
    assert interrupted.attrs["status"] == "interrupted"
    assert interrupted.step.values.tolist() == [*range(7)]

    # The module may be left out.
    options = {"module": "", "parameter": "model.embedding.weight"}
    unbroken = trained(tmp_path / "unbroken.zarr", options=options).lists
    trained(path, options={"resume": True}, ckpt_path=tmp_path / "4.ckpt")
    unbroken.agree_with(tmp_path / "unbroken.zarr")
    resumed = unbroken.agree_with(path)
    assert resumed.attrs["status"] == "complete"
    assert resumed.step.values.tolist() == [*range(9)]


def test_manual_optimization(tmp_path: Path) -> None:
    model = trained(tmp_path / "run.zarr", Lit(manual=True), max_epochs=1)
    ds = model.lists.agree_with(tmp_path / "run.zarr")
    assert ds.step.values.tolist() == [*range(EPOCH + 1)]
