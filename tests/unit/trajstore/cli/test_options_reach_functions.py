"""Each option reaches the function that its command calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from trajstore.cli.main import main

FORKED = SimpleNamespace(training=SimpleNamespace(steps=9))
COMPUTED: list[Any] = [
    (
        "export {run} -o o.zarr --block-rows 64 --encoding compact",
        "trajstore.exchange.export.export",
        {"block_rows": 64, "encoding": "compact"},
    ),
    (
        "report {run} --select step=0:3 --within --min-unchanged 2 --overwrite",
        "trajstore.analysis.report.write_report",
        {"steps": "0:3", "within": True, "min_unchanged": 2, "overwrite": True},
    ),
    (
        "analyze {run} {other} freeze --common-steps",
        "trajstore.store.reading.open_runs.open_runs",
        {"join": "inner"},
    ),
    (
        "plot {run} heatmap --color hop",
        "trajstore.analysis.figures.figure.Options",
        {"color": "hop"},
    ),
]
TRAINED: list[Any] = [
    (
        "evaluate {run} f.py:g -o o --select step=0:9 --constructor m.py:make",
        "trajstore.trainers.evaluate",
        {"steps": "0:9", "constructor": "m.py:make"},
    ),
    (
        "fork {run} --at 3 -o o.zarr --no-fsync --overwrite --threads 2",
        "trajstore.trainers.fork",
        {"at": 3, "fsync": False, "overwrite": True, "threads": 2},
    ),
    ("fork {run} --at 3 -o o.zarr --fsync", "trajstore.trainers.fork", {"fsync": True}),
    (
        "record --preset gatsby --dry-run --corpus a.txt --tokenizer b/",
        "trajstore.trainers.plan",
        {"corpus": "a.txt", "tokenizer": "b/"},
    ),
    ("what-if {run} -o o.zarr --overwrite", "trajstore.trainers.what_if", {"overwrite": True}),
    ("fetch gatsby --sha256 a1", "trajstore.trainers.fetch", {"sha256": "a1"}),
]


class Called(Exception):
    """The function was called."""


@pytest.mark.parametrize(
    ("line", "function", "options"),
    [*COMPUTED, *(pytest.param(*each, marks=pytest.mark.torch) for each in TRAINED)],
)
def test_an_option_reaches_the_function(
    line: str,
    function: str,
    options: dict[str, Any],
    sample: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if request.node.get_closest_marker("torch"):
        pytest.importorskip("torch")
        monkeypatch.setattr("trajstore.trainers.commands.record._forked", lambda *given: FORKED)

    def call(*arguments: Any, **given: Any) -> None:
        assert options.items() <= given.items()
        raise Called

    monkeypatch.setattr(function, call, raising=False)
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.zarr"
    other.symlink_to(sample)
    done = CliRunner().invoke(main, line.format(run=sample, other=other).split())
    assert isinstance(done.exception, Called), done.output + repr(done.exception)


@pytest.mark.torch
def test_the_encoding_reaches_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def call(config: Any, *arguments: Any, **given: Any) -> None:
        assert config.recording.encoding == "compact"
        raise Called

    monkeypatch.setattr("trajstore.trainers.record", call, raising=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["record", "--preset", "gatsby", "--encoding", "compact"])
    assert isinstance(done.exception, Called), done.output + repr(done.exception)
