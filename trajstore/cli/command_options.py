"""Arguments and options that several commands share."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import ENCODINGS, LATTICES, RECORDED, TIERS

if TYPE_CHECKING:
    import xarray as xr


class Choice(click.Choice[str]):
    """A choice of words; the error for a mistyped word suggests the nearest one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Message for a word that is not a choice."""
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + did_you_mean(str(value), self.choices) + "."


RUN = click.argument("run", type=click.Path())
RUNS = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
LATTICE = click.option(
    "--lattice",
    type=Choice(LATTICES),
    default="native",
    help="Round W to this type before the analysis; default: no rounding.",
)
ENCODING = partial(click.option, "--encoding", type=Choice(ENCODINGS))
POPULATIONS = click.option(
    "--population",
    "populations",
    multiple=True,
    metavar="NAME=EXPR|FILE",
    help="Additional population: an expression over token coordinates, such as "
    "'rare=token_count < 10' or 'vowels=token_text in (\"a\", \"e\")', or a file with a mask or "
    "token ids. Repeatable.",
)


def _recordable() -> str:
    """Help of ``--variables``: every recordable variable, by tier."""
    in_each = [n for n in RECORDED if all(n in names for names in TIERS.values()) and n != "W"]
    in_some = {name for names in TIERS.values() for name in names}
    tiers = (
        f"{tier} ({', '.join(name for name in names if name not in in_each)})"
        for tier, names in TIERS.items()
    )
    by_name = [name for name in RECORDED if name not in in_some]
    return (
        f"Tiers or variables, separated by commas. Tiers: {', '.join(tiers)}; each also includes "
        f"{', '.join(in_each)}. By name only: {', '.join(by_name)}; cells can replace W. "
        "Default: recording.variables of the configuration."
    )


_KEYWORDS = {
    "step": "steps",
    "token": "tokens",
    "row": "tokens",
    "population": "population",
    "parameter": "parameters",
    "metric": "metric",
}
"""Keyword of a selection in Python, by the dimension that ``--select`` names."""

_EXAMPLES = {
    "step": "step=0:500 (steps 0 to 499) or step=::10",
    "token": "token=dead, token=1,2,3 or token=FILE",
    "row": "row=0,1,2 (with --parameter)",
    "population": "population=dead",
    "parameter": "parameter=*.c_fc.weight (of layers)",
    "metric": "metric=stable_rank or metric=grad:rms (of layers)",
}


def SELECT(*dims: str, note: str = "") -> Callable[..., Any]:
    """``--select DIM=VALUES``, for the dimensions of which a command takes a part.

    The command receives ``selected``: the values by keyword, ``steps``, ``tokens``, ``population``,
    ``parameters``, ``metric``.
    """

    def parse(ctx: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, str]:
        parts: dict[str, str] = {}
        for text in given:
            dim, equals, values = (part.strip() for part in text.partition("="))
            if dim not in dims:
                raise InvalidArgument(
                    f"got --select {text!r}, which names no dimension of this command"
                    f"{did_you_mean(dim, dims)}; expected DIM=VALUES with {' or '.join(dims)}, "
                    f"such as {_EXAMPLES[dims[0]]}"
                )
            if not equals or not values:
                raise InvalidArgument(
                    f"got --select {text!r} without values; give {_EXAMPLES[dim]}"
                )
            if _KEYWORDS[dim] in parts:
                raise InvalidArgument(f"got --select {dim} twice; give all values in one")
            parts[_KEYWORDS[dim]] = values
        return parts

    examples = ", ".join(_EXAMPLES[dim] for dim in dims)
    return click.option(
        "--select",
        "selected",
        multiple=True,
        metavar="DIM=VALUES",
        callback=parse,
        help=f"Use only a part: {examples}.{f' {note}' if note else ''}"
        + (" Repeatable." if len(dims) > 1 else ""),
    )


RECORD = click.option("--variables", "variables", metavar="matrix,batch,...", help=_recordable())
COMMON_STEPS = click.option(
    "--common-steps",
    is_flag=True,
    help="Use only the steps and variables that all runs have.",
)


def runs_and_names(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Split arguments into runs and the names that follow them, in which a hyphen is an underscore.

    Parameters
    ----------
    words : sequence of str
        The first is a run. The words after it are runs up to the first that is in `known`, or
        that is neither an existing path nor written like one.
    known : collection of str
        Known names.

    Raises
    ------
    InvalidArgument
        If a name is before the runs.
    """
    spelled = [word if (name := word.replace("-", "_")) not in known else name for word in words]
    if spelled[0] in known and not os.path.exists(words[0]) and any(map(_is_path, words[1:])):
        ordered = sorted(words, key=lambda word: not _is_path(word))
        raise InvalidArgument(
            f"got {words[0]} before the run; give the run first: {' '.join(ordered)}"
        )
    runs = 1
    while runs < len(words) and spelled[runs] not in known and _is_path(words[runs]):
        runs += 1
    return [*words[:runs]], spelled[runs:]


def _is_path(word: str) -> bool:
    return os.path.exists(word) or "/" in word or word.endswith(".zarr") or glob.has_magic(word)


def file_stem(given: Sequence[str], runs: Sequence[str]) -> str:
    """Start of the default name of an output file.

    It is the name of the only run, or the common name of the runs of untied weights. Otherwise it
    is ``runs``.

    Parameters
    ----------
    given : sequence of str
        Paths and patterns of the command line.
    runs : sequence of str
        The runs that these mean.
    """
    shares_name = len(given) == 1 and not os.path.exists(given[0]) and not glob.has_magic(given[0])
    names = given if shares_name else runs
    return Path(names[0].rstrip("/")).name.removesuffix(".zarr") if len(names) == 1 else "runs"


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given; the others have the defaults of the function they are for."""
    return {name: value for name, value in options.items() if value is not None}


def given_populations(assignments: Sequence[str]) -> dict[str, Any]:
    """Populations of ``--population``, for `analysis.with_populations`.

    Raises
    ------
    InvalidArgument
        If a value is not NAME=EXPRESSION or NAME=FILE.
    """
    from trajstore.populations import populations_from

    for assignment in assignments:
        if "=" not in assignment:
            raise InvalidArgument(
                f"got the population {assignment!r}, expected NAME=EXPRESSION or NAME=FILE; "
                f"analyze and plot show an existing one alone with --select population={assignment}"
            )
    return populations_from(assignments)


def opened(runs: Sequence[str], *, common_steps: bool = False) -> xr.Dataset:
    """Open one run, or several along ``run``, from paths and patterns."""
    from trajstore.store.reading.open_run import open_run, open_runs
    from trajstore.store.reading.run_info import run_paths

    paths = run_paths(runs)
    if len(paths) == 1:
        return open_run(paths[0])
    return open_runs(paths, join="inner" if common_steps else "exact")
