"""What the commands print: tables and JSON on standard output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich import box
from rich.text import Text

from trajstore.cli.printable import PlainConsole, PlainTable

__all__ = [
    "counted",
    "err",
    "json_value",
    "out",
    "print_json",
    "print_notes",
    "print_table",
    "table",
    "without_tokens",
]

out = PlainConsole(soft_wrap=True)
err = PlainConsole(stderr=True, soft_wrap=True)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = 160  # in a file or a pipe, tables are not squeezed


def table(title: str, *columns: str) -> PlainTable:
    """Empty table; all columns but the first, whose names are never cut, hold numbers."""
    made = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    return made


def print_table(printed: PlainTable) -> None:
    """Print a table that fits the terminal: what does not fit its column goes on below."""
    out.print(printed, soft_wrap=False)


def print_notes(notes: Iterable[str]) -> None:
    """Print what should be known about a result, a line each."""
    for note in notes:
        out.print(Text(f"Note: {note}."))


def without_tokens(populations: Mapping[str, int]) -> list[str]:
    """What should be known of populations, by their numbers of tokens: those that have none."""
    return [f"the population {name} has no token" for name, n in populations.items() if not n]


def print_json(facts: Any) -> None:
    """Print one JSON document; NaN and infinities, which JSON has not, become null."""
    click.echo(json.dumps(json_value(facts), indent=2))


def json_value(value: Any) -> Any:
    """A value that JSON has: NaN and infinities are null."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
