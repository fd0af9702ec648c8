"""`fork` and `record --resume` without checkpoints, as a user types them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from click.testing import CliRunner

pytest.importorskip("torch")
from trajstore.cli.main import main

pytestmark = pytest.mark.torch

FIELDS = (
    "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=2",
    "training.device=cpu", "recording.block_rows=4",
)  # fmt: skip
SMALL = [argument for field in FIELDS for argument in ("--set", field)]


@pytest.fixture(scope="module")
def queued(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line that begins a run, and goes on with it."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes(b"It was a bright cold day in April. " * 3)
    return ["record", "--preset", "gatsby", "--corpus", str(text), *SMALL, "--resume"]


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_one_command_line_begins_proves_and_is_done(queued: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    line = [*queued, "--set", "schedule.steps=20", "-o", path, "--steps"]
    assert call(*line, 6).exit_code == 0
    shutil.rmtree(tmp_path / "run.ckpt")
    done = call(*line, 9)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "its 6 steps are trained again" in said
    assert "comparing step 1 of 6 with the recorded rows comparing step 6 of 6" in said
    assert "Recorded 10 rows" in done.stdout
    done = call(*line, 9)
    assert done.exit_code == 0
    assert "has all 9 steps already" in " ".join(done.stderr.split())


def test_a_fork_and_where_it_parts(queued: list[str], tmp_path: Path) -> None:
    path, other = tmp_path / "run.zarr", tmp_path / "other.zarr"
    assert call(*queued, "--steps", 8, "-o", path).exit_code == 0
    fork = ["fork", path, "--at", 5, "--corpus", queued[4], "-o", other]
    done = call(*fork, "--set", "optimizer.lr=3e-3")
    assert done.exit_code == 0, done.stderr
    assert "comparing step 5 of 5" in done.stderr
    assert "first differing step" in (said := call("compare", path, other).stdout)
    assert "config.optimizer.lr" in said
    assert xr.open_zarr(other).attrs["provenance"]["fork"]["settings"] == {"optimizer.lr": 0.003}
    assert "fork.step = 5" in call("info", other).stdout
    for arguments, rc, sentence in (
        (fork, 2, "other.zarr already exists"),
        (["fork", path, "--at", 99, "-o", "x.zarr"], 1, "no row of step 99"),
        (["fork", tmp_path / "no", "--at", 5, "-o", "x.zarr"], 2, "there is no run at"),
        (["record", "--resume", "-o", tmp_path / "no.zarr"], 2, "to start one, name a preset"),
    ):  # fmt: skip
        done = call(*arguments)
        assert done.exit_code == rc, done.stderr
        assert sentence in " ".join(done.stderr.split())
        assert done.stderr.startswith("trajstore: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.ckpt", "other.zarr", "run.ckpt", "run.zarr",
    ]  # fmt: skip
