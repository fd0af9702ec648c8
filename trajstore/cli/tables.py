"""What the commands print: tables and JSON on standard output, errors on standard error.

Texts of others, such as tokens, are shown as they are: no escape sequence reaches the terminal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Mapping
from typing import IO, Any

import click
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = [
    "PlainConsole",
    "PlainTable",
    "counted",
    "err",
    "json_value",
    "out",
    "print_json",
    "print_notes",
    "print_table",
    "printable",
    "table",
    "without_tokens",
]


def printable(text: str, keep: str = "") -> str:
    r"""Text in which nothing but characters that can be seen is left: all others are escaped.

    Those are what a terminal obeys instead of showing it (escape sequences), marks that turn the
    direction of writing, lone surrogates, and what has no width.

    Parameters
    ----------
    text : str
    keep : str
        Characters that stay as they are, such as a line's end.

    Examples
    --------
    >>> printable("a\x1b[31m\u202eb é"), printable("two\nlines", keep="\n") == "two\nlines"
    ('a\\x1b[31m\\u202eb é', True)
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in text
    )


class PlainConsole(Console):
    """A console that shows texts as they are, without markup, and nothing that cannot be seen.

    Parameters
    ----------
    **options
        Of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints them, texts made printable."""
        super().print(*map(_shown, objects), **options)

    def on_broken_pipe(self) -> None:
        """Nobody listens any more: on standard error that ends the words, not the work."""
        if not self.stderr:
            super().on_broken_pipe()
        self.quiet = True
        _close_to_nothing(self.file)


class PlainTable(Table):
    """A table whose cells are texts as they are."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """As rich adds it, texts made printable."""
        super().add_row(*map(_shown, cells), **options)


def _shown(shown: Any) -> Any:
    if isinstance(shown, str):
        return Text(printable(shown, keep="\n"))
    if isinstance(shown, Text):
        plain = printable(shown.plain, keep="\n")
        return shown if plain == shown.plain else Text(plain, style=shown.style)
    return shown


def _close_to_nothing(stream: IO[str]) -> None:
    """Let whatever else writes to the stream's file, such as a library, be heard by nobody."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


out = PlainConsole(soft_wrap=True)
err = PlainConsole(stderr=True, soft_wrap=True)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = 160  # in a file or a pipe, tables are not squeezed


def table(title: str, *columns: str, words: Container[int] = (0,)) -> PlainTable:
    """Empty table. The first column, whose names are never cut, and `words` hold no numbers."""
    made = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number in words else "right", no_wrap=number == 0)
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
