from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import trajstore
from trajstore.errors import FormatError

STEPS = (0, 1, 2, 4)
W = np.arange(12, dtype="f4").reshape(4, 3)


def checkpoints(path: Path, log: Any, version: str | None = "4.51.0", *, within: bool) -> Path:
    for step in STEPS:
        place = path / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file({"transformer.wte.weight": W + step}, place / "model.safetensors")
        if version is not None:
            config = {"transformers_version": version}
            (place / "config.json").write_text(json.dumps(config))
    place = path / "checkpoint-4" if within else path
    (place / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return path


def entry(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 3.0 + step, "learning_rate": 0.1 * step, "epoch": 0.0}


@pytest.mark.parametrize("within", [True, False])
def test_what_was_logged_in_the_steps_of_the_rows(tmp_path: Path, within: bool) -> None:
    log = [entry(1), entry(2), {"step": 2, "eval_loss": 1.0}, entry(4), {"step": 4, "x": 1}]
    done = trajstore.import_file(
        checkpoints(tmp_path / "out", log, within=within), tmp_path / "run.zarr"
    )
    ds = trajstore.open_run(done.path).load()
    assert np.allclose(ds.lr.values, [np.nan, 0.1, 0.2, 0.4], equal_nan=True)
    # The loss logged at step 4 is the mean of steps 3 and 4.
    assert np.allclose(ds.loss.values, [np.nan, 4, 5, np.nan], equal_nan=True)
    left = {line.name: line.why for line in done.table if not line.kind}
    assert "means over several steps" in left["loss of trainer_state.json"]
    assert "NaN in the run" in left["loss of checkpoint-0, checkpoint-4"]


def test_rates_that_older_versions_logged_are_those_of_the_next_step(tmp_path: Path) -> None:
    log = [entry(step) for step in (1, 2, 3, 4)]
    older = checkpoints(tmp_path / "older", log, "4.50.3", within=True)
    done = trajstore.import_file(older, tmp_path / "run.zarr")
    rates = trajstore.open_run(done.path).lr.values
    assert np.allclose(rates, [np.nan, np.nan, 0.1, 0.3], equal_nan=True)
    unknown = checkpoints(tmp_path / "unknown", log, None, within=True)
    done = trajstore.import_file(unknown, tmp_path / "other.zarr")
    assert "lr" not in done.variables
    assert "loss" in done.variables
    left = {line.name: line.why for line in done.table if not line.kind}
    assert "no config.json" in left["learning_rate of trainer_state.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"log_history": 3}', "[" * 100_000])
def test_states_that_are_none(tmp_path: Path, text: str) -> None:
    path = checkpoints(tmp_path / "out", [], within=False)
    (path / "trainer_state.json").write_text(text)
    with pytest.raises(FormatError, match=r"trainer_state\.json"):
        trajstore.import_file(path, tmp_path / "run.zarr")
