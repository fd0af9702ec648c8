"""Two processes train one model: one store, and the gradients are the averaged ones."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.process_group import run_together

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

HEAD = """
    import os, sys, warnings
    import numpy as np, torch
    from torch.nn.functional import cross_entropy
    path, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 4)
            self.head = torch.nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight
        def get_output_embeddings(self):
            return self.head
        def forward(self, input_ids, labels):
            logits = self.head(torch.tanh(self.embedding(input_ids)))
            return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def batch(step, rank):
        g = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(0, 11, (2, 5), generator=g)

    torch.manual_seed(0)
    model = Model()
"""

LOOP = """
    from torch.nn.parallel import DistributedDataParallel
    from trajstore.trainers import capture
    torch.distributed.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    expected = []
    variables = ("matrix", "batch", "example_loss", "hidden_states", "hidden_mean")
    with capture(wrapped, optimizer, path, variables=variables, max_grad_norm=0.1) as run:
        for step in range(5):
            grads = []
            for other in range(2):
                ids = batch(step, other)
                model.eval()  # so that it is not taken for a micro-batch
                loss = model(ids, ids)["loss"]
                model.train()
                grads.append(torch.autograd.grad(loss, model.embedding.weight)[0])
            expected.append((grads[0] + grads[1]) / 2)
            run.observe(loss=torch.tensor(float(step)), logits=torch.zeros(1, 11))
            run.observe(batch=[10 * step + rank, 7], example_loss=[float(rank), 0.5])
            optimizer.zero_grad()
            ids = batch(step, rank)
            wrapped(ids, ids)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
        assert run.step == 5
    np.save(f"{folder}/expected{rank}.npy", torch.stack(expected).numpy())
    np.save(f"{folder}/last{rank}.npy", model.embedding.weight.detach().numpy())
    torch.distributed.destroy_process_group()
"""

TRAINER = """
    from transformers import Trainer, TrainingArguments
    from trajstore.trainers import TrajectoryCallback

    class Keeping(Trainer):
        kept = []
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.kept.append(self.model.embedding.weight.grad.clone())
            return loss

    trainer = Keeping(
        model=model,
        args=TrainingArguments(
            output_dir=folder, max_steps=5, per_device_train_batch_size=2, use_cpu=True,
            ddp_backend="gloo", save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", dataloader_pin_memory=False, max_grad_norm=0.1,
        ),
        train_dataset=[{"input_ids": batch(i, 0)[0], "labels": batch(i, 1)[0]} for i in range(40)],
        callbacks=[TrajectoryCallback(path)],
    )
    trainer.train()
    np.save(f"{folder}/expected{rank}.npy", torch.stack(trainer.kept).numpy())
    np.save(f"{folder}/last{rank}.npy", model.embedding.weight.detach().numpy())
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(LOOP, id="capture", marks=pytest.mark.nightly),
        pytest.param(TRAINER, id="Trainer", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_one_store(body: str, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    run_together(2, textwrap.dedent(HEAD) + textwrap.dedent(body), tmp_path, path, tmp_path)
    ds = xr.open_zarr(path)
    if body is LOOP:  # of both processes, the first one's before
        for step in range(5):
            row = ds.isel(step=step + 1)
            assert row.batch.values.tolist() == [10 * step, 7, 10 * step + 1, 7]
            assert row.example_loss.values.tolist() == [0, 0.5, 1, 0.5]
            states = row.hidden_states.values
            np.testing.assert_allclose(states[:2].mean((0, 1)), row.hidden_mean, rtol=1e-5)
            assert len(np.unique(states[2:])) > 4
    assert [p.name for p in tmp_path.glob("*.zarr")] == ["run.zarr"]
    assert ds.step.values.tolist() == list(range(6))
    expected = np.load(tmp_path / "expected0.npy")
    np.testing.assert_allclose(ds.grad.values[1:], expected, rtol=1e-5, atol=1e-8)
    for rank in range(2):
        assert np.array_equal(ds.W.values[-1], np.load(tmp_path / f"last{rank}.npy"))
    norms = np.sqrt((ds.grad.values[1:].astype("f8") ** 2).sum((1, 2)))
    np.testing.assert_allclose(ds.grad_norm.values[1:], norms, rtol=1e-5)
    assert (ds.clip_coef.values[1:] < 1).all()
