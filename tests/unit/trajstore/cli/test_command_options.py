"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from trajstore.cli.command_options import SELECT, file_stem, runs_and_names
from trajstore.cli.main import main
from trajstore.errors import InvalidArgument


def test_a_quantity_before_the_run_is_called_so() -> None:
    with pytest.raises(InvalidArgument, match=r"got freeze before the run; .*: a\.zarr freeze sky"):
        runs_and_names(["freeze", "a.zarr", "sky"], {"freeze", "sky"})


@pytest.mark.parametrize(
    ("given", "runs", "stem"),
    [
        (["one.zarr"], ["one.zarr"], "one"),
        (["dir/pair.zarr"], ["dir/pair.E.zarr", "dir/pair.W.zarr"], "pair"),
        (["sweep/"], ["sweep/a.zarr", "sweep/b.zarr"], "runs"),
        (["*.zarr"], ["a.zarr", "b.zarr"], "runs"),
        (["*.zarr"], ["a.zarr"], "a"),
        (["a.zarr", "b.zarr"], ["a.zarr", "b.zarr"], "runs"),
    ],
)
def test_the_name_of_an_output_file(
    given: list[str], runs: list[str], stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    assert file_stem(given, runs) == stem


@SELECT("step", "token")
@click.command()
def part(selected: dict[str, str]) -> None:
    click.echo(f"{selected}")


def test_a_selection_becomes_keywords() -> None:
    done = CliRunner().invoke(part, ["--select", "step=0:9:3,5", "--select", " token = dead"])
    assert done.stdout == "{'steps': '0:9:3,5', 'tokens': 'dead'}\n"
    assert CliRunner().invoke(part, []).stdout == "{}\n"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["tokens=dead"], "got --select 'tokens=dead', which names no dimension of this command "
         "(did you mean 'token'?); expected DIM=VALUES with step or token, such as step=0:500"),
        (["population=dead"], "expected DIM=VALUES with step or token"),
        (["0:9"], "got --select '0:9', which names no dimension"),
        (["step="], "got --select 'step=' without values; give step=0:500"),
        (["step=1", "step=2"], "got --select step twice; give all values in one"),
    ],
)  # fmt: skip
def test_a_selection_that_is_refused(given: list[str], sentence: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        part([word for one in given for word in ("--select", one)], standalone_mode=False)
    assert sentence in str(error.value)


def test_the_help_says_that_a_range_of_steps_excludes_its_end() -> None:
    said = " ".join(CliRunner().invoke(part, ["--help"]).stdout.split())
    assert "step=0:500 (steps 0 to 499) or step=::10" in said


FORKED = SimpleNamespace(training=SimpleNamespace(steps=9))
COMPUTED: list[Any] = [
    (
        "export {run} -o o.zarr --block-rows 64 --encoding compact",
        "trajstore.exchange.export.export",
        {"block_rows": 64, "encoding": "compact"},
    ),
    (
        "report {run} --select step=0:3 --within --min-unchanged 2 --overwrite",
        "trajstore.analysis.results.report_page.write_report",
        {"steps": "0:3", "within": True, "min_unchanged": 2, "overwrite": True},
    ),
    (
        "analyze {run} {other} freeze --common-steps",
        "trajstore.store.reading.open_run.open_runs",
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
        {"at": 3, "fsync": False, "overwrite": True, "settings": ["training.threads=2"]},
    ),
    ("fork {run} --at 3 -o o.zarr --fsync", "trajstore.trainers.fork", {"fsync": True}),
    (
        "record --preset gatsby --dry-run --corpus a.txt --tokenizer b/",
        "trajstore.trainers.plan",
        {"corpus": "a.txt", "tokenizer": "b/"},
    ),
    ("what-if {run} -o o.zarr --overwrite", "trajstore.trainers.what_if", {"overwrite": True}),
    ("fetch gatsby --source b", "trajstore.trainers.fetch", {"source": "b"}),
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
        monkeypatch.setattr(
            "trajstore.trainers.commands.training_commands._forked", lambda *given: FORKED
        )

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
def test_options_of_the_configuration_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def call(config: Any, *arguments: Any, **given: Any) -> None:
        assert (config.recording.encoding, config.recording.every) == ("compact", 2)
        assert config.training.seed == 3
        raise Called

    monkeypatch.setattr("trajstore.trainers.record", call, raising=False)
    monkeypatch.chdir(tmp_path)
    line = "record --preset gatsby --encoding compact --every 2 --seed 3"
    done = CliRunner().invoke(main, line.split())
    assert isinstance(done.exception, Called), done.output + repr(done.exception)
