"""A few numbers of each row: how large the gradients are, and how many tokens stand still."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.values.token_norms import vector_norm

__all__ = ["Measured", "RowMeasures"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What some consecutive rows are like, by population.

    Attributes
    ----------
    rows : range
    gradient : dict of str to ndarray, (row,)
        Mean over the tokens of the L2 norm of their gradients, in nat.
    still : dict of str to ndarray, (row,)
        Share of the tokens whose vector is that of the row before, bit for bit.
    largest : tuple of (int, float), or None
        Position and norm of the token with the largest gradient in the last row.
    """

    rows: range
    gradient: dict[str, Array]
    still: dict[str, Array]
    largest: tuple[int, float] | None


class RowMeasures:
    """What can be measured of a run, and from which of its variables.

    Summaries per token that were recorded are read in place of the matrices that they were made of.

    Parameters
    ----------
    ds : Dataset
        A run, opened without dask.

    Attributes
    ----------
    gradient_of, still_of : str or None
        Variable that the measure is made of; None if the run has none for it.
    row_bytes : int
        Bytes that a row takes in memory as it is read.
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds
        self.gradient_of = _first(ds, "grad_token_norm", "grad")
        self.still_of = _first(ds, "W_ulp_l1", "W_step_norm", "W", "cells")
        names = [name for name in (self.gradient_of, self.still_of) if name is not None]
        self.row_bytes = sum(ds[name].dtype.itemsize * ds[name][0].size for name in names)
        self._tokens = _populations(ds)

    def read(self, rows: range) -> Measured:
        """Measure consecutive rows, a row at a time: memory does not grow with their number.

        Raises
        ------
        FormatError
            If a block is missing or broken, as when the run was just cut.
        """
        gradient: dict[str, list[float]] = {name: [] for name in self._tokens}
        still: dict[str, list[float]] = {name: [] for name in self._tokens}
        norms = None
        for norms in self._norms(rows):
            for name, those in self._tokens.items():
                gradient[name].append(float(norms[those].mean()))
        for stood in self._stood(rows):
            for name, those in self._tokens.items():
                still[name].append(np.nan if stood is None else float(stood[those].mean()))
        return Measured(
            rows=rows,
            gradient={name: np.array(values) for name, values in gradient.items() if values},
            still={name: np.array(values) for name, values in still.items() if values},
            largest=None if norms is None else _largest(norms),
        )

    def _norms(self, rows: range) -> Iterator[Array]:
        if self.gradient_of is None:
            return
        for values in self._blocks(self.gradient_of, rows):
            yield from values if values.ndim == 2 else (vector_norm(row) for row in values)

    def _stood(self, rows: range) -> Iterator[npt.NDArray[np.bool_] | None]:
        """Of each token, whether it stood still; None for row 0, which has no row before it."""
        name = self.still_of
        if name is None:
            return
        if rows.start == 0:
            yield None
        if name not in ("W", "cells"):
            for values in self._blocks(name, range(max(rows.start, 1), rows.stop)):
                yield from values == 0
            return
        before = None
        for values in self._blocks(name, range(max(rows.start - 1, 0), rows.stop)):
            for bits in values.view(f"u{values.dtype.itemsize}"):
                if before is not None:
                    yield (bits == before).all(-1)
                before = bits

    def _blocks(self, name: str, rows: range) -> Iterator[npt.NDArray[np.float32]]:
        """Values of the rows, some at a time: at most `_AT_ONCE` bytes, or a single row."""
        da = self._ds[name]
        some = max(_AT_ONCE // (da.dtype.itemsize * max(da[0].size, 1)), 1)
        for start in range(rows.start, rows.stop, some):
            yield da[start : min(start + some, rows.stop)].values


_AT_ONCE = 16 << 20


def _first(ds: xr.Dataset, *names: str) -> str | None:
    return next((name for name in names if name in ds), None)


def _populations(ds: xr.Dataset) -> dict[str, npt.NDArray[np.intp]]:
    """Positions of the tokens of each population that has any."""
    if "is_dead" not in ds:
        return {"all": np.arange(ds.sizes["token"])}
    dead = ds["is_dead"].values
    found = {"dead": np.flatnonzero(dead), "live": np.flatnonzero(~dead)}
    return {name: those for name, those in found.items() if those.size}


def _largest(norms: Array) -> tuple[int, float] | None:
    if not np.isfinite(norms).any():
        return None
    at = int(np.nanargmax(norms))
    return at, float(norms[at])
