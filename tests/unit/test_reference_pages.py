"""Tables of docs/reference/ against the code that they describe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trajstore import analysis, errors, schema
from trajstore.exchange.layouts import LAYOUTS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


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


def test_every_variable_is_described() -> None:
    described = [row[:5] for row in rows("variables.md")]
    assert described == [
        [f"`{one.name}`", ", ".join(one.dims), one.state.split()[0], one.row0, one.units]
        for one in schema.VARIABLES.values()
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


def test_every_layout_is_described() -> None:
    text = (REFERENCE / "layouts.md").read_text()
    assert [name for name in LAYOUTS if f"`{name}`" not in text] == []


def test_every_function_has_a_question_and_a_definition() -> None:
    text = (REFERENCE / "quantities.md").read_text()
    names = {name for name in analysis.__all__ if name.islower()} - {"compute"}
    defined = {name for line in text.splitlines() for name in re.findall(r"\*\*`(\w+)\(", line)}
    assert names - defined == {"with_populations"}
    asked = {name for row in rows("quantities.md") for name in re.findall(r"\w+", row[1])}
    assert names - asked == {"by_population", "each_run", "over_runs", "with_populations"}


@pytest.mark.torch
def test_every_field_of_the_configuration_is_described() -> None:
    pytest.importorskip("pydantic")
    from trajstore.trainers.config import RunConfig, _allowed, _literal

    for section, entry in RunConfig.model_fields.items():
        kind = entry.annotation
        described = {
            row[0].strip("`"): row[1:3] for row in rows("configuration.md", f"`{section}`")
        }
        assert list(described) == list(kind.model_fields), section
        for name, value in kind().model_dump(mode="json").items():
            default, allowed = described[name]
            assert default == ("not set" if value is None else f"`{_literal(value)}`"), name
            bounds = ", ".join(_allowed(kind.model_fields[name]))
            assert not bounds or allowed == bounds, (section, name)


@pytest.mark.torch
def test_every_preset_is_described() -> None:
    pytest.importorskip("pydantic")
    from trajstore.trainers.presets import PRESETS

    assert [row[0].strip("`") for row in rows("presets.md")] == list(PRESETS)
