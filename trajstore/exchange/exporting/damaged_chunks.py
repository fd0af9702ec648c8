"""Damaged inner chunks of a run, exported as NaN. All other values stay, bit for bit."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import FormatError, InvalidArgument, RunLocked
from trajstore.exchange.selection import Selection
from trajstore.schema import STEP
from trajstore.store.reading.tiled_reader import TiledVariable, Where, open_tiled
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import RunPath

Array = npt.NDArray[Any]


class DamagedChunks:
    """A damaged run, opened for a copy with NaN in place of damaged values.

    Parameters
    ----------
    run : path-like, str or RemotePath
        A run that no process is writing to.

    Attributes
    ----------
    run : TiledRun
        Its native bits are those of NaN in inner chunks that cannot be decoded.
    left_out : list of str
        A sentence for each damaged coordinate, which `run` lacks.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or `step` or `token` is damaged.
    RunLocked
        If a process is writing to the run.
    InvalidArgument
        If it is a Dataset, or another program changed the layout of an array.
    """

    def __init__(self, run: RunPath | xr.Dataset) -> None:
        if isinstance(run, xr.Dataset):
            raise InvalidArgument(
                "got a Dataset, whose damaged chunks cannot be found; give the path of the run"
            )
        if is_written_to(run):
            raise RunLocked(f"another process is writing to {run}; wait for it, or end it")
        self.left_out: list[str] = []
        self._path = run
        self._lost: list[tuple[TiledVariable, Where]] = []
        opened = open_tiled(run, on_lost=self._leave_out)
        foreign = [name for name, each in opened.series.items() if not each.chunk]
        if foreign:
            raise InvalidArgument(
                f"{', '.join(foreign)} of {run} has a layout of another program, so damaged chunks "
                "cannot be filled; export without --fill-damaged"
            )
        series = {
            name: replace(each, bits=partial(self._bits, each))
            for name, each in opened.series.items()
        }
        self.run = replace(opened, series=series)

    def _leave_out(self, name: str, error: FormatError) -> None:
        if name == STEP.name:
            raise FormatError(
                f"{error}; steps are integers, which have no NaN, so drop these rows: trajstore "
                f"repair {shlex.quote(str(self._path))}"
            ) from error
        if name == "token":
            raise error
        self.left_out.append(f"the coordinate {name} is damaged, and left out")

    def _bits(self, variable: TiledVariable, where: Where) -> Array:
        """Native bits of a part of a variable."""
        try:
            return variable.bits(where)
        except FormatError:  # of at least one chunk
            pass
        whole = (*where, *(slice(0, length) for length in variable.shape[len(where) :]))
        bits = np.empty([part.stop - part.start for part in whole], variable.native.bits)
        for window in itertools.product(*map(_pieces, whole, variable.chunk)):
            at = tuple(
                slice(part.start - all_of.start, part.stop - all_of.start)
                for part, all_of in zip(window, whole, strict=True)
            )
            try:
                bits[at] = variable.bits(window)
            except FormatError:
                bits[at] = variable.native.nan_bits
                self._lost.append((variable, window))
        return bits

    def notes(self, selection: Selection) -> list[dict[str, Any]]:
        """Entries for the attribute ``notes``: the NaN in a selection that has been read.

        Returns
        -------
        list of dict
            One for each variable and range of rows.
        """
        lost: dict[str, Array] = {}
        for variable, window in self._lost:
            tokens = selection.tokens if "token" in variable.dims else None
            if tokens is None or _within(tokens, window[1]).size:
                rows = lost.get(variable.name, np.empty(0, int))
                lost[variable.name] = np.union1d(rows, _within(selection.rows, window[0]))
        steps = self.run.steps[selection.rows]
        return [
            {
                "note": f"{name} holds NaN in place of damaged values of the exported run",
                "first_step": int(steps[part[0]]),
                "last_step": int(steps[part[-1]]),
                "count": len(part),
            }
            for name, rows in sorted(lost.items())
            for part in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
            if part.size
        ]

    def sentences(self, selection: Selection) -> list[str]:
        """What the copy of a selection lacks."""
        return self.left_out + [
            f"{one['note']} (steps {one['first_step']} to {one['last_step']})"
            for one in self.notes(selection)
        ]


def _pieces(part: slice, length: int) -> list[slice]:
    """Pieces of a range of an axis that lie in one chunk each."""
    edges = range(part.start // length * length, part.stop, length)
    return [slice(max(at, part.start), min(at + length, part.stop)) for at in edges]


def _within(selected: Array, part: slice) -> Array:
    """Indices of the selected positions that are in a range."""
    return np.flatnonzero((selected >= part.start) & (selected < part.stop))
