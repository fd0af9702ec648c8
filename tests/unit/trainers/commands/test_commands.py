"""What the commands that train or need a model print, and refuse before they import torch."""

from __future__ import annotations

import importlib
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bits_and_calls import Cli

from trajstore import RunWriter, trainers
from trajstore.cli.output import PlainConsole
from trajstore.errors import InvalidArgument
from trajstore.trainers.commands.model_commands import check_options
from trajstore.trainers.commands.training_commands import (
    RecordingProgress,
    print_recorded,
)

FACTS = {
    "committed_rows": 4, "bytes_native": 4096, "bytes_on_disk": 2048, "ratio": 2.0,
    "steps": {"first": 0, "last": 3},
}  # fmt: skip


def test_the_end_of_a_recording_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, rate, took in (
        (61.7, 4.9512, " in 1 min 2 s (4.95 steps per second)"), (2, None, " in 2.0 s"),
        (None, None, ""),
    ):  # fmt: skip
        print_recorded(Path("my run.zarr"), {Path("my run.zarr"): FACTS}, seconds, rate)
        said = capsys.readouterr().out
        assert said.startswith(f"Recorded 4 rows to my run.zarr{took}: 4 KiB in 2 KiB on disk (rat")


def test_both_runs_of_untied_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_recorded(Path("un.zarr"), {Path("un.E.zarr"): FACTS, Path("un.W.zarr"): FACTS}, 1.0, 4.0)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in printed[:2]] == ["un.E.zarr", "un.W.zarr"]
    commands = [line.split()[1:3] for line in printed[3:]]
    assert commands == [
        ["summary", "un.zarr"], ["analyze", "un.E.zarr"], ["verify", "un.zarr"],
        ["compare", "un.zarr"],
    ]  # fmt: skip


def test_what_exists_is_refused_before_a_slow_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajstore_cli: Cli
) -> None:
    path = tmp_path / "run.zarr"
    told = {"is_dead": [True], "token_text": ["a"]}
    with RunWriter.create(path, token=[0], hidden=1, variables={"W": "float32"}, **told) as run:
        run.append(step=0, W=np.zeros((1, 1), "float32"))
    for slow in (
        "config", "presets", "runs.record", "runs.fork", "counterfactuals.what_if",
        "recording.options", "texts",
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"trajstore.trainers.{slow}", None)  # an import fails
    for command, message in (
        ("record --preset gatsby -o {run}", "already exists"),
        ("fork {run} --at 1 -o {run}", "already exists"),
        ("what-if {run} -o {run}", "already exists"),
        ("annotate {run} --masks no-such-file", "already has is_dead"),
        ("annotate {run} --tokenizer no-such-folder", "already has token_text"),
    ):
        said = trajstore_cli(*command.format(run=path).split(), rc=2).stderr
        assert message in said.replace("\n", " ")


def recorder(step: int) -> Any:
    writer = SimpleNamespace(
        bytes_recorded=step << 20, bytes_written=0, rows=step, committed_rows=0, seconds_waited=0.0
    )
    return SimpleNamespace(step=step, loss=SimpleNamespace(item=lambda: 3.14159), writer=writer)


@pytest.mark.parametrize("width", [80, 140])
def test_the_bar_of_a_recording_can_be_read(width: int) -> None:
    written = io.StringIO()
    console = PlainConsole(
        file=written, width=width, force_terminal=True, color_system=None, soft_wrap=True
    )
    now = 0.0
    with RecordingProgress(20_000, console=console, clock=lambda: now) as shown:
        shown.show_step(recorder(1))
        now = 1000.0
        shown.show_step(recorder(12_345))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", written.getvalue())
    lines = plain.replace("\r", "\n").splitlines()
    last = [line for line in lines if "step 12345/20000" in line][-1]
    assert "loss 3.142, 12.06 GiB" in last
    assert "steps/s" in last
    assert last.count("━") + last.count("╸") + last.count("╺") >= 12
    assert len(last.rstrip()) <= width
    assert ("rows in memory" in last) is (width == 140)
    assert "on disk" not in last, "nothing is yet"


def test_time_and_pace_are_counted_from_the_first_step() -> None:
    now, ids = 100.0, np.zeros(3, "i4")
    corpus: Any = SimpleNamespace(
        counts=lambda: ids, name="x", size=3, ids=ids, vocab_size=3, sha256="0" * 64
    )
    shown = RecordingProgress(3, clock=lambda: now)
    assert (shown.seconds, shown.rate) == (None, None)
    shown.show_corpus(corpus)
    now = 110.0
    shown.show_step(recorder(1))
    assert (shown.seconds, shown.rate) == (10, None)
    now = 112.0
    shown.show_step(recorder(3))
    assert (shown.seconds, shown.rate) == (12, 1)


NOTHING = dict.fromkeys(("text", "prompt", "against", "length", "tokenizer"))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("los", {}, r"got 'los' \(did you mean 'loss'\?\)"),
        ("loss", {}, "loss needs --text"),
        ("loss", {"text": "a.txt", "prompt": "a"}, "loss has no option --prompt"),
        ("attention", {"prompt": "a", "length": 3}, "attention has no option --length"),
        ("probe.py:probe", {"tokenizer": "ascii"}, "probe.py:probe has no option --tokenizer"),
    ],
)
def test_options_that_do_not_belong_together(
    function: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_options(function, {**NOTHING, **options})


@pytest.mark.torch
def test_every_name_can_be_imported_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lightning", None)
        importlib.reload(trainers)
        names: dict[str, Any] = {}
        exec("from trajstore.trainers import *", names)
    importlib.reload(trainers)
    assert {"attach", "capture", "TrajectoryCallback"} <= names.keys()
    assert "LightningCallback" not in names
