"""The tests mirror the packages: a module's tests lie where the module lies, under its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("trajstore", "trainers", "analysis")


def packages() -> list[Path]:
    """Folders of modules, relative to the root of the repository."""
    return sorted(
        path.parent.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")  # which follows no links
    )


@pytest.mark.parametrize("package", packages(), ids=str)
def test_every_test_is_named_after_a_module_of_its_package(package: Path) -> None:
    folder = ROOT / "tests" / "unit" / package
    modules = {path.stem for path in (ROOT / package).glob("*.py")} | {"facade"}
    tests = [path.stem.removeprefix("test_") for path in folder.glob("test_*.py")]
    if modules != {"__init__", "facade"}:  # else it holds packages only
        assert tests, f"{package} has no tests in {folder}"
    strays = [
        name
        for name in tests
        if not any(name == module or name.startswith(f"{module}_") for module in modules)
    ]
    assert not strays, f"{folder}: no module of {package} is called so: {strays}"


@pytest.mark.parametrize(
    "package", [package for package in packages() if len(package.parts) > 1], ids=str
)
def test_a_package_says_what_each_of_its_files_does(package: Path) -> None:
    """In the docstring of its init file, and of no file that is not there."""
    told = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert modules == set(re.findall(r"``(\w+)``", told))


def test_every_test_folder_has_its_package() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests" / "unit")
        for path in (ROOT / "tests" / "unit").rglob("test_*.py")
    }
    assert folders - {Path(".")} <= set(packages())
