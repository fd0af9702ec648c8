"""Steps of a Hugging Face Trainer follow from its data set, which is given again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from click.testing import CliRunner

torch = pytest.importorskip("torch")
from altered_runs import rewrite  # noqa: E402
from independent_trainings import arguments, gpt2  # noqa: E402
from transformers import Trainer  # noqa: E402

from trajstore import RunWriter  # noqa: E402
from trajstore.cli.main import main  # noqa: E402
from trajstore.errors import CorpusError, FormatError, InvalidArgument  # noqa: E402
from trajstore.trainers import TrajectoryCallback  # noqa: E402
from trajstore.trainers.recording.trainer_facts import trainer_facts  # noqa: E402
from trajstore.trainers.runs.given_data_set import given_data_set  # noqa: E402
from trajstore.trainers.runs.proven_steps import prove_steps  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 11
EVERYTHING: dict[str, Any] = {"record": "everything", "block_rows": 4}

IDS = np.random.default_rng(2).integers(0, 128, (13, 32))
"""In batches of 3 and steps of 2, an epoch ends with one batch of one example."""


def examples() -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": row} for row in torch.from_numpy(IDS)]


def trainer_of(kind: Any, steps: int, callbacks: Any = (), **more: Any) -> Any:
    torch.manual_seed(7)
    model = gpt2(128, 16, 2, dropout=0.1, context=32)
    options = {"data_collator": more.pop("data_collator", None), "callbacks": list(callbacks)}
    chosen = arguments(
        steps, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=2e-3,
        weight_decay=0.05, warmup_steps=5, lr_scheduler_type="cosine", max_grad_norm=0.5, **more,
    )  # fmt: skip
    return kind(model, chosen, train_dataset=examples(), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "run.zarr"
    trainer = trainer_of(Trainer, STEPS, [TrajectoryCallback(path, **EVERYTHING)], seed=11)
    torch.manual_seed(3)  # the order of the examples has the last seed
    trainer.train()
    return path


def with_facts(run: Path, path: Path, **facts: Any) -> Path:
    """A copy of the run with other facts about its Trainer."""
    shutil.copytree(run, path)
    provenance = xr.open_zarr(path).attrs["provenance"]
    provenance["trainer"] |= facts
    RunWriter.resume(path, attributes={"provenance": provenance}).close()
    return path


def test_all_steps_follow_from_the_data_set(run: Path) -> None:
    found = prove_steps(run, dataset=examples())
    assert (found.exact, found.total, found.proven, found.unproven) == (True, 0, STEPS, ())
    assert {"loss", "logits", "grad", "params_grad", "W", "params"} <= {*found.variables}
    assert found.notes == ("learning rates and random states are those of the rows",)


def test_an_altered_gradient_is_found_with_its_parameter(run: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run.zarr"))
    name = "transformer.h.0.mlp.c_fc.weight"
    table = {one["name"]: one.get("offset") for one in xr.open_zarr(path).attrs["parameters"]}
    rewrite(path, "params_grad", (5, table[name] + 17))
    np.savez(tmp_path / "examples.npz", input_ids=IDS.astype(np.uint8))
    found = prove_steps(path, steps="4:8", dataset=tmp_path / "examples.npz")
    (one,) = found.differences
    assert (one.step, one.variable, one.parameter) == (5, "params_grad", name)
    assert (one.elements, one.ulps, found.proven) == (1, 1, 3)


def test_the_command_takes_a_saved_table(run: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    table = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS, "text": ["a"] * len(IDS)})
    table.save_to_disk(str(folder))
    options = ["--replay", "--gradients", "--steps", "3:9:3", "--dataset", str(folder)]
    result = CliRunner().invoke(main, ["verify", str(run), *options])
    assert result.exit_code == 0, result.output
    assert "Trained 2 of 2 steps again: 2 agree in every bit, 0 differ." in result.output


def test_another_data_set_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="give it with --dataset"):
        prove_steps(run)
    np.save(tmp_path / "other.npy", IDS[::-1])
    message = r"13 examples .* \(sha256 \w{12}…\), but that of the run has 13 .* \(sha256 \w{12}…\)"
    with pytest.raises(CorpusError, match=message):
        prove_steps(run, dataset=tmp_path / "other.npy")
    np.save(tmp_path / "wrong.npy", IDS.astype(np.float32))
    with pytest.raises(FormatError, match="expected integers input_ids"):
        given_data_set(tmp_path / "wrong.npy", {}, with_index=False)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"processes": 2}, "trained by 2 processes"),
        ({"custom": ["Own.compute_loss"]}, "its own Own.compute_loss"),
        ({"collator": "own.collate"}, "the collator own.collate, got transformers.*collator="),
        ({"order": {"sampler": "own.Order", "seed": None}}, "not that of a seed: own.Order"),
        ({"arguments": {"fp16": True}}, "train with bf16"),
    ],
    ids=["processes", "loss", "collator", "order", "fp16"],
)
def test_what_a_run_does_not_hold_is_refused(
    run: Path, tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    path = with_facts(run, tmp_path / "run.zarr", **facts)
    with pytest.raises(InvalidArgument, match=message):
        prove_steps(path, dataset=examples())


class OwnLoss(Trainer):
    """A Trainer with its own loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2

    def facts(self) -> dict[str, Any]:
        """Facts as the callback finds them when the training calls it."""
        return trainer_facts(self.args, self.state, self.model, self.get_train_dataloader())


def join(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator of a user; labels of position 3 do not count."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.index_fill(1, torch.tensor([3]), -100)}


def test_an_own_loss_and_collator_are_recorded() -> None:
    facts = trainer_of(OwnLoss, 1, data_collator=join).facts()
    assert facts["custom"] == ["OwnLoss.compute_loss"]
    assert facts["collator"] == f"{__name__}.join"


@pytest.mark.nightly
def test_autocast_collator_and_counted_targets(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    options = {"data_collator": join, "bf16": True, "label_smoothing_factor": 0.1}
    trainer_of(Trainer, STEPS, [TrajectoryCallback(path, **EVERYTHING)], **options).train()
    found = prove_steps(path, dataset=examples(), collator=join)
    assert (found.total, found.proven, found.unproven) == (0, STEPS, ())
