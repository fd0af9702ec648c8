"""Output of the commands: results on standard output, errors and progress on standard error.

Text from files, such as tokens, is escaped: no escape sequence reaches the terminal.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from ast import literal_eval
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import PurePath
from shlex import quote
from typing import Any, Self

import click
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from trajstore.cli.stop_signals import StopRequest, working
from trajstore.errors import InvalidArgument, TrajstoreError, needs_extra


def printable(text: str, keep: str = "") -> str:
    r"""Escape every character that is not printable.

    These are control characters (terminal escape sequences), marks that change the direction of
    writing, unpaired surrogates, and characters without width.

    Parameters
    ----------
    text : str
    keep : str
        Characters that are not escaped, such as a newline.

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
    """A console that prints text without markup and escapes what is not printable.

    Parameters
    ----------
    **options
        Options of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print with rich; strings are made printable."""
        super().print(*map(_shown, objects), **options)

    def on_broken_pipe(self) -> None:
        """Handle a closed pipe: on standard error, only the output stops, not the command."""
        if not self.stderr:
            super().on_broken_pipe()
        self.quiet = True
        # Also for libraries that write to the file descriptor.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.file.fileno())
        os.close(nothing)


class PlainTable(Table):
    """A table whose cells are printed without markup."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row with rich; numbers become text, and strings are made printable."""
        texts = (str(cell) if isinstance(cell, int) else cell for cell in cells)
        super().add_row(*map(_shown, texts), **options)


def _shown(shown: Any) -> Any:
    if isinstance(shown, str):
        return Text(printable(shown, keep="\n"))
    if isinstance(shown, Text):
        plain = printable(shown.plain, keep="\n")
        return shown if plain == shown.plain else Text(plain, style=shown.style)
    return shown


out = PlainConsole(soft_wrap=True)
err = PlainConsole(stderr=True, soft_wrap=True)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = 160  # no wrapping in a file or a pipe


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[Any]],
    *,
    words: Container[int] = (0,),
    fold: bool = False,
) -> PlainTable:
    """Table. Columns in `words` are left-aligned; the first is cut only if `fold` wraps it."""
    made = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for at, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if at in words else "right",
            no_wrap=at == 0 and not fold,
            overflow="fold" if fold and at == 0 else "ellipsis",
        )
    for row in rows:
        made.add_row(*row)
    return made


def print_table(*parts: Any, **options: Any) -> None:
    """Print a `table` at the width of the terminal; long cells wrap."""
    out.print(table(*parts, **options), soft_wrap=False)


_OPTIONS = {
    f"{name}=": f"--{name.partition('.')[2] or name.replace('_', '-')}"
    for name in (
        "at", "bits", "block_rows", "constructor", "corpus", "encoding", "every", "first_row",
        "format", "labels", "layout", "map", "masks", "memory", "source", "threads", "tokenizer",
        "variables", "training.steps", "training.device", "training.threads",
    )
} | {
    "overwrite=True": "--overwrite",
    "fill_damaged=True": "--fill-damaged",
    "resume=True": "--resume",
    "allow_different=True": "--allow-different",
    "join='inner'": "--common-steps",
}  # fmt: skip
"""Options by the arguments that messages name; other fields of the configuration need --set."""

_TEXT = r"(?:'(?:[^'\\]|\\.)+'|\"(?:[^\"\\]|\\.)+\")"
_ARGUMENT = re.compile(
    r"--[\w-]+ \S+|\w\([^()]*\)"  # an option or a call: stays
    rf"|(?P<table>\w+=)(?P<entries>{{{_TEXT}: {_TEXT}(?:, {_TEXT}: {_TEXT})*}})"
    r"|(?<![\w.,/\\'\"-])"
    r"(?P<name>((?:model|data|initialization|optimizer|schedule|training|recording)\.)?\w+=)"
    r"(?P<value>'[^']+'|[\w…](?:[\w.+-]*[\w…])?)(?![\w(/\\]|\.\w)"
)


def in_command(message: str) -> str:
    """A message as a command prints it: options in place of arguments.

    Arguments that are no option, or have a value that no option takes, stay.

    Examples
    --------
    >>> in_command("record it with variables='matrix,batch', or give corpus=…")
    'record it with --variables matrix,batch, or give --corpus …'
    >>> in_command("set training.steps=9 or model.dtype=float32; got every=-1; run f(every=1)")
    'set --steps 9 or --set model.dtype=float32; got every=-1; run f(every=1)'
    >>> in_command("omit it with map={'ignore': 'my W', 'W': 'x'}; no run at /at=2/a.zarr")
    "omit it with --map 'ignore=my W' --map W=x; no run at /at=2/a.zarr"
    """
    return _ARGUMENT.sub(_as_option, message)


def _as_option(found: re.Match[str]) -> str:
    text, name = found[0], found["name"]
    if found["table"] in _OPTIONS:
        entries = [f"{key}={value}" for key, value in literal_eval(found["entries"]).items()]
        return " ".join(f"{_OPTIONS[found['table']]} {quote(entry)}" for entry in entries)
    if name is None or text in _OPTIONS:
        return _OPTIONS.get(text, text)
    value = found["value"].strip("'")
    plain = quote(value) if value.isascii() else value
    if name in _OPTIONS:
        return f"{_OPTIONS[name]} {plain}"
    return f"--set {name}{plain}" if "." in name else text


def print_notes(notes: Iterable[str]) -> None:
    """Print notes about a result, one per line."""
    for note in notes:
        out.print(f"Note: {in_command(note)}.")


def recorded_notes(notes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Notes of a recording, each with its steps."""
    for note in notes:
        first, last, count = note["first_step"], note["last_step"], note["count"]
        steps = f"step {first}" if count == 1 else f"{count:,} steps, {first} to {last}"
        yield f"{note['note']} ({steps})"


def without_tokens(populations: Mapping[str, int]) -> list[str]:
    """Notes about populations without tokens, from the number of tokens of each."""
    return [f"the population {name} has no token" for name, n in populations.items() if not n]


def print_json(facts: Any) -> None:
    """Print one JSON document; NaN and infinities become null."""
    click.echo(json.dumps(json_value(facts), indent=2))


def json_value(value: Any) -> Any:
    """The value with None in place of NaN and infinities, and paths as strings."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def counted(number: int, noun: str) -> str:
    """A number with its noun, plural if needed.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Bar:
    """A progress bar on a terminal, shown while the ``with`` block runs; elsewhere no output.

    Parameters
    ----------
    *columns : ProgressColumn
    stop : StopRequest, optional
        If a signal has requested a stop, `show` ends the command.
    console : Console
        Where the bar is shown.
    **options
        Of the bar.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        stop: StopRequest | None = None,
        console: Console = err,
        **options: Any,
    ) -> None:
        self._stop = stop
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, **options)
        self._task = self._bar.add_task("", total=None, state="")

    def __enter__(self) -> Self:
        working()
        if self._stop is not None:
            self._stop.begin()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Update the bar to `done` of `total`.

        Raises
        ------
        KeyboardInterrupt, SystemExit
            If a signal has requested a stop.
        """
        if self._stop is not None:
            self._stop.check()
        self._bar.update(self._task, completed=done, total=total)


class BytesProgress(Bar):
    """Progress in bytes.

    Parameters
    ----------
    verb : str
        Label of the bar.
    stop : StopRequest, optional
        As of `Bar`.
    """

    def __init__(self, verb: str, stop: StopRequest | None = None) -> None:
        super().__init__(
            TextColumn(verb),
            BarColumn(bar_width=30),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            stop=stop,
            transient=True,
        )


class StepsProgress(Bar):
    """Progress in rows of a run, or in frames of a film.

    Parameters
    ----------
    verb : str
        Label of the bar.
    unit : str
        What it counts.
    stop : StopRequest, optional
        As of `Bar`.
    """

    def __init__(self, verb: str, unit: str = "row", stop: StopRequest | None = None) -> None:
        super().__init__(
            TextColumn(f"{verb} {unit} {{task.completed}}/{{task.total}}"),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            stop=stop,
            transient=True,
        )


class AnalysisProgress(Bar):
    """Progress of a computation in tasks.

    Parameters
    ----------
    address : str, optional
        Address of a dask scheduler. Default: compute in the threads of this process.
    timeout : float
        Seconds to wait for its answer.

    Raises
    ------
    MissingExtra
        If `address` is given and dask.distributed is not installed.
    InvalidArgument
        If no scheduler answers at `address`.
    """

    def __init__(self, address: str | None = None, *, timeout: float = 10) -> None:
        self._client = _client(address, timeout) if address else None
        super().__init__(
            TextColumn("{task.completed}/{task.total} tasks"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
        )

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._client is not None:
            self._client.close()


def _client(address: str, timeout: float) -> Any:
    with needs_extra("computing on a cluster", "cluster"):
        from distributed import Client
    try:
        return Client(address, timeout=timeout)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"no dask scheduler answers at {address}: {error}") from error


def print_error(error: BaseException) -> int:
    """Print an expected error as one sentence, and return the exit code of the command."""
    sentence, code = "stopped by Ctrl-C", 128 + signal.SIGINT
    if isinstance(error, TrajstoreError):
        sentence, code = in_command(str(error)), error.exit_code
    elif isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        reason = error.strerror or error
        sentence, code = f"the operating system reported an error{where}: {reason}", 1
    elif isinstance(error, MemoryError):
        sentence, code = f"out of memory: {error}" if str(error) else "out of memory", 1
    err.print(f"trajstore: {sentence}")
    return code
