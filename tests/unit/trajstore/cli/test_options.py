"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from trajstore.cli.options import SELECT, file_stem, runs_and_names
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
