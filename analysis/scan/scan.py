"""A Dataset prepared for scans: blocks of rows, and the last row of the block before each.

`Scan` is what the functions of this package share when they are asked together: each of its
dask nodes is made once, so each chunk is read once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import field, over_hidden, rows_before, shared
from trajstore.analysis.scan.consecutive_rows import measure_pairs, measure_rows, pair_dtype
from trajstore.analysis.scan.input_checks import (
    check_every_step,
    check_single_run,
    hold_only_changes,
    with_own_attributes,
)
from trajstore.analysis.scan.lattice_points import Points, chosen_type, place_on_lattice
from trajstore.analysis.scan.population_statistics import with_mostly_dead
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.populations.masks import check_dataset
from trajstore.values.token_norms import result_dtype

__all__ = ["Scan", "native_dtype"]

Array = npt.NDArray[Any]
T = TypeVar("T", bound=xr.DataArray | xr.Dataset)

_DIMS = ("step", "token", "hidden")
_BLOCK_BYTES = 32 << 20


def native_dtype(array: xr.DataArray) -> str:
    """Name of the type in which the trainer held these values.

    The attribute ``native_dtype``; without it, the type of the array itself.
    """
    return str(array.attrs.get("native_dtype", array.dtype.name))


def _apply_between_rows(
    block: Array, boundary: Array, kernel: Callable[[Array, Array], Array]
) -> Array:
    return np.concatenate([kernel(block[:1], boundary), kernel(block[1:], block[:-1])])


def _apply_to_changes(block: Array, kernel: Callable[[Array, Array], Array]) -> Array:
    return kernel(block, np.zeros_like(block))


def _has_moved(block: Array) -> npt.NDArray[np.bool_]:
    """Whether each vector of changes is other than zero; a NaN is."""
    return np.asarray((block != 0).any(-1))


def _rows_of_a_block(array: xr.DataArray) -> int:
    """Rows that are read together from an array that dask has not chunked yet."""
    stored = array.encoding.get("preferred_chunks", {}).get("step")
    row = array.dtype.itemsize * array.sizes["token"] * array.sizes["hidden"]
    return int(stored or max(1, _BLOCK_BYTES // max(1, row)))


class Scan:
    """One Dataset, seen as blocks of rows.

    Parameters
    ----------
    ds : Dataset
        With dimensions step, token and hidden, in any order, chunked or not.
    measures : mapping of str to sequence of str
        By lattice, of `MEASURES`: what is measured together, in one
        pass. A measure that is not among them has a pass of its own.
    window : ndarray of int, (step,), optional
        Recorded steps, increasing, that results are wanted of; by default all.

    Attributes
    ----------
    window : ndarray of int64, (step,)
        Steps that are shown. Facts about them come from all of `steps`.

    Raises
    ------
    InvalidArgument
        If it is no Dataset, or steps do not increase.
    """

    def __init__(
        self,
        ds: xr.Dataset,
        measures: Mapping[str, Sequence[str]] | None = None,
        window: npt.NDArray[np.int64] | None = None,
    ) -> None:
        check_dataset(ds)
        check_single_run(ds)
        self.ds = ds = with_mostly_dead(with_own_attributes(ds))
        input_checks.variables(ds, "step")
        if ds["step"].dims != ("step",):
            raise InvalidArgument(
                "the Dataset has no dimension step; select rows with a list or a slice, such as "
                "ds.isel(step=[0])"
            )
        self.steps: npt.NDArray[np.int64] = ds["step"].values.astype(np.int64)
        if (np.diff(self.steps) <= 0).any():
            raise InvalidArgument(
                "the steps of this Dataset do not increase; sort it by step, and keep each once"
            )
        self.window = self.steps if window is None else window
        self._measured_together: dict[str, tuple[str, ...]] = {}
        for lattice, asked in (measures or {}).items():
            known = self._measured_together.get(self._own_name(lattice), ())
            self._measured_together[self._own_name(lattice)] = tuple(
                dict.fromkeys((*known, *asked))
            )
        self._blocks: dict[str, da.Array] = {}
        self._boundaries: dict[tuple[str, str], da.Array] = {}
        self._points: dict[str, Points] = {}
        self._measured: dict[tuple[str, tuple[str, ...]], tuple[str, da.Array]] = {}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.steps.size)

    @property
    def has_window(self) -> bool:
        """Whether only some of the steps are shown."""
        return self.window.size < self.steps.size

    def without_window(self) -> Scan:
        """The same scan of the same blocks, all of whose steps are shown."""
        whole = copy.copy(self)
        whole.window = self.steps
        return whole

    def of_window(self) -> Scan:
        """A scan of the rows of the window, as if there were no others."""
        return Scan(self.in_window(self.ds), self._measured_together)

    def in_window(self, result: T) -> T:
        """The part of a result that the window shows; all of it, if it has no steps."""
        if not self.has_window or "step" not in result.dims:
            return result
        rows = np.flatnonzero(np.isin(result["step"].values, self.window))
        # A slice, where it is one, for dask takes that as it is.
        whole = rows.size and rows.size == rows[-1] - rows[0] + 1
        step = slice(int(rows[0]), int(rows[-1]) + 1) if whole else rows
        return cast(T, result.isel(step=step))

    def require_rows(self, least: int, question: str) -> None:
        """Check that there are enough rows for a question.

        Raises
        ------
        InvalidArgument
            If there are fewer.
        """
        if self.rows < least:
            raise InvalidArgument(
                f"{question} needs at least {least} row{'s' * (least > 1)}, and there "
                f"{'is' if self.rows == 1 else 'are'} {self.rows}"
            )

    def variable(self, name: str) -> xr.DataArray:
        """Matrix of that name, dimensions in order, lazily chunked.

        Raises
        ------
        VariableNotRecorded
            If there is none.
        InvalidArgument
            If its dimensions are others.
        """
        input_checks.variables(self.ds, name)
        array = self.ds[name]
        if set(array.dims) != set(_DIMS):
            raise InvalidArgument(
                f"{name} has dimensions {', '.join(map(str, array.dims))}, "
                f"expected {', '.join(_DIMS)}"
            )
        return array.transpose(*_DIMS)

    def blocks(self, name: str) -> da.Array:
        """Blocks of a matrix, (step, token, hidden), hidden whole."""
        if name not in self._blocks:
            array = self.variable(name)
            if array.chunks is None:
                array = array.chunk({"step": _rows_of_a_block(array), "token": -1, "hidden": -1})
            data = array.data.rechunk({2: -1})
            self._blocks[name] = data
        return self._blocks[name]

    def aligned(self, like: str, name: str) -> da.Array:
        """Blocks of a matrix, chunked as another."""
        return self.blocks(name).rechunk(self.blocks(like).chunks)

    def boundaries(self, name: str, like: str | None = None) -> da.Array:
        """Row before each block, (1 per block, token, hidden).

        Before the first block that is its own first row, so that nothing moves in row 0, which
        the results leave out.
        """
        key = name, like or name
        if key not in self._boundaries:
            self._boundaries[key] = rows_before(self.aligned(like or name, name))
        return self._boundaries[key]

    def points(self, lattice: str = "native") -> Points:
        """W, rounded to a lattice of `trajstore.schema.LATTICES`.

        On the lattice of bfloat16, the recorded ``cells`` take the place of a W that is not there.
        As blocks are computed, their values are compared with their ``native_dtype``.

        Raises
        ------
        VariableNotRecorded
            If there is neither.
        InvalidArgument
            For another lattice; when computed, if a value is not of the native type.
        """
        lattice = self._own_name(lattice)
        if lattice not in self._points:
            chosen = self.lattice_type(lattice)
            name = "cells" if chosen and "W" not in self.ds else "W"
            native = native_dtype(self.variable(name))
            blocks = place_on_lattice(self.blocks(name), name, native, chosen)
            self._points[lattice] = Points(
                variable=name, type=chosen, blocks=blocks, boundaries=rows_before(blocks)
            )
        return self._points[lattice]

    def recorded(self) -> Points:
        """W as it is stored, whatever its type; without it, the recorded changes.

        Raises
        ------
        VariableNotRecorded
            If there is neither.
        InvalidArgument
            If the changes are not the ways between rows, as some step has none.
        """
        if hold_only_changes(self.ds):
            check_every_step(self.steps)
            return Points(
                variable="delta",
                type=native_dtype(self.variable("delta")),
                blocks=self.blocks("delta"),
                boundaries=self.boundaries("delta"),
                are_changes=True,
            )
        return Points(
            variable="W",
            type=native_dtype(self.variable("W")),
            blocks=self.blocks("W"),
            boundaries=self.boundaries("W"),
        )

    def lattice_type(self, lattice: str) -> str:
        """Type whose values are the points of a lattice; '' where there is nothing to be on it.

        Raises
        ------
        InvalidArgument
            For another lattice.
        VariableNotRecorded
            If there are only ``cells``, and they are of another one.
        """
        if "W" in self.ds:
            return chosen_type(lattice, native_dtype(self.ds["W"]))
        chosen = chosen_type(lattice, "bfloat16")
        if "cells" not in self.ds:
            return ""
        if lattice == chosen == "bfloat16":
            return chosen
        raise VariableNotRecorded(
            f"W on the lattice {lattice!r} needs W, and this run holds only its cells of bfloat16; "
            "ask with lattice='bfloat16'"
        )

    def _own_name(self, lattice: str) -> str:
        """That lattice, under one name: where it is the native one, 'native'."""
        if "W" in self.ds and lattice == native_dtype(self.ds["W"]):
            return "native"
        return lattice

    def pair(self, measure: str, lattice: str = "native") -> xr.DataArray:
        """Measure of the way between rows.

        Parameters
        ----------
        measure : str
            Of `trajstore.analysis.scan.consecutive_rows.MEASURES`.
        lattice : str
            To which W is rounded first.

        Returns
        -------
        DataArray, (step, token)
            One row fewer than the Dataset; each has the step of the later row.
        """
        self.require_rows(1, "a question about motion")
        lattice = self._own_name(lattice)
        measures = self._measured_together.get(lattice, ())
        measures = measures if measure in measures else (measure,)
        if (lattice, measures) not in self._measured:
            points = self.recorded() if measures == ("step_norm",) else self.points(lattice)
            measured = over_hidden(
                measure_pairs,
                points.blocks,
                points.boundaries,
                measures=measures,
                native=points.type,
                dtype=pair_dtype(measures, points.blocks.dtype),
            )
            self._measured[lattice, measures] = points.variable, measured[1:]
        variable, measured = self._measured[lattice, measures]
        return self.wrap(field(measured, measure), variable, rows=slice(1, None))

    def wrap(
        self,
        data: da.Array,
        like: str,
        *,
        rows: slice | npt.NDArray[np.int64] = slice(None),
        dims: Iterable[str] = _DIMS[:2],
    ) -> xr.DataArray:
        """DataArray with the coordinates of a variable that belong to `dims`."""
        dims = tuple(dims)
        kept = self.variable(like).isel(step=rows)
        coords = {
            name: coordinate
            for name, coordinate in kept.coords.items()
            if set(coordinate.dims) <= set(dims)
        }
        return xr.DataArray(data, dims=dims, coords=coords)

    @property
    def units(self) -> str:
        """Units of W."""
        held = next((name for name in ("W", "delta") if name in self.ds), None)
        return "1" if held is None else str(self.ds[held].attrs.get("units", "1"))

    @property
    def _every_row(self) -> bool:
        """Whether the row before each row here is the row before it in the run."""
        rows = self.ds.attrs.get("committed_rows")
        return bool((np.diff(self.steps) == 1).all()) or self.rows == rows

    def _stored(self, name: str) -> xr.DataArray | None:
        """Stored summary of the way between rows; None if there is none that holds here."""
        if name not in self.ds or not self._every_row:
            return None
        return self.ds[name].transpose("step", "token").isel(step=slice(1, None)).drop_attrs()

    def step_norm(self) -> xr.DataArray:
        """Length of the way between rows, float32 (step, token)."""
        stored = self._stored("W_step_norm")
        if stored is None and hold_only_changes(self.ds):
            dtype = result_dtype(self.blocks("delta").dtype)
            return self._of_changes(measure_rows, dtype)
        return self.pair("step_norm") if stored is None else stored

    def _of_changes(self, kernel: Callable[[Array], Array], dtype: npt.DTypeLike) -> xr.DataArray:
        """Measure of each recorded change, but of that which led to the first row."""
        self.require_rows(1, "a question about motion")
        points = self.recorded()
        measured = over_hidden(kernel, points.blocks, dtype=dtype)
        return self.wrap(measured[1:], points.variable, rows=slice(1, None))

    def ulp_l1(self, lattice: str = "native") -> xr.DataArray:
        """Lattice spacings of the way between rows, float32 (step, token)."""
        stored = self._stored_hops(lattice)
        return self.pair("ulp_1", lattice) if stored is None else stored

    def moved(self, lattice: str = "native") -> xr.DataArray:
        """Whether any bit of a token changed between rows, bool (step, token)."""
        stored = self._stored_hops(lattice)
        if stored is None and lattice == "native" and hold_only_changes(self.ds):
            return self._of_changes(_has_moved, np.bool_)
        # A changed NaN has hops of NaN, which are not 0 either.
        return self.pair("moved", lattice) if stored is None else stored != 0

    def _stored_hops(self, lattice: str) -> xr.DataArray | None:
        """Stored ``W_ulp_l1``, which counts on the native lattice and on no other."""
        own = self._own_name(lattice) == "native"
        stored = self._stored("W_ulp_l1") if own else None
        if stored is None:
            self.lattice_type(lattice)
        return stored

    def spacing(self) -> xr.DataArray:
        """Optimizer steps between rows, float64 (step)."""
        return xr.DataArray(
            np.diff(self.steps).astype(np.float64),
            dims="step",
            coords={"step": self.ds["step"].values[1:]},
        )

    def between_rows(
        self,
        points: Points,
        kernel: Callable[[Array, Array], Array],
        dtype: npt.DTypeLike,
    ) -> xr.DataArray:
        """Elementwise function of every row and the row before it.

        Parameters
        ----------
        points : Points
            Of W.
        kernel : callable
            Of (later, earlier), both (row, token, hidden).
        dtype : dtype
            Of its result.

        Returns
        -------
        DataArray, (step, token, hidden)
            One row fewer than the Dataset.
        """
        self.require_rows(1, "a question about motion")
        apply, arrays = (
            (_apply_to_changes, (points.blocks,))
            if points.are_changes
            else (_apply_between_rows, (points.blocks, points.boundaries))
        )
        data = da.map_blocks(
            apply, *arrays, kernel=kernel, dtype=dtype, meta=np.empty((0, 0, 0), dtype)
        )[1:]
        return self.wrap(data, points.variable, rows=slice(1, None), dims=_DIMS)

    def combine_rows(
        self,
        per_row: xr.DataArray,
        summarise: Callable[..., Array],
        join: Callable[..., Array],
        facts: int,
        **arrays: Array,
    ) -> xr.DataArray:
        """Facts about each token over all rows, from facts about each stretch of rows.

        Parameters
        ----------
        per_row : DataArray, (step, token)
            Of rows 1, 2, …, as `pair` gives it.
        summarise : callable
            From a stretch, (row, token), and the numbers of its rows to int64 (1, fact, token).
        join : callable
            From consecutive stretches, (stretch, fact, token), to (fact, token).
        facts : int
            Number of facts.
        **arrays
            Given to both by name.

        Returns
        -------
        DataArray, int64 (fact, token)
        """
        data = per_row.transpose("step", "token").data
        if per_row.chunks is None:
            data = da.from_array(data, chunks=data.shape)
        by_step, by_token = data.chunks
        numbers = da.from_array(np.arange(1, self.rows)[:, None], chunks=(by_step, 1))
        given = {name: shared(values) for name, values in arrays.items()}
        stretches = data.map_blocks(
            summarise,
            numbers,
            new_axis=1,
            chunks=((1,) * len(by_step), (facts,), by_token),
            dtype=np.int64,
            meta=np.empty((0, 0, 0), np.int64),
            **given,
        )
        joined = stretches.rechunk({0: -1}).map_blocks(
            join, drop_axis=0, dtype=np.int64, meta=np.empty((0, 0), np.int64), **given
        )
        coords = {name: c for name, c in per_row.coords.items() if c.dims == ("token",)}
        return xr.DataArray(joined, dims=("fact", "token"), coords=coords)
