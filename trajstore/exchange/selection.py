"""Selection of steps, tokens and variables of a run, given as strings or numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajstore.arguments import ANY, exact, exact_step
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded, did_you_mean
from trajstore.schema import VARIABLES
from trajstore.store.reading.tiled_reader import TiledRun, positions

if TYPE_CHECKING:
    import xarray as xr  # takes long

Array = npt.NDArray[Any]

Steps = str | int | np.integer[Any] | slice | Iterable[int] | None
"""Steps: a number, a slice of step numbers, several numbers, or a string: ``0:200:10,500``."""

Tokens = str | os.PathLike[str] | Iterable[int] | None
"""Tokens: ``all``, ``dead``, ``live``, ids, or a text file of ids."""

_RANGE = re.compile(r"\s*(\d*)\s*(?::\s*(\d*)\s*(?::\s*(\d*)\s*)?)?")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Part of a run.

    Attributes
    ----------
    run : TiledRun
    rows : ndarray of int, (step,)
        Positions along ``step``, increasing.
    tokens : ndarray of int, (token,), optional
        Positions along ``token``, increasing; None for all.
    variables : tuple of str
        In the order of the schema.
    """

    run: TiledRun
    rows: Array
    tokens: Array | None
    variables: tuple[str, ...]

    @property
    def steps(self) -> Array:
        """Selected steps."""
        steps: Array = self.run.steps[self.rows]
        return steps

    @cached_property
    def coordinates(self) -> dict[str, Array]:
        """Coordinates of the selected tokens."""
        return {
            name: values if self.tokens is None else values[self.tokens]
            for name, values in self.run.coordinates.items()
        }


def select(
    run: TiledRun,
    *,
    steps: Steps = None,
    tokens: Tokens = None,
    variables: str | Iterable[str] | None = None,
) -> Selection:
    """Resolve a selection in a run.

    Parameters
    ----------
    run : TiledRun
    steps : str, int, slice or iterable of int, optional
        Step numbers. A slice, or a string ``start:stop:stride``, selects the recorded steps from
        start up to, but without, stop whose distance from start is a multiple of stride.
    tokens : str, path-like or iterable of int, optional
        ``all``, ``dead``, ``live``, vocabulary ids (also as a string: ``1,2,3``), or a text file of
        ids separated by spaces, commas or line ends.
    variables : str or iterable of str, optional
        Names, also as one string with commas.

    Raises
    ------
    StepNotFound
        If a single step was not recorded.
    VariableNotRecorded
        If the run does not hold a named variable, or `tokens` needs ``is_dead``.
    InvalidArgument
        If a string cannot be parsed, or nothing is selected.
    """
    return Selection(
        run=run,
        rows=_rows(run.steps, steps),
        tokens=_tokens(run.coordinates, tokens),
        variables=_variables(run, variables),
    )


def select_part(ds: xr.Dataset, *, steps: Steps = None, tokens: Tokens = None) -> xr.Dataset:
    """Select a part of an opened run, with the same arguments as `select`.

    Parameters
    ----------
    ds : Dataset
        With coordinates step and token.
    steps, tokens
        As for `select`.

    Raises
    ------
    StepNotFound, VariableNotRecorded, InvalidArgument
        As `select`.
    """
    part: dict[str, Array | slice] = {}
    if steps is not None:
        rows = _rows(ds["step"].values, steps)
        # A slice if possible: dask applies it without an index array.
        whole = len(rows) == rows[-1] - rows[0] + 1
        part["step"] = slice(int(rows[0]), int(rows[-1]) + 1) if whole else rows
    coordinates = {str(name): ds.coords[name].values for name in ("token", "is_dead") if name in ds}
    chosen = _tokens(coordinates, tokens)
    if chosen is not None:
        part["token"] = chosen
    return ds.isel(part)


def _rows(recorded: Array, steps: Steps) -> Array:
    if steps is None:
        return np.arange(len(recorded))
    chosen = np.zeros(len(recorded), bool)
    span = f"steps {recorded[0]} to {recorded[-1]}" if len(recorded) else "no steps"
    if isinstance(steps, str):
        items: list[int | slice] = [_range(item, steps) for item in steps.split(",")]
    elif isinstance(steps, slice):
        items = [steps]
    elif getattr(steps, "ndim", None) == 0 or not isinstance(steps, Iterable):
        items = [exact_step(steps, least=ANY)]
    else:
        items = exact("steps", steps, "int64", least=ANY).tolist()
    for item in items:
        if isinstance(item, slice):
            chosen |= _in_slice(recorded, item)
        else:
            at = int(positions(recorded, np.array([item]))[0])
            if at < 0:
                raise StepNotFound(f"step {item} was not recorded; the run holds {span}")
            chosen[at] = True
    rows = np.flatnonzero(chosen)
    if not len(rows):
        raise InvalidArgument(f"no recorded step is in {steps!r}; the run holds {span}")
    return rows


def _range(item: str, text: str) -> int | slice:
    match = _RANGE.fullmatch(item)
    if not match or not item.strip():
        raise InvalidArgument(
            f"got steps {text!r}, expected numbers and ranges start:stop:stride, such as "
            "0:200:10 or 0,100,500:"
        )
    if ":" not in item:
        return int(match[1])
    return slice(*(int(part) if part else None for part in match.groups()))


def _in_slice(recorded: Array, item: slice) -> Array:
    start, stop, stride = item.start, item.stop, 1 if item.step is None else item.step
    whole = all(
        number is None or isinstance(number, int | np.integer) for number in (start, stop, stride)
    )
    if not whole or stride < 1 or any(bound is not None and bound < 0 for bound in (start, stop)):
        raise InvalidArgument(
            f"got steps {start}:{stop}:{stride}, expected step numbers of at least 0 and a stride "
            "of at least 1"
        )
    if start is None:
        start = int(recorded[0]) if len(recorded) else 0
    chosen: Array = (recorded >= start) & ((recorded - start) % stride == 0)
    return chosen if stop is None else chosen & (recorded < stop)


def _tokens(coordinates: Mapping[str, Array], tokens: Tokens) -> Array | None:
    if tokens is None or (isinstance(tokens, str) and tokens == "all"):
        return None
    if isinstance(tokens, str) and tokens in ("dead", "live"):
        if "is_dead" not in coordinates:
            raise VariableNotRecorded(
                f"got tokens {tokens!r}, but this run does not record which tokens are dead; "
                "select tokens by their ids, or label them with trajstore annotate"
            )
        is_dead = coordinates["is_dead"].astype(bool)
        places = np.flatnonzero(is_dead == (tokens == "dead"))
    else:
        ids = _ids(tokens)
        places = positions(coordinates["token"], ids)
        if (places < 0).any():
            recorded = coordinates["token"]
            span = f", from {recorded.min()} to {recorded.max()}" if len(recorded) else ""
            raise InvalidArgument(
                f"token {ids[places < 0][0]} was not recorded; the run holds {len(recorded)} "
                f"ids{span}"
            )
        places = np.unique(places)
    if not len(places):
        raise InvalidArgument(f"got tokens {tokens!r}, expected at least one token of the run")
    return places


def _ids(tokens: str | os.PathLike[str] | Iterable[int]) -> Array:
    if not isinstance(tokens, str | os.PathLike):
        return exact("tokens", tokens, "int64", least=ANY)
    text = os.fspath(tokens)
    if not re.fullmatch(r"[\d\s,]+", text):
        try:
            text = Path(tokens).read_text("ascii")
        except (OSError, UnicodeDecodeError) as error:
            near = did_you_mean(text, ("all", "dead", "live"))
            raise InvalidArgument(
                f"cannot read tokens {text!r}{near}; give all, dead, live, ids such as 1,2,3, or a "
                "text file of ids"
            ) from error
    words = re.split(r"[\s,]+", text.strip(" \t\r\n,"))
    try:
        return np.array([int(word) for word in words], np.int64)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{os.fspath(tokens)!r} does not hold token ids; separate whole numbers by spaces, "
            "commas or line ends"
        ) from None


def _variables(run: TiledRun, variables: str | Iterable[str] | None) -> tuple[str, ...]:
    if variables is None:
        return tuple(run.series)
    listed = variables.split(",") if isinstance(variables, str) else variables
    names = [name.strip() for name in listed]
    for name in names:
        if name not in (*VARIABLES, *run.series):
            raise InvalidArgument(
                f"there is no variable {name!r}{did_you_mean(name, run.series)}; this run holds "
                f"{', '.join(run.series)}"
            )
        if name not in run.series:
            raise VariableNotRecorded(
                f"{name} was not recorded; this run holds {', '.join(run.series)}"
            )
    if not names:
        raise InvalidArgument("variables is empty; omit it to select all")
    return tuple(name for name in run.series if name in names)
