"""What is said about the release in several places is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from trajstore.installation import __version__

ROOT = Path(__file__).parents[2]


def test_the_changelog_and_the_citation_name_the_last_release() -> None:
    """It is this version, or this is a development version of a later one."""
    titles = re.findall(r"^## \[(.+?)\](?: – (\d{4}-\d{2}-\d{2}))?$", _text("CHANGELOG.md"), re.M)
    assert titles[0] == ("Unreleased", "")
    version, date = titles[1]
    here = Version(__version__)
    assert here == Version(version) or (here.is_devrelease and here > Version(version))
    cited = yaml.safe_load(_text("CITATION.cff"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == version
    assert str(cited["date-released"]) == date


@pytest.mark.parametrize(
    "name",
    [
        ".github/workflows/check.yml",
        ".github/workflows/release.yml",
        ".github/ISSUE_TEMPLATE/bug.yml",
        ".github/ISSUE_TEMPLATE/wish.yml",
        ".pre-commit-config.yaml",
        ".readthedocs.yaml",
    ],
)
def test_what_other_programs_read_can_be_read(name: str) -> None:
    assert isinstance(yaml.safe_load(_text(name)), dict)


def test_the_workflow_runs_what_there_is_to_run() -> None:
    jobs = yaml.safe_load(_text(".github/workflows/check.yml"))["jobs"]
    targets = set(re.findall(r"^(\w+):.*##", _text("Makefile"), re.M))
    versions = {entry["versions"] for entry in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert versions <= targets
    assert any(step.get("run") == "bash .ci/run" for step in jobs["whole"]["steps"])


def _text(name: str) -> str:
    return (ROOT / name).read_text()
