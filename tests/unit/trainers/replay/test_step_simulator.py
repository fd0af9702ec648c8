"""The simulator alone: recorded gradients go through the optimizer, and nothing is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tiny_runs import tiny_run  # noqa: E402

from trajstore.store.reading.tiled_reader import open_tiled  # noqa: E402
from trajstore.trainers.replay.recorded_rows import RecordedRows  # noqa: E402
from trajstore.trainers.replay.replay_result import CannotReplay  # noqa: E402
from trajstore.trainers.replay.step_simulator import StepInputs, recorded_simulator  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def trajectory(path: Path, *, rate: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """W of each row, as it was recorded and from row 0 and the gradients alone."""
    source = open_tiled(path)
    rows, simulator = RecordedRows(source), recorded_simulator(source, CPU)
    recorded, simulated = [], []
    inputs = None
    for row in rows.read({"grad", *simulator.recorded}):
        recorded.append(row.bits["W"])
        step = {
            "gradient": row.bits["grad"],
            "clip_coef": rows.scalar("clip_coef", row.number),
            "lr": rate * rows.value("lr", row.number),
        }
        if inputs is None:
            before = {name: row.bits[name] for name in simulator.recorded}
            inputs = StepInputs(before=before, carried={}, steps_taken=0, **step)
            simulated.append(before["W"])
            continue
        result = simulator.simulate(replace(inputs, **step))
        inputs = replace(
            inputs, before=result.bits, carried=result.carried, steps_taken=inputs.steps_taken + 1
        )
        simulated.append(result.bits["W"])
    return recorded, simulated


@pytest.mark.parametrize("record", ["all", "weights+grads"])
def test_gradients_and_the_first_row_give_every_row(record: str, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", dtype=torch.bfloat16, steps=7, record=record)
    for number, (recorded, simulated) in enumerate(zip(*trajectory(path), strict=True)):
        np.testing.assert_array_equal(recorded, simulated, err_msg=f"row {number}")


def test_another_learning_rate_gives_other_weights(tmp_path: Path) -> None:
    recorded, simulated = trajectory(tiny_run(tmp_path / "run.zarr", steps=3), rate=0.5)
    assert np.array_equal(recorded[0], simulated[0])
    assert not np.array_equal(recorded[1], simulated[1])


def test_what_cannot_be_simulated_is_an_error(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=3, record="weights")
    with pytest.raises(CannotReplay, match="the gradient was not recorded"):
        recorded_simulator(open_tiled(path), CPU)
