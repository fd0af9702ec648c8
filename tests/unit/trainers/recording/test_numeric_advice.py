"""What is said of the numerics when a recording begins, and to whom."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import VOCAB, TinyModel, batches  # noqa: E402

from trajstore.errors import ConfigError  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import capture  # noqa: E402
from trajstore.trainers.recording.notes import optimizer_advice  # noqa: E402
from trajstore.trainers.recording.parameters import (  # noqa: E402
    JoinedOptimizer,
    find_parameters,
)

pytestmark = pytest.mark.torch

NEVER = "exp_avg_sq can never decay: 0.999·v rounds back to v for 100 % of bfloat16 values"


def train(model: Any, path: Path, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    with capture(model, optimizer, path, is_dead=np.arange(VOCAB) > 12, **options):
        for batch in batches(2):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()


def test_notes_are_passed_to_a_function_before_the_first_step(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "run.zarr"

    def on_note(note: str) -> None:
        assert not path.exists()
        told.append(note)

    train(TinyModel(torch.bfloat16), path, on_note=on_note)
    assert len(told) == 1
    assert told[0].startswith(NEVER)
    assert [one["sentence"] for one in information(path)["advice"]] == told


def test_a_resumed_run_repeats_no_advice(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "run.zarr"
    model = TinyModel(torch.bfloat16)
    train(model, path, on_note=told.append)
    train(model, path, on_note=told.append, resume=True, first_step=2)
    assert len(told) == 1
    with pytest.raises(ConfigError, match="exp_avg_sq can never decay"):
        train(model, path, resume=True, first_step=4, strict_numerics=True)
    assert information(path)["committed_rows"] == 5


def test_advice_is_logged_without_a_function(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(TinyModel(torch.bfloat16), tmp_path / "run.zarr")
    (record,) = caplog.records
    assert record.name == "trajstore.trainers.recording.notes"
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(NEVER)


def test_there_is_nothing_to_say_of_float32(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny, tmp_path / "run.zarr", strict_numerics=True)
    assert not caplog.records


def test_strict_numerics_leave_nothing_behind(tmp_path: Path) -> None:
    model = TinyModel(torch.bfloat16)
    with pytest.raises(ConfigError, match=f"strict numerics.*{NEVER}"):
        train(model, tmp_path / "run.zarr", strict_numerics=True)
    assert list(tmp_path.iterdir()) == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_the_type_of_a_state_that_is_there_counts() -> None:
    model = TinyModel(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    parameters = find_parameters(model, JoinedOptimizer(optimizer), None)
    twice = [*parameters, *parameters]  # each advice comes once
    assert [one.variable for one in optimizer_advice(twice)] == ["exp_avg_sq"]
    wide = torch.zeros_like(parameters[0].tensor, dtype=torch.float32)
    optimizer.state[parameters[0].tensor] = {"exp_avg": wide, "exp_avg_sq": wide}
    assert optimizer_advice(parameters) == []
