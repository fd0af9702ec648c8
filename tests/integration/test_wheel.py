"""The built wheel in an empty environment: reading and analysing need no more than it brings."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


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


def test_every_command_and_function_works_or_names_its_extra(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [python, ROOT / "tests" / "base_only.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row for row in table if row[1] != row[2]] == []


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
