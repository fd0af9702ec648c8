from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("torch")
import small_trainings

from trajstore.errors import ConfigError, InvalidArgument
from trajstore.trainers import preset, time_steps
from trajstore.trainers.runs import timed_steps

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def seconds_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second after the last one."""
    looks = itertools.count()
    monkeypatch.setattr(timed_steps, "perf_counter", lambda: float(next(looks)))


def test_steps_are_timed_apart_from_what_their_rows_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_steps.tempfile, "tempdir", str(tmp_path))
    config = small_trainings.small_config(["gatsby"], "recording.every=50", steps=90)
    timed = time_steps(config, seconds=6)
    # Three steps of a second, and as many with a second until what they recorded is written.
    assert (timed.steps, timed.rows) == (3, 5)
    assert (timed.step_seconds, timed.row_seconds) == (1.0, 1 / 5)
    assert timed.row_bytes > 128 * 8
    assert timed.facts(steps=90, rows=3)["seconds"] == pytest.approx(90 + 3 / 5)
    assert not list(tmp_path.iterdir())


def test_a_run_of_one_step_is_timed_by_two() -> None:
    timed = time_steps(small_trainings.small_config(("gatsby",), steps=1), seconds=60)
    assert (timed.steps, timed.rows) == (1, 3)


def test_a_batch_larger_than_the_memory_is_an_error() -> None:
    config = preset("gatsby").with_values(["training.batch_size=1000000000", "training.device=cpu"])
    with pytest.raises(ConfigError, match=r"needs at least .* TiB, but this machine has .* of mem"):
        time_steps(config)


def test_what_the_device_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr(timed_steps, "build_training", refuse)
    with pytest.raises(ConfigError, match=r"be trained on cpu: .* allocate memory; use a smaller"):
        time_steps(small_trainings.small_config(("gatsby",), steps=3))
    with pytest.raises(InvalidArgument, match="got config='gatsby', expected a RunConfig"):
        time_steps("gatsby")
