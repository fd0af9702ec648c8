"""`fork` and `record --resume` without checkpoints, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from click.testing import CliRunner

pytest.importorskip("torch")
from trajstore.cli.main import main
from trajstore.trainers import preset, record

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
    assert call(*line, 3).exit_code == 0
    shutil.rmtree(tmp_path / "run.ckpt")
    done = call(*line, 5)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "its 3 steps are trained again" in said
    assert "comparing step 1 of 3 with the recorded rows comparing step 3 of 3" in said
    assert "Recorded 6 rows" in done.stdout
    done = call(*line, 5)
    assert done.exit_code == 0
    assert "has all 5 steps already" in " ".join(done.stderr.split())


def test_a_fork_and_where_it_parts(queued: list[str], tmp_path: Path) -> None:
    path, other = tmp_path / "run.zarr", tmp_path / "other.zarr"
    assert call(*queued, "--steps", 5, "-o", path).exit_code == 0
    fork = ["fork", path, "--at", 3, "--corpus", queued[4], "-o", other]
    done = call(*fork, "--set", "optimizer.lr=3e-3")
    assert done.exit_code == 0, done.stderr
    assert "comparing step 3 of 3" in done.stderr
    assert "first differing step" in (said := call("compare", path, other).stdout)
    assert "config.optimizer.lr" in said
    assert xr.open_zarr(other).attrs["provenance"]["fork"]["settings"] == {"optimizer.lr": 0.003}
    assert "fork.step = 3" in call("info", other).stdout
    for arguments, rc, sentence in (
        (fork, 2, "other.zarr already exists"),
        (["fork", path, "--at", 99, "-o", "x.zarr"], 1, "no row of step 99"),
        (["fork", tmp_path / "no", "--at", 5, "-o", "x.zarr"], 2, "there is no run at"),
        (["record", "--resume"], 2, "no run to resume; name it"),
        (["record", "--resume", "-o", tmp_path / "no.zarr"], 2, "to start one, name a preset"),
    ):  # fmt: skip
        done = call(*arguments)
        assert done.exit_code == rc, done.stderr
        assert sentence in " ".join(done.stderr.split())
        assert done.stderr.startswith("trajstore: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.ckpt", "other.zarr", "run.ckpt", "run.zarr",
    ]  # fmt: skip


TINY = (
    "training.steps=6", "training.batch_size=2", "model.context=16", "model.hidden=8",
    "model.layers=1", "recording.block_rows=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_bytes(b"It was a bright cold day in April. " * 9)
    return record(preset("gatsby").with_values(TINY), folder / "run.zarr", corpus=text)


def cli(*arguments: object, rc: int = 0) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == rc, done.output + done.stderr
    return done.output if rc == 0 else done.stderr


def test_without_settings_the_result_equals_the_run(run: Path, tmp_path: Path) -> None:
    said = cli("what-if", run, "-o", tmp_path / "same.zarr")
    assert "7 rows, steps 0 to 6" in said
    assert "Note: no setting was changed; the result equals the recorded run, bit for bit" in said
    compared = json.loads(cli("compare", "--json", run, tmp_path / "same.zarr"))
    assert compared["only_first"] == compared["only_second"] == []
    assert {v["differing_steps"] for v in compared["variables"].values()} == {0}
    assert cli("verify", "--replay", tmp_path / "same.zarr").count("Replayed 6 of 6 steps") == 1


def test_a_run_that_was_changed_is_not_said_to_be_the_same_again(run: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.zarr"
    shutil.copytree(run, changed)
    root = changed / "zarr.json"
    assert '"maximize": false' in root.read_text()
    root.write_text(root.read_text().replace('"maximize": false', '"maximize": true'))
    said = cli("what-if", changed, "-o", tmp_path / "other.zarr")
    assert "W or a moment differs from the recorded run from step 1 on" in said


def test_output_info_and_summary_name_the_run_as_what_if(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zarr"
    said = cli(
        "what-if", run, "--set", "optimizer.state_dtype=float32", "--at", 4,
        "--tokens", "dead", "-o", other,
    )  # fmt: skip
    assert "3 rows, steps 4 to 6, from the gradients of" in said
    shown = cli("info", other)
    assert "provenance" in shown
    assert "what_if.settings = ['optimizer.state_dtype=float32']" in shown
    assert "what_if.caveat = the gradients are those of the recorded run" in shown
    assert "displacement" in cli("summary", other).lower()
