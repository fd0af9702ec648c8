"""Notes of a recording, steps that no replay can prove, and advice when it begins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from trainings import (  # noqa: E402
    VOCAB,
    TinyModel,
    take_steps,
)

from trajstore.errors import ConfigError  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import capture  # noqa: E402
from trajstore.trainers.recording.notes import (  # noqa: E402
    RunNotes,
    optimizer_advice,
    provenance,
)
from trajstore.trainers.recording.parameters import (  # noqa: E402
    JoinedOptimizer,
    find_parameters,
)

pytestmark = pytest.mark.torch

NEVER = "exp_avg_sq can never decay: 0.999·v rounds back to v for 100 % of bfloat16 values"


def noted(notes: RunNotes, *steps: int, sentence: str = "W was set") -> None:
    for step in steps:
        notes.step = step
        notes.mention(sentence, unproven=True)


def test_unproven_steps_are_exact() -> None:
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, 2, 3, 3, 4, 7)
    notes.mention("a fact about step 7")
    assert notes.entries[0] == {
        "note": "W was set", "first_step": 2, "last_step": 7, "count": 4,
        "unproven": [[2, 4], [7, 7]],
    }  # fmt: skip
    assert "unproven" not in notes.entries[1]


def test_a_resumed_recording_keeps_them_up_to_its_step() -> None:
    before: list[dict[str, Any]] = [
        {"note": name, "first_step": 2, "last_step": 9, "count": 5, "unproven": [[2, 4], [7, 9]]}
        for name in ("W was set", "another")
    ] + [{"note": "later", "first_step": 9, "last_step": 9, "count": 1}]
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, 9, 10)
    resumed = notes.resumed(before, 8)
    assert [entry["note"] for entry in resumed] == ["another", "W was set"]
    assert [entry["unproven"] for entry in resumed] == [[[2, 4], [7, 8]], [[2, 4], [7, 8], [9, 10]]]
    noted(notes, 11, sentence="another")
    assert resumed[0]["unproven"] == [[2, 4], [7, 8], [11, 11]]
    assert (resumed[1]["first_step"], resumed[1]["last_step"]) == (2, 10)
    assert before[0]["unproven"] == [[2, 4], [7, 9]]


def test_the_number_of_ranges_is_bounded() -> None:
    notes = RunNotes(lambda note: None, strict=False)
    noted(notes, *range(1, 4001, 2))
    ranges = notes.entries[0]["unproven"]
    assert (len(ranges), ranges[-1]) == (1000, [1999, 3999])


def train(model: Any, path: Path, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    with capture(model, optimizer, path, is_dead=np.arange(VOCAB) > 12, fsync=False, **options):
        take_steps(model, optimizer, 2)


def test_notes_are_passed_to_a_function_before_the_first_step(path: Path) -> None:
    received: list[str] = []

    def on_note(note: str) -> None:
        assert not path.exists()
        received.append(note)

    train(TinyModel(torch.bfloat16), path, on_note=on_note)
    assert len(received) == 1
    assert received[0].startswith(NEVER)
    assert [advice["sentence"] for advice in information(path)["advice"]] == received


def test_a_resumed_run_repeats_no_advice(path: Path) -> None:
    received: list[str] = []
    model = TinyModel(torch.bfloat16)
    train(model, path, on_note=received.append)
    train(model, path, on_note=received.append, resume=True, first_step=2)
    assert sum(NEVER in note for note in received) == 1
    with pytest.raises(ConfigError, match="exp_avg_sq can never decay"):
        train(model, path, resume=True, first_step=4, strict_numerics=True)
    assert information(path)["committed_rows"] == 5


def test_advice_is_logged_without_a_function(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny, tmp_path / "float32.zarr", strict_numerics=True)
    assert not caplog.records
    train(TinyModel(torch.bfloat16), tmp_path / "run.zarr")
    (record,) = caplog.records
    assert record.name == "trajstore.trainers.recording.notes"
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(NEVER)


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
    assert [advice.variable for advice in optimizer_advice(twice)] == ["exp_avg_sq"]
    wide = torch.zeros_like(parameters[0].tensor, dtype=torch.float32)
    optimizer.state[parameters[0].tensor] = {"exp_avg": wide, "exp_avg_sq": wide}
    assert optimizer_advice(parameters) == []


def test_the_provenance_has_the_seed_of_torch() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert provenance(torch.device("cpu"))["seed"] == 7
        torch.seed()
        assert "seed" not in provenance(torch.device("cpu")), "nothing has set it"
