"""Pages of docs/reference/ and docstrings against the code that they describe.

`make reference` writes parts of the pages. pytest runs the examples of all packages.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from trajstore import analysis, errors, schema

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
TOOL = ROOT / "tools" / "reference.py"


@pytest.mark.torch
@pytest.mark.skipif(not TOOL.exists(), reason="needs a clone")
def test_the_parts_from_the_code_are_up_to_date() -> None:
    for needed in ("torch", "lightning", "matplotlib"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("reference_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.files().items():
        assert path.read_text("utf-8") == text, f"{path} is old; run make reference"


def rows(page: str, heading: str | None = None) -> list[list[str]]:
    """Cells of the first table of a page, or of the section with this heading, after its head."""
    text = (REFERENCE / page).read_text()
    if heading is not None:
        assert f"## {heading}\n" in text, heading
        text = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = re.search(r"^\|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, (page, heading)
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table[1].splitlines()
    ]


def test_every_coordinate_is_described() -> None:
    described = {row[0].strip("`") for row in rows("variables.md", "Coordinates")}
    assert described == {"step", "is_NAME", *schema.COORDINATES}


def test_every_tier_is_described() -> None:
    described = {
        row[0].partition("`")[2].partition("`")[0] for row in rows("variables.md", "Tiers")
    }
    assert described == set(schema.TIERS)


def test_every_exception_is_described() -> None:
    described = {
        row[0].strip("`"): (row[1].strip("`"), int(row[4])) for row in rows("exceptions.md")
    }
    assert set(described) == set(errors.__all__)
    for name, (base, exit_code) in described.items():
        error = getattr(errors, name)
        assert base in {one.__name__ for one in error.__mro__[1:]}, name
        assert error.exit_code == exit_code, name


def test_every_function_has_a_question_and_a_page() -> None:
    names = {name for name in analysis.__all__ if name.islower()}
    pages = "".join(page.read_text() for page in (REFERENCE / "analysis").glob("*.md"))
    assert names - {*re.findall(r"^## `(\w+)`$", pages, re.MULTILINE)} == set()
    asked = {name for row in rows("quantities.md") for name in re.findall(r"\w+", row[1])}
    helpers = {"by_population", "compute", "each_run", "over_runs", "with_populations"}
    assert names - asked == helpers


@pytest.mark.torch
def test_every_section_and_field_of_the_configuration_is_described() -> None:
    pytest.importorskip("pydantic")
    from trajstore.trainers.config import RunConfig

    page = (REFERENCE / "configuration.md").read_text()
    assert re.findall(r"^<!-- make reference: fields (\w+) -->$", page, re.MULTILINE) == [
        *RunConfig.model_fields
    ]
    for section, entry in RunConfig.model_fields.items():
        for name, field in entry.annotation.model_fields.items():
            assert field.description, (section, name)


@pytest.mark.torch
def test_every_preset_is_described() -> None:
    pytest.importorskip("pydantic")
    from trajstore.trainers.presets import PRESETS, preset

    assert [row[0].strip("`") for row in rows("presets.md")] == list(PRESETS)
    for _, name, changes in rows("presets.md", "Flannel, Thimble and Crucible"):
        config = preset(name.strip("`"))
        assert "`" not in changes or config.with_values(re.findall("`(.+?)`", changes)) != config


PACKAGES = (
    "trajstore",
    "trajstore.analysis",
    pytest.param("trajstore.trainers", marks=pytest.mark.torch),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_has_an_example(package: str) -> None:
    if package == "trajstore.trainers":
        pytest.importorskip("torch")
    facade = importlib.import_module(package)
    functions = {
        name: found for name in facade.__all__ if inspect.isfunction(found := getattr(facade, name))
    }
    assert functions
    assert [name for name, found in functions.items() if ">>>" not in (found.__doc__ or "")] == []


@pytest.mark.parametrize("package", ["trajstore", "analysis", "trainers"])
def test_no_example_is_skipped(package: str) -> None:
    skipped = [
        path for path in (ROOT / package).rglob("*.py") if "doctest: +SKIP" in path.read_text()
    ]
    assert skipped == []
