"""`sweep`, as a user types it: what it refuses, and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def test_nothing_begins_when_a_field_is_unknown(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    swept = ["sweep", "--preset", "gatsby", "-o", tmp_path / "runs"]
    told = trajstore_cli(*swept, "--set", "init.sigma=1e-5,1e-4", rc=2).stderr
    assert "did you mean 'initialization.sigma'?" in told
    assert "expected numbers and ranges" in trajstore_cli(*swept, "--seeds", "a", rc=2).stderr
    assert not list(tmp_path.iterdir())


def test_a_sweep_of_one_run_is_refused(trajstore_cli: Callable[..., Any], tmp_path: Path) -> None:
    one = ["sweep", "--preset", "gatsby", "--set", "optimizer.lr=1e-3", "-o", tmp_path / "runs"]
    told = trajstore_cli(*one, rc=2).stderr
    assert "got a single run to sweep; give several seeds (--seeds 1:5) or a setting" in told
    assert not list(tmp_path.iterdir())


def test_it_prints_commands_and_records_nothing(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    printed = trajstore_cli(
        "sweep", "--preset", "gatsby", "--seeds", "5:7", "--set", "optimizer.betas=[0.9,0.99]",
        "--steps", 9, "--set", 'recording.variables="W,grad"', "-o", tmp_path / "my runs",
        "--tokenizer", "own/", "--jobs", 2, "--threads", 3, "--dry-run",
    ).stdout  # fmt: skip
    lines = printed.splitlines()
    name = "gatsby_optimizer.betas=0.9+0.99_recording.variables=W+grad_seed=6.zarr"
    assert len(lines) == 2
    assert lines[1] == (
        "OMP_NUM_THREADS=3 trajstore record --preset gatsby --steps 9 --tokenizer own/ "
        """--set 'optimizer.betas=[0.9,0.99]' --set 'recording.variables="W,grad"' """
        f"--seed 6 --resume -o '{tmp_path}/my runs/{name}'"
    )
    assert not list(tmp_path.iterdir())
