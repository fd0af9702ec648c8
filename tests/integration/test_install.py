"""What is installed: versions that go together, and the wheel alone, beside folders of a user."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_USERS = set(PROJECT["optional-dependencies"]) - {"all", "test", "docs", "dev"}


# With torch at hand, which need not be downloaded to be taken into account.
@pytest.mark.torch
@pytest.mark.nightly
def test_the_newest_versions_can_be_installed_together() -> None:
    """As those of `constraints.txt`, which make each environment for development."""
    pytest.importorskip("torch")
    options = ["--dry-run", "--no-build-isolation", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, f"{ROOT}[all]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def versions(lines: list[str], operator: str) -> dict[str, set[Version]]:
    """Those of each requirement that follow the operator."""
    found: dict[str, set[Version]] = {}
    for requirement in map(Requirement, lines):
        held = found.setdefault(requirement.name, set())
        held |= {Version(one.version) for one in requirement.specifier if one.operator == operator}
    return found


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    """But for what is only trained and downloaded with, which needs torch."""
    extras = PROJECT["optional-dependencies"]
    lines = [line for extra in ("plot", "hdf5", "cluster", "test") for line in extras[extra]]
    allowed = versions([*PROJECT["dependencies"], *lines], ">=")
    assert set(map(len, allowed.values())) == {1}
    listed = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = versions([line for line in listed if not line.startswith("#")], "==")
    assert {name: pinned.get(name) for name in allowed} == allowed


def test_every_extra_is_in_all_and_on_the_page_install() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    (named,) = re.findall(r"\[(.*)\]", everything)
    assert set(named.split(",")) == FOR_USERS
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    assert [extra for extra in FOR_USERS if f"| `{extra}` |" not in page] == []


def test_messages_name_extras_that_are_there() -> None:
    named = {
        extra
        for package in ("trajstore", "trainers", "analysis")
        for path in (ROOT / package).rglob("*.py")
        for extra in re.findall(r'(?:MissingExtra|needs_extra)\([^,\n]+, "(\w+)"', path.read_text())
    }
    assert {"torch", "train", "report", "plot", "s3", "hub"} <= named <= FOR_USERS


def needed_by(package: str) -> set[str]:
    """Names of the distributions that one requires, and those that they require."""
    found: set[tuple[str, str]] = set()  # with an extra, or without
    left = [(package, "")]
    while left:
        name, extra = left.pop()
        for line in distribution(name).requires or ():
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                wanted = {(canonicalize_name(one.name), extra) for extra in ("", *one.extras)}
                left += wanted - found
                found |= wanted
    return {name for name, _ in found}


def _built(folder: Path, *options: str) -> Path:
    """Wheel of this repository."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "-o", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new environment with the wheel and what it depends on, and nothing else.

    The dependencies are those of this environment, linked: to install them takes half a minute.
    """
    folder = tmp_path_factory.mktemp("wheel")
    wheel = _built(folder)  # by way of the sdist
    venv.create(folder / "env")
    python = folder / "env" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel],
        check=True,
        capture_output=True,
    )
    (packages,) = folder.glob("env/lib/python*/site-packages")
    for name in needed_by("trajstore"):
        brought = distribution(name)
        for top in {file.parts[0] for file in brought.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(brought.locate_file(top)))
    return python


@pytest.mark.nightly
def test_every_command_and_function_works_or_names_its_extra(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [python, ROOT / "tests" / "base_only.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row for row in table if row[1] != row[2]] == []


@pytest.mark.nightly
def test_the_wheel_holds_one_typed_package_and_no_tests(python: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_built(tmp_path, "--wheel")) as wheel:
        held = set(wheel.namelist())
    assert {name.partition("/")[0] for name in held if ".dist-info" not in name} == {"trajstore"}
    assert "trajstore/py.typed" in held
    assert not [name for name in held if "conftest" in name or "test_" in name]
    code = 'from importlib.metadata import files; print(*files("trajstore"), sep="\\n")'
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    installed = {name for name in done.stdout.split() if name.startswith("trajstore/")}
    installed = {name for name in installed if "__pycache__" not in name}
    assert installed == {name for name in held if ".dist-info" not in name}  # that of the sdist
