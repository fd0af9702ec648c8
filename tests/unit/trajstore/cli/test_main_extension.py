"""A package that adds a command and an accessor, as in docs/howto/extend.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def trajstore(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(site, "-c", "from trajstore.cli.start import main; main()", *arguments)


def test_another_package_adds_a_command_and_an_accessor(site: Path, example_run: Path) -> None:
    assert re.search(r"^  loudest +Print the tokens", trajstore(site, "--help").stdout, re.M)
    done = trajstore(site, "loudest", str(example_run), "--step", "3")
    assert done.returncode == 0, done.stderr
    assert f"$ trajstore loudest gatsby.zarr --step 3\n{done.stdout}" in PAGE
    code = f"import xarray; print(xarray.open_dataset({str(example_run)!r}).loud.tokens(3))"
    assert python(site, "-c", code).stdout == done.stdout


def test_a_command_that_cannot_be_imported_leaves_the_others(site: Path) -> None:
    with (site / "loudest.py").open("a") as file:
        file.write("\nimport a_package_that_is_not_there\n")
    shown = trajstore(site, "--help")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^  loudest +Cannot be imported from loudest\.$", shown.stdout, re.M)
    assert re.search(r"^  verify +Read", shown.stdout, re.M)
    done = trajstore(site, "loudest", "gatsby.zarr", "--step", "3")
    assert done.returncode == 1
    assert "loudest cannot be imported: No module named 'a_package_that" in done.stderr


def test_no_package_replaces_a_command_of_trajstore(site: Path) -> None:
    (info,) = site.glob("*.dist-info")
    (info / "entry_points.txt").write_text("[trajstore.commands]\nverify = loudest:loudest\n")
    assert re.search(r"^  verify +Read", trajstore(site, "--help").stdout, re.M)
