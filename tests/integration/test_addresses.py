"""No command takes an address for a folder: it works there, or says what to do instead."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from example_run import write_example_run
from object_stores import copied, web_server

from trajstore.cli.main import main

pytest.importorskip("obstore")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

RUN = "memory://commands/runs/run.zarr"
OUT = "memory://commands/out"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("here") / "here.zarr"
    write_example_run(path)
    copied(path, RUN)
    np.save(path.with_name("dead_mask.npy"), np.arange(128) > 99)
    return path


@pytest.fixture
def run(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    monkeypatch.chdir(tmp_path)
    # Figures take long.
    monkeypatch.setattr("trajstore.analysis.results.report_page.drawn", lambda *arguments: ([], {}))

    def invoke(line: str) -> Result:
        return CliRunner().invoke(main, shlex.split(line.format(here=here, run=RUN, out=OUT)))

    return invoke


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("report {run} --verify", ("run.html",)),
        ("compare {run} {here}", ()),
        ("export {run} -o a.safetensors", ("a.safetensors",)),
    ],
)
def test_commands_work_on_an_address(
    run: Callable[[str], Result], line: str, made: Any, tmp_path: Path
) -> None:
    result = run(line)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == list(made)


LOCAL = "only runs can be at addresses; pass a local path"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("analyze {run} freeze -o {out}/freeze.zarr", LOCAL),
        ("plot {here} loss -o {out}/loss.png", LOCAL),
        ("report {here} -o {out}/page.html", LOCAL),
        ("export {here} -o {out}/a.safetensors", LOCAL),
        ("export {here} -o {out}/a.zarr", LOCAL),
        ("import {out}/a.safetensors -o a.zarr", LOCAL),
        ("annotate {run} --masks {here}/../dead_mask.npy", "and copy it to a new address"),
    ],
)
def test_a_command_that_needs_a_folder_says_so(
    run: Callable[[str], Result], line: str, told: str, tmp_path: Path
) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert "://" in result.output
    assert not list(tmp_path.iterdir())


def test_sizes_that_a_web_server_does_not_say_are_unknown(
    run: Callable[[str], Result], here: Path, tmp_path: Path
) -> None:
    """The last test, as it ends the connections, and with them what ``memory://`` holds."""
    with web_server(here.parent) as (server, _):
        told = {}
        for command in ("info", "info --json", "report"):
            result = run(f"{command} {server}/here.zarr")
            assert result.exit_code == 0, result.output
            told[command] = result.output
    assert "unknown" in told["info"]
    facts = json.loads(told["info --json"])
    arrays = facts["arrays"].values()
    for fact in ("bytes_on_disk", "ratio"):
        assert {facts[fact], *(array[fact] for array in arrays)} == {None}
    assert facts["files"] is None
    assert "<td>unknown</td>" in (tmp_path / "here.html").read_text()
