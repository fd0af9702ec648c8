"""Texts of others, such as tokens, as a terminal may show them."""

from __future__ import annotations

import os
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["PlainConsole", "PlainTable", "printable"]


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
