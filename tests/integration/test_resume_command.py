"""`record` interrupted by signals, gone on with and extended, as a user types it."""

from __future__ import annotations

import itertools
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from click.testing import CliRunner

pytest.importorskip("torch")
from small_trainings import same_values

from trajstore.cli.main import main
from trajstore.cli.stop_signals import StopRequest
from trajstore.trainers import preset, record

pytestmark = pytest.mark.torch

FIELDS = (
    "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=2",
    "training.device=cpu", "recording.block_rows=8", "schedule.steps=500",
)  # fmt: skip
SMALL = [argument for field in FIELDS for argument in ("--set", field)]


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAJSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "the text.txt"
    path.write_bytes(b"It was a bright cold day in April. " * 9)
    return path


@pytest.fixture
def straight(tmp_path: Path, text: Path) -> Callable[[str, int], Path]:
    """Run of a preset, over so many steps, that was never interrupted."""

    def run(name: str, steps: int) -> Path:
        path = tmp_path / "straight.zarr"
        config = preset(name).with_values([*FIELDS, f"training.steps={steps}"])
        record(config, path, corpus=text)
        return path

    return run


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGINT, "gatsby"),
        pytest.param(signal.SIGTERM, "gatsby-adam", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_interrupts_and_the_command_it_names_continues(
    number: signal.Signals,
    name: str,
    text: Path,
    tmp_path: Path,
    straight: Callable[[str, int], Path],
    trajstore_cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, last, steps = tmp_path / "a run.zarr", 5, itertools.count(1)

    def after_step(request: StopRequest) -> bool:
        if next(steps) == last:
            signal.raise_signal(number)
        return request.number is not None

    call = ["record", "--preset", name, "--steps", 1_000_000, "--corpus", text, *SMALL, "-o", path]
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", after_step)
        done = trajstore_cli(*call, "--set", "recording.checkpoint_every=40", rc=128 + number)
    assert done.stderr.startswith("Corpus: the text.txt")
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values.tolist() == list(range(last + 1))
    assert f"Interrupted after step {last}; {last + 1} rows are committed." in done.stderr
    resume = done.stderr.partition("Resume with: ")[2].strip()
    assert resume == f"trajstore record --resume -o '{path}'"
    trajstore_cli(*shlex.split(resume)[1:], "--steps", last + 4)
    same_values(straight(name, last + 4), path)
    assert [file.name for file in (tmp_path / "a run.ckpt").iterdir()] == [
        f"step-{last + 4:08d}.safetensors"
    ]


def test_the_steps_of_a_preset_are_not_those_of_a_run_that_continues(
    text: Path, tmp_path: Path, trajstore_cli: Callable[..., Any]
) -> None:
    path = tmp_path / "run.zarr"
    config = preset("gatsby").with_values([*FIELDS, "training.steps=6"])
    (tmp_path / "run.toml").write_text(preset("gatsby").with_values(FIELDS).to_toml())
    steps = iter(range(4))
    record(config, path, corpus=text, stop=lambda: next(steps) == 3)
    again = ["--corpus", text, "-o", path, "--resume"]
    trajstore_cli("record", "--preset", "gatsby", *again, *SMALL)
    ds = xr.open_zarr(path)
    assert ds.step.values[-1] == 6
    assert ds.attrs["config"]["training"]["steps"] == 6
    done = trajstore_cli("record", "--config", tmp_path / "run.toml", *again)
    assert "has all 6 steps already" in " ".join(done.stderr.split())
    trajstore_cli("record", "--preset", "gatsby", *again, *SMALL, "--set", "training.steps=8")
    assert xr.open_zarr(path).step.values[-1] == 8


@pytest.mark.parametrize("resume", [False, True])
def test_a_signal_before_the_training_says_what_is_there(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    path = tmp_path / "run.zarr"
    if resume:
        config = preset("gatsby").with_values([*FIELDS, "training.steps=5"])
        record(config, path, corpus=text)

    def interrupt(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("trajstore.trainers.runs.record.load_corpus", interrupt)
    call = ["--resume", "--steps", "9"] if resume else ["--preset", "gatsby"]
    done = CliRunner().invoke(main, ["record", *call, "-o", str(path)])
    assert done.exit_code == 128 + signal.SIGINT
    left = f"{path} is unchanged" if resume else "nothing was recorded"
    said = " ".join(done.stderr.split())
    assert said.endswith(f"Stopped before the training started; {left}.")
