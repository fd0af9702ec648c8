"""Output of `watch`: a view for a terminal, lines for anything else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trajstore.byte_sizes import format_bytes
from trajstore.cli.tables import printable
from trajstore.durations import format_duration
from trajstore.store.reading.run_settings import attribute

if TYPE_CHECKING:
    from trajstore.watching.measures import BoundedCurve
    from trajstore.watching.run_follower import Look

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLORS = {"loss": "default", "dead": "magenta", "live": "cyan", "all": "cyan"}
_LATE = 4  # multiple of the seconds between two commits
_LONGEST = 24  # characters of a token's text
_STATUSES = {
    "absent": "not created yet",
    "recording": "recording",
    "abandoned": "recording process died",
    "interrupted": "interrupted",
    "complete": "complete",
}


def view(run: str, look: Look, width: int) -> Group:
    """View of one run for a terminal.

    Parameters
    ----------
    run : str
        Path as given.
    look : Look
    width : int
        Columns of the terminal.
    """
    if look.status == "absent":
        return Group(Text(f"{printable(run)}: waiting; the run does not exist yet"))
    lines: list[Any] = [_title(run, look), _progress(look, width)]
    if look.curves:
        lines.append(_curves(look, width))
    for number, text in enumerate(_tail(look)):
        lines.append(Text(text, "dim" if number else "", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def overview(looks: Mapping[str, Look], width: int) -> Table:
    """Table with one line per run, for a terminal."""
    grid = Table.grid(padding=(0, 2), expand=False)
    grid.width = width
    grid.add_column(no_wrap=True, overflow="ellipsis", min_width=12)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, justify="right")
    for run, look in looks.items():
        loss = look.curves.get("loss")
        grid.add_row(
            Text(printable(run), style="bold"),
            Text(_STATUSES[look.status], style=_status_color(look)),
            "" if look.status == "absent" else _step(look),
            _bar(look),
            f"loss {_number('loss', loss.last)}" if loss is not None else "",
            _left(look),
        )
    return grid


def line(run: str, look: Look) -> str:
    """The same numbers in one line."""
    if look.status == "absent":
        return f"{printable(run)}: waiting; the run does not exist yet"
    parts = [f"{printable(run)}: {_STATUSES[look.status]}", _step(look)]
    for name, curve in look.curves.items():
        parts.append(f"{_label(name)} {_number(name, curve.last)}")
    parts += [
        _speed(look),
        _left(look),
        f"{format_bytes(look.bytes_on_disk)} on disk",
        _commit(look),
    ]
    return ", ".join(filter(None, parts))


def facts(run: str, look: Look) -> dict[str, Any]:
    """The same numbers as JSON values."""
    left_out = ("curves", "attributes", "largest")
    kept = {name: value for name, value in vars(look).items() if name not in left_out}
    last = {name: curve.last for name, curve in look.curves.items()}
    largest = (
        None if look.largest is None else dict(zip(("token", "norm"), look.largest, strict=True))
    )
    return {"run": run, **kept, "last": last, "largest_gradient": largest}


def sparkline(curve: BoundedCurve, width: int, *, log: bool = False) -> str:
    """A curve in `width` characters, scaled from its least mean to its largest; gaps are blank.

    >>> from trajstore.watching.measures import BoundedCurve
    >>> curve = BoundedCurve()
    >>> curve.add(0, [1, 10, 100, float("nan"), 1000])
    >>> sparkline(curve, 5, log=True)
    '▁▃▆ █'
    """
    means = curve.means(width).tolist()
    heights = [_height(mean, log=log) for mean in means]
    finite = [height for height in heights if math.isfinite(height)]
    least, largest = min(finite, default=0.0), max(finite, default=0.0)

    def sign(mean: float, height: float) -> str:
        if math.isnan(mean):
            return " "
        if height == -math.inf or largest == least:
            return _BLOCKS[0]
        return _BLOCKS[round((height - least) / (largest - least) * (len(_BLOCKS) - 1))]

    return "".join(map(sign, means, heights))


def _height(mean: float, *, log: bool) -> float:
    if not log:
        return mean
    return math.log10(mean) if mean > 0 else (-math.inf if mean == 0 else math.nan)


def _bar(look: Look) -> ProgressBar | str:
    """A progress bar that fills the rest of its line; nothing if the number of steps is unknown."""
    return ProgressBar(total=look.steps, completed=look.step) if look.steps else ""


def _title(run: str, look: Look) -> Text:
    named = Text(printable(run), style="bold")
    named.append(f"  {_STATUSES[look.status]}", style=_status_color(look))
    provenance = look.attributes.get("provenance")
    corpus = provenance.get("corpus") if isinstance(provenance, dict) else None
    if isinstance(corpus, dict) and corpus.get("name"):
        named.append(f"  on {printable(str(corpus['name']))}", style="dim")
    return named


def _status_color(look: Look) -> str:
    color = {"recording": "green", "abandoned": "red", "complete": "blue"}
    return color.get(look.status, "yellow")


def _progress(look: Look, width: int) -> Table:
    grid = Table.grid(padding=(0, 1), expand=False)
    grid.width = width
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    done = f"{min(look.step * 100 // look.steps, 100)}%" if look.steps else ""
    grid.add_row(_step(look), _bar(look), f"{done}  {_left(look)}".strip())
    return grid


def _curves(look: Look, width: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    for justify in ("left", "right", "left", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    rows = [_curve_cells(name, curve) for name, curve in look.curves.items()]
    taken = sum(max(len(row[at]) for row in rows) for at in range(3)) + 3
    for (label, value, span), (name, curve) in zip(rows, look.curves.items(), strict=True):
        drawn = sparkline(curve, width - taken - 1, log=name.startswith("gradient"))
        color = _COLORS.get(name.rpartition(" ")[2], "default")
        style = "bold red" if not math.isfinite(curve.last) else "bold"
        grid.add_row(label, Text(value, style), Text(drawn, color), Text(span, "dim"))
    return grid


def _curve_cells(name: str, curve: BoundedCurve) -> tuple[str, str, str]:
    span = f"{_number(name, curve.least)} … {_number(name, curve.largest)}"
    return _label(name), _number(name, curve.last), span if math.isfinite(curve.least) else ""


def _label(name: str) -> str:
    """Label of a measure: ``gradient dead`` becomes ``|grad| dead``."""
    return name.replace("gradient", "|grad|")


def _number(name: str, value: float) -> str:
    if name.startswith("gradient"):
        return "0" if value == 0 else f"{value:.2e}"
    if name.startswith("unchanged"):
        return f"{value:.1%}"
    return f"{value:.4f}"


def _tail(look: Look) -> Iterator[str]:
    """Lines below the curves: speed, size, last commit, and the sources of the curves."""
    sizes = f"{format_bytes(look.bytes_recorded)} in {format_bytes(look.bytes_on_disk)} on disk"
    yield "  ".join(filter(None, (_speed(look), sizes)))
    yield _commit(look) + (f"; learning rate {look.lr:.3g}" if look.lr is not None else "")
    if look.largest is not None:
        token, norm = look.largest
        yield f"largest gradient: token {_shortened(printable(token))}, {norm:.2e}"
    sources = []
    if look.gradient_of:
        sources.append(
            f"|grad|: mean L2 norm over the tokens, log scale; {_source(look.gradient_of)}"
        )
    if look.unchanged_of:
        sources.append(
            f"unchanged: fraction of tokens whose vector did not change; "
            f"{_source(look.unchanged_of)}"
        )
    yield from sources
    if sources and look.measured < look.rows:
        yield f"read so far: {look.measured:,} of {look.rows:,} rows, newest first"
    if look.status == "abandoned":
        yield "The recording process died. All committed rows are complete."
    if look.status == "recording" and look.commit_age > _LATE * _commit_every(look):
        yield "The last commit is overdue: the training waits or hangs."


def _source(variable: str) -> str:
    return f"from {variable}" + (", W in bfloat16" if variable == "cells" else "")


def _commit_every(look: Look) -> float:
    seconds = attribute(look.attributes, "config", "recording", "commit_every")
    return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else math.inf


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * _LONGEST else f"{text[:_LONGEST]}…{text[-_LONGEST:]}"


def _step(look: Look) -> str:
    if not look.rows:
        return "no rows yet"
    return f"step {look.step:,}" + (f" of {look.steps:,}" if look.steps else "")


def _left(look: Look) -> str:
    if look.remaining is None:
        return ""
    return f"{format_duration(look.remaining)} left"


def _speed(look: Look) -> str:
    rows = f"{look.rows:,} rows"
    return rows if look.rows_per_second is None else f"{rows}, {look.rows_per_second:.3g} a second"


def _commit(look: Look) -> str:
    at = datetime.fromtimestamp(look.commit_at, UTC).astimezone()
    if look.status not in ("recording", "abandoned"):
        return f"last commit {at:%Y-%m-%d %H:%M:%S}"
    return f"last commit {format_duration(look.commit_age)} ago, at {at:%H:%M:%S}"
