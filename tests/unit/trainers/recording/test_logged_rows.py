"""`log=`: numbers of committed rows for a tracker, against the recorded run."""

from __future__ import annotations

import contextvars
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hf_trainings import tiny_gpt2, trainer_of  # noqa: E402
from list_recorder import VOCAB, TinyModel, batches  # noqa: E402

from trajstore import open_run  # noqa: E402
from trajstore.errors import InvalidArgument, RecordingError  # noqa: E402
from trajstore.trainers import TrajectoryCallback, capture  # noqa: E402

pytestmark = pytest.mark.torch

RUN: contextvars.ContextVar[str] = contextvars.ContextVar("RUN")
DEAD = np.arange(VOCAB) >= 13


def train(path: Path, log: Any, steps: int = 9, dtype: Any = torch.bfloat16, **more: Any) -> None:
    model = TinyModel(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"is_dead": DEAD, "block_rows": 4, "log": log, "log_every": 2} | more
    parts = [slice(None)] if "every" not in more else [slice(0, 6), slice(6, None)]
    for part in parts:  # the second one resumes inside a block
        with capture(model, optimizer, path, **options) as recorder:
            for batch in batches(steps)[part]:
                optimizer.zero_grad()
                model(**batch)["loss"].backward()
                optimizer.step()
        options |= {"resume": True, "first_step": recorder.step}


def test_the_numbers_are_those_of_the_run_and_come_from_another_thread(tmp_path: Path) -> None:
    path, numbers, threads = tmp_path / "run.zarr", [], set()

    RUN.set("mine")  # where trackio keeps its run

    def log(given: dict[str, float]) -> None:
        assert RUN.get() == "mine"
        numbers.append({name.removeprefix("trajstore/"): each for name, each in given.items()})
        threads.add(threading.get_ident())

    train(path, log)
    assert threading.get_ident() not in threads
    ds = open_run(path).load()
    assert [each["step"] for each in numbers] == [2, 4, 6, 8]
    assert [each["rows"] for each in numbers] == [3, 5, 7, 9]
    norms = np.linalg.norm(ds.grad.values.astype("f8"), axis=-1)
    for each in numbers:
        row = each["step"]
        same = (ds.W.values[row] == ds.W.values[row - 1]).all(-1)
        assert each["loss"] == ds.loss.values[row]
        for name, mask in (("dead", DEAD), ("live", ~DEAD)):
            assert each[f"unchanged_{name}"] == same[mask].mean()
            np.testing.assert_allclose(each[f"grad_norm_{name}"], norms[row, mask].mean())
    assert numbers[-1]["bytes_on_disk"] > numbers[0]["bytes_on_disk"] > 0


def test_an_error_of_the_tracker_ends_the_log_and_not_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def log(numbers: dict[str, float]) -> None:
        calls.append(numbers)
        raise OSError("the tracker is gone")

    train(tmp_path / "run.zarr", log)
    assert len(calls) == 1
    assert "log= failed" in caplog.text
    assert "the tracker is gone" in caplog.text
    assert open_run(tmp_path / "run.zarr").sizes["step"] == 10
    with pytest.raises(InvalidArgument, match="expected a Callable or None"):
        train(tmp_path / "other.zarr", "wandb")


def test_a_trainer_logs_by_itself(tmp_path: Path) -> None:
    options = {"log": True, "log_every": 3, "block_rows": 2}
    callback = TrajectoryCallback(tmp_path / "run.zarr", **options)
    trainer = trainer_of(tiny_gpt2(), tmp_path, callback)
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "trajstore/loss" in entry]
    assert logged["trajstore/step"] == 3
    assert logged["trajstore/loss"] == float(open_run(tmp_path / "run.zarr").loss[3])
    callback = TrajectoryCallback(tmp_path / "other.zarr", **options)
    unknown = trainer_of(tiny_gpt2(), tmp_path, callback)
    with pytest.raises(RecordingError, match=r"pass a callable, such as log=trainer\.log"):
        unknown._inner_training_loop(3, args=unknown.args)  # as a subclass that has its own `train`


def test_rows_after_each_multiple_are_passed_once_also_after_a_resume(tmp_path: Path) -> None:
    found: list[float] = []
    log = lambda numbers: found.append(numbers["trajstore/step"])  # noqa: E731
    train(tmp_path / "run.zarr", log, 20, every=3, log_every=4)
    assert found == [6, 9, 12, 18, 20]  # the last step has a row
