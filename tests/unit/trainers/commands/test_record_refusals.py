"""An output that exists is refused before anything is imported that takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from trajstore import RunWriter
from trajstore.cli.main import main

SLOW = (
    "trajstore.trainers.config",
    "trajstore.trainers.presets",
    "trajstore.trainers.runs.record",
    "trajstore.trainers.runs.fork",
    "trajstore.trainers.counterfactuals.what_if",
    "trajstore.trainers.recording.options",
    "trajstore.trainers.texts",
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.zarr"
    told = {"is_dead": [True], "token_text": ["a"]}
    with RunWriter.create(path, token=[0], hidden=1, variables={"W": "float32"}, **told) as run:
        run.append(step=0, W=np.zeros((1, 1), "float32"))
    for name in SLOW:
        monkeypatch.setitem(sys.modules, name, None)  # an import fails
    return path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("record --preset gatsby -o {run}", "already exists"),
        ("fork {run} --at 1 -o {run}", "already exists"),
        ("what-if {run} -o {run}", "already exists"),
        ("annotate {run} --masks no-such-file", "already has is_dead"),
        ("annotate {run} --tokenizer no-such-folder", "already has token_text"),
    ],
)
def test_what_exists_is_refused_first(run: Path, command: str, message: str) -> None:
    result = CliRunner().invoke(main, command.format(run=run).split())
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
