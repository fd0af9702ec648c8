from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from trajstore.cli.main import main
from trajstore.errors import ConfigError
from trajstore.trainers.commands.plan import time_sentence

pytestmark = pytest.mark.torch


def test_sizes_are_printed_before_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        print("a few steps")
        raise ConfigError("too large for this machine")

    monkeypatch.setattr("trajstore.trainers.time_steps", refuse, raising=False)
    done = CliRunner().invoke(main, ["plan", "--preset", "wordybird-1b"])
    assert done.exit_code == 0
    assert done.stdout.index("201 rows of 50257 tokens") < done.stdout.index("a few steps")
    assert "Timing a few steps" in done.stderr
    assert "the time was not measured: too large for this machine" in done.output


def test_times_are_in_units_that_fit() -> None:
    facts = {
        "seconds": 8000.0, "seconds_recording": 140.0, "step_seconds": 140.0, "row_seconds": 0.0042,
        "row_bytes": 2048, "timed_steps": 1, "timed_rows": 3, "device": "cpu",
    }  # fmt: skip
    assert time_sentence(facts).startswith(
        "About 2 h 13 min on this machine (cpu), 2 min 20 s of it for recording: 2 min 20 s per "
        "step and 4.2 ms per row. Timed: 1 step and 3 rows (2 KiB each on disk)."
    )
