"""The commands that a report prints make the run again, bit for bit."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from click.testing import CliRunner

pytest.importorskip("torch")
from small_trainings import TEXT, small_config, stop_after

from trajstore.analysis.results.verdicts import reproduction
from trajstore.cli.main import main
from trajstore.store.reading.run_info import information
from trajstore.trainers import fork, record, recorded_config

pytestmark = pytest.mark.torch


def begin(path: Path, text: Path, *settings: str, **options: Any) -> None:
    config = small_config(["gatsby", "recording.every=2", *settings], steps=6)
    record(config, path, corpus=text, **options)


def extend(path: Path, steps: int, *settings: str) -> None:
    longer = recorded_config(path).with_values([f"training.steps={steps}", *settings])
    record(longer, path, resume=True)


def extended(path: Path, text: Path) -> Path:
    begin(path, text, "training.threads=2")
    extend(path, 9)
    extend(path, 12, "training.threads=3")
    return path


def stopped_and_extended(path: Path, text: Path) -> Path:
    begin(path, text, stop=stop_after(3))
    extend(path, 8)
    return path


def forked(path: Path, text: Path) -> Path:
    source = stopped_and_extended(path.with_name("source.zarr"), text)
    settings = ["optimizer.lr=3e-3", "optimizer.betas=[0.8,0.99]", "model.dtype=float32"]
    fork(source, path, at=6, settings=settings)
    extend(path, 11)
    return path


@pytest.mark.parametrize(
    ("make", "verbs"),
    [
        (stopped_and_extended, ["--config", "fork"]),
        pytest.param(extended, ["--config", "--resume", "--resume"], marks=pytest.mark.nightly),
        pytest.param(forked, ["--config", "fork", "fork", "fork"], marks=pytest.mark.nightly),
    ],
)
def test_the_commands_of_a_report_make_the_run_again(
    make: Callable[[Path, Path], Path],
    verbs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "the text.txt"
    text.write_bytes(TEXT)
    run = make(tmp_path / "run.zarr", text)
    found = reproduction(run.name, information(run))
    (tmp_path / "run.toml").write_text(found["settings"])
    commands = [shlex.split(line)[1:] for line in found["commands"].splitlines()]
    assert [words[words[0] == "record"] for words in commands[:-1]] == verbs
    for command in commands:
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    one, other = (xr.open_zarr(path, chunks=None).load() for path in (run, commands[-1][-1]))
    assert one.step.equals(other.step)
    for name in one.data_vars:
        assert one[name].values.tobytes() == other[name].values.tobytes(), name
