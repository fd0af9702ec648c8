"""A package that adds a command and an accessor, as in docs/howto/extend.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trajstore.cli.main import main

PAGE = (Path(__file__).parents[4] / "docs" / "howto" / "extend.md").read_text()


def block(language: str) -> str:
    """First code block of the language on the page."""
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the installed package."""
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "loudest.py").write_text(block("python"))
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def call(*arguments: str) -> Result:
    """What a process prints that starts now, and so finds the package."""
    commands = type(main)("trajstore", no_args_is_help=True)
    return CliRunner().invoke(commands, arguments)


def test_another_package_adds_a_command_and_an_accessor(site: Path, example_run: Path) -> None:
    """In a process of its own: where xarray finds accessors is decided once."""
    code = (
        "import sys, xarray\n"
        "from trajstore.cli.main import main\n"
        "main(['loudest', sys.argv[1], '--step', '3'], standalone_mode=False)\n"
        "print(xarray.open_dataset(sys.argv[1]).loud.tokens(3))\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code, example_run],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown, again = done.stdout.splitlines(keepends=True)
    assert f"$ trajstore loudest gatsby.zarr --step 3\n{shown}" in PAGE
    assert again == shown


def test_a_command_that_cannot_be_imported_leaves_the_others(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (site / "loudest.py").open("a") as file:
        file.write("\nimport a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(site)
    shown = call("--help").stdout
    assert re.search(r"^  loudest +Cannot be imported from loudest\.$", shown, re.M)
    assert re.search(r"^  verify +Read", shown, re.M)
    done = call("loudest", "gatsby.zarr", "--step", "3")
    assert done.exit_code == 1
    assert "loudest cannot be imported: No module named 'a_package_that" in done.stderr


def test_no_package_replaces_a_command_of_trajstore(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info,) = site.glob("*.dist-info")
    (info / "entry_points.txt").write_text("[trajstore.commands]\nverify = loudest:loudest\n")
    monkeypatch.syspath_prepend(site)
    assert re.search(r"^  verify +Read", call("--help").stdout, re.M)
