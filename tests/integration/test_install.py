"""What the page Install names: versions that are tested together, and without them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
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


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    """But for what is only trained and downloaded with, which needs torch."""
    extras = PROJECT["optional-dependencies"]
    allowed: dict[str, set[Version]] = {}
    for line in [
        *PROJECT["dependencies"],
        *(line for extra in ("plot", "hdf5", "cluster", "test") for line in extras[extra]),
    ]:
        requirement = Requirement(line)
        (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
        allowed.setdefault(requirement.name, set()).add(Version(bound))
    pinned = {
        (requirement := Requirement(line)).name: {
            Version(part.version) for part in requirement.specifier
        }
        for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert {name: pinned.get(name) for name in allowed} == allowed


def test_all_is_every_extra_for_users() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    (named,) = re.findall(r"\[(.*)\]", everything)
    assert set(named.split(",")) == FOR_USERS


def test_every_extra_is_on_the_page_install() -> None:
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
