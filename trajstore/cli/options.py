"""Arguments and options that commands share."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from trajstore.errors import InvalidArgument
from trajstore.nearest_name import did_you_mean
from trajstore.schema import ENCODINGS, LATTICES, RECORDED, TIERS

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "COMMON_STEPS",
    "ENCODING",
    "JSON",
    "LATTICE",
    "POPULATIONS",
    "RECORD",
    "RUN",
    "RUNS",
    "Choice",
    "given_populations",
    "opened",
    "runs_and_names",
]


class Choice(click.Choice[str]):
    """Some words, of which a mistyped one is told the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """What is said of a word that is none of them."""
        said = super().get_invalid_choice_message(value, ctx)
        return said.removesuffix(".") + did_you_mean(str(value), self.choices) + "."


RUN = click.argument("run", type=click.Path())
RUNS = click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path())
JSON = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
LATTICE = click.option(
    "--lattice",
    type=Choice(LATTICES),
    default="native",
    help="Type that W is rounded to before it is looked at; default: none but its own.",
)
ENCODING = partial(click.option, "--encoding", type=Choice(ENCODINGS))
POPULATIONS = click.option(
    "--population",
    "populations",
    multiple=True,
    metavar="NAME=EXPR|FILE",
    help="One more population: an expression over the tokens' coordinates, such as "
    "'rare=token_count < 10', or a file with a mask or ids. Repeatable.",
)


def _recordable() -> str:
    """Every variable that can be asked for, by tier, as the table of the variables has them."""
    in_each = [n for n in RECORDED if all(n in held for held in TIERS.values()) and n != "W"]
    in_some = {name for held in TIERS.values() for name in held}
    tiers = (
        f"{tier} ({', '.join(name for name in held if name not in in_each)})"
        for tier, held in TIERS.items()
    )
    by_name = [name for name in RECORDED if name not in in_some]
    return (
        f"Tiers or variables, with commas between them. Tiers: {', '.join(tiers)}, each with "
        f"{', '.join(in_each)}. By name only: {', '.join(by_name)}; cells also in place of W. "
        "Default: what the configuration says."
    )


RECORD = click.option("--record", "variables", metavar="all,batch,…", help=_recordable())
COMMON_STEPS = click.option(
    "--common-steps",
    is_flag=True,
    help="Of several runs, the steps and variables that all of them have.",
)


def runs_and_names(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Tell runs from names, which come after them.

    Parameters
    ----------
    words : sequence of str
        The first is a run; so are those after it which are no names, and of which there is a file,
        or which are written like one.
    known : collection of str
        Names that there are.
    """
    runs = 1
    while runs < len(words) and words[runs] not in known and _is_path(words[runs]):
        runs += 1
    return [*words[:runs]], [*words[runs:]]


def _is_path(word: str) -> bool:
    return os.path.exists(word) or "/" in word or word.endswith(".zarr") or glob.has_magic(word)


def given_populations(assignments: Sequence[str]) -> dict[str, Any]:
    """Populations of ``--population``, for `analysis.with_populations`.

    Raises
    ------
    InvalidArgument
        For what is none; for a name alone also where to give it.
    """
    from trajstore.populations.files import populations_from

    for one in assignments:
        if "=" not in one:
            raise InvalidArgument(
                f"got the population {one!r}, expected NAME=EXPRESSION or NAME=FILE; to ask about "
                f"one that is there: trajstore analyze RUN QUANTITY --set population={one}"
            )
    return populations_from(assignments)


def opened(runs: Sequence[str], *, common_steps: bool = False) -> xr.Dataset:
    """One run, or several along ``run``: those that are named, or that a pattern matches."""
    from trajstore.store.reading.open_run import open_run
    from trajstore.store.reading.open_runs import open_runs
    from trajstore.store.reading.run_paths import run_paths

    paths = run_paths(runs)
    if len(paths) == 1:
        return open_run(paths[0])
    return open_runs(paths, join="inner" if common_steps else "exact")
