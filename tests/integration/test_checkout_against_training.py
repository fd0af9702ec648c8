"""Recorded models and states of the optimizer against those that another program saved.

The programs of ``independent_trainings`` train in a process without trajstore, and save four random
steps.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import independent_trainings as trainings
import numpy as np
import pytest
import torch
from bits_and_calls import Cli
from trainings import same
from transformers import AutoModelForCausalLM

from trajstore.trainers import model_at, models, optimizer_state_at
from trajstore.trainers.texts import embedded_text

pytestmark = pytest.mark.nightly

TOTAL = 10
IDS = np.frombuffer(embedded_text(), np.uint8).astype(np.int64)
"""Token ids of the training text."""
STEPS = sorted(random.Random(0).sample(range(1, TOTAL + 1), 4))


def record_case(case: str, path: Path, cli: Cli) -> None:
    """Record a training of a preset."""
    # The independent program multiplies as torch does, also on processors where that is slow.
    changes = [
        "training.device=cpu", "training.products=native", "recording.block_rows=4",
        f"training.batch_size={trainings.BATCH}",
    ]  # fmt: skip
    chosen = [argument for change in changes for argument in ("--set", change)]
    cli(
        "record", "--preset", case, "--variables", "everything", "--steps", TOTAL, *chosen,
        "-o", path
    )  # fmt: skip


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the states that the independent programs save."""
    folder = tmp_path_factory.mktemp("states")
    for case in trainings.CASES:
        np.save(folder / f"{case}.npy", IDS)
        (folder / case).mkdir()
    command = [sys.executable, trainings.__file__, folder, TOTAL, *STEPS]
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=os.environ | {"PYTHONPATH": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def check_model(model: Any, saved: dict[str, Any]) -> None:
    """Compare every tensor of a model, bit for bit, with the saved one."""
    found, wanted = model.state_dict(), saved["model"]
    assert list(found) == list(wanted)
    assert [name for name in wanted if not same(found[name], wanted[name])] == []


@pytest.mark.parametrize("case", list(trainings.CASES))
def test_recorded_steps_are_those_of_an_independent_training(
    case: str, states: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    run = tmp_path / "run.zarr"
    record_case(case, run, trajstore_cli)
    saved = {step: torch.load(states / case / f"{step}.pt") for step in STEPS}
    for step, wanted in saved.items():
        check_model(model_at(run, step), wanted)
        assert same(optimizer_state_at(run, step), wanted["optimizer"]), step
    for step, model in models(run, list(saved)):
        check_model(model, saved[step])
    step, wanted = random.Random(case).choice(list(saved.items()))
    trajstore_cli("checkout", run, "--at", step, "--optimizer", "-o", tmp_path / "checkout")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkout")
    check_model(loaded, wanted)
    assert same(torch.load(tmp_path / "checkout" / "optimizer.pt"), wanted["optimizer"])
