"""A Dataset prepared for scans: blocks of rows, the row before each block, and a window of steps.

Quantities that are computed together share one `Scan`. It creates each dask node once, so each
chunk is read once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import block_tasks, input_checks
from trajstore.analysis.scan.block_tasks import DIMS, Array, ConsecutiveRows, measure
from trajstore.analysis.scan.input_checks import (
    check_every_step,
    check_single_run,
    hold_only_changes,
    with_own_attributes,
)
from trajstore.analysis.scan.result_variables import ResultVariables, field, table, with_mostly_dead
from trajstore.analysis.scan.rows import (
    chosen_type,
    measure_pairs,
    measure_rows,
    on_lattice,
    pair_dtype,
)
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.populations import check_dataset, row_vectors
from trajstore.values.native_types import NATIVE_TYPES, is_within
from trajstore.values.norms import result_dtype

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps


T = TypeVar("T", bound=xr.DataArray | xr.Dataset)

_BLOCK_BYTES = 32 << 20


def native_dtype(array: xr.DataArray) -> str:
    """Name of the type in which the trainer held the values.

    This is the attribute ``native_dtype``, or the type of the array if it is missing.
    """
    return str(array.attrs.get("native_dtype", array.dtype.name))


def _has_moved(block: Array) -> npt.NDArray[np.bool_]:
    """True for each vector of changes that is not zero, including NaN."""
    return np.asarray((block != 0).any(-1))


def _without_empty_chunks(ds: xr.Dataset) -> xr.Dataset:
    """The same, lazily, without chunks of no elements, which dask makes when masks select."""
    kept = {
        name: tuple(tuple(filter(None, sizes)) or (0,) for sizes in array.chunks)
        for name, array in ds.data_vars.items()
        if array.chunks
    }
    changed = {
        name: ds[name].copy(data=ds[name].data.rechunk(chunks))
        for name, chunks in kept.items()
        if chunks != ds[name].chunks
    }
    return ds.assign(changed)


def _rows_of_a_block(array: xr.DataArray) -> int:
    """Rows per block of an array without dask chunks."""
    stored = array.encoding.get("preferred_chunks", {}).get("step")
    row = array.dtype.itemsize * array.sizes["token"] * array.sizes["hidden"]
    return int(stored or max(1, _BLOCK_BYTES // max(1, row)))


class Scan:
    """One Dataset as blocks of rows.

    Parameters
    ----------
    ds : Dataset
        A run with the dimensions step, token and hidden, in any order, chunked or not. Dimensions
        row and column of a parameter are renamed to token and hidden.
    measures : mapping of str to sequence of str
        Names in `MEASURES` by lattice, which are measured together in one pass. Any other measure
        has a separate pass.
    window : ndarray of int, (step,), optional
        Recorded steps, increasing, to return. Default: all.

    Attributes
    ----------
    window : ndarray of int64, (step,)
        Steps to return. Their values are computed from all `steps`.

    Raises
    ------
    InvalidArgument
        If `ds` is not a Dataset of one run, or steps do not increase.
    """

    def __init__(
        self,
        ds: xr.Dataset,
        measures: Mapping[str, Sequence[str]] | None = None,
        window: npt.NDArray[np.int64] | None = None,
    ) -> None:
        check_dataset(ds)
        check_single_run(ds)
        # Dataset.chunk also chunks coordinates, which are small and read often.
        ds = ds.assign_coords({name: c.compute() for name, c in ds.coords.items() if c.chunks})
        ds = _without_empty_chunks(ds)
        self.ds = ds = with_mostly_dead(with_own_attributes(row_vectors(ds)))
        input_checks.require_variables(ds, "step")
        if ds["step"].dims != ("step",):
            raise InvalidArgument(
                "the dimension step is missing; select rows with a list or a slice, such as "
                "ds.isel(step=[0])"
            )
        self.steps: npt.NDArray[np.int64] = ds["step"].values.astype(np.int64)
        if (np.diff(self.steps) <= 0).any():
            raise InvalidArgument(
                "the steps do not increase; sort the Dataset by step, and remove duplicates"
            )
        self.window = self.steps if window is None else window
        self._measured_together: dict[str, tuple[str, ...]] = {}
        for lattice, given in (measures or {}).items():
            known = self._measured_together.get(self._own_name(lattice), ())
            self._measured_together[self._own_name(lattice)] = tuple(
                dict.fromkeys((*known, *given))
            )
        self._blocks: dict[str, da.Array] = {}
        self._measured: dict[tuple[str, tuple[str, ...]], tuple[str, da.Array]] = {}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.steps.size)

    @property
    def has_window(self) -> bool:
        """True if only some steps are returned."""
        return self.window.size < self.steps.size

    def without_window(self) -> Scan:
        """The same scan with all steps returned."""
        whole = copy.copy(self)
        whole.window = self.steps
        return whole

    def of_window(self) -> Scan:
        """A scan of only the rows of the window."""
        return Scan(self.in_window(self.ds), self._measured_together)

    def in_window(self, result: T) -> T:
        """The part of a result in the window; all of it if it has no steps."""
        if not self.has_window or "step" not in result.dims:
            return result
        rows = np.flatnonzero(np.isin(result["step"].values, self.window))
        # dask handles a slice without an index array.
        whole = rows.size and rows.size == rows[-1] - rows[0] + 1
        step = slice(int(rows[0]), int(rows[-1]) + 1) if whole else rows
        return cast(T, result.isel(step=step))

    def require_rows(self, least: int, quantity: str) -> None:
        """Check that the run has enough rows for a quantity.

        Raises
        ------
        InvalidArgument
            If it has fewer.
        """
        if self.rows < least:
            raise InvalidArgument(
                f"{quantity} requires at least {least} row{'s' * (least > 1)}, got {self.rows}"
            )

    def variable(self, name: str) -> xr.DataArray:
        """Matrix with the given name, with ordered dimensions, lazily chunked.

        Raises
        ------
        VariableNotRecorded
            If the run does not hold it.
        InvalidArgument
            If it has other dimensions.
        """
        input_checks.require_variables(self.ds, name)
        array = self.ds[name]
        if set(array.dims) != set(DIMS):
            raise InvalidArgument(
                f"{name} has dimensions {', '.join(map(str, array.dims))}, "
                f"expected {', '.join(DIMS)}"
            )
        return array.transpose(*DIMS)

    def blocks(self, name: str) -> da.Array:
        """Blocks of a matrix, (step, token, hidden), with one chunk along hidden."""
        if name not in self._blocks:
            array = self.variable(name)
            if array.chunks is None:
                array = array.chunk({"step": _rows_of_a_block(array), "token": -1, "hidden": -1})
            data = array.data.rechunk({2: -1})
            self._blocks[name] = data
        return self._blocks[name]

    def aligned(self, like: str, name: str) -> da.Array:
        """Blocks of a matrix, with the chunks of another."""
        return self.blocks(name).rechunk(self.blocks(like).chunks)

    def rows_of(self, name: str, like: str | None = None) -> ConsecutiveRows:
        """Rows of a matrix, and the row before each, with the chunks of itself or another.

        The first row counts as its own previous row, so that nothing moves in row 0. Results leave
        out row 0.
        """
        native = native_dtype(self.variable(name))
        return ConsecutiveRows(variable=name, type=native, blocks=self.aligned(like or name, name))

    def points(self, lattice: str = "native") -> ConsecutiveRows:
        """W, rounded to a lattice of `trajstore.schema.LATTICES`.

        On the lattice of bfloat16, the recorded ``cells`` replace a missing W. The computation
        checks values against their ``native_dtype``.

        Raises
        ------
        VariableNotRecorded
            If the run holds neither.
        InvalidArgument
            For an unknown lattice; when computed, if a value is not of the native type.
        """
        chosen = self.lattice_type(self._own_name(lattice))
        name = "cells" if chosen and "W" not in self.ds else "W"
        native = native_dtype(self.variable(name))
        blocks = place_on_lattice(self.blocks(name), name, native, chosen)
        return ConsecutiveRows(variable=name, type=chosen, blocks=blocks)

    def recorded(self) -> ConsecutiveRows:
        """W as stored, of any type; without W, the recorded changes.

        Raises
        ------
        VariableNotRecorded
            If the run holds neither.
        InvalidArgument
            If the run holds only changes and steps are missing.
        """
        if not hold_only_changes(self.ds):
            return self.rows_of("W")
        check_every_step(self.steps)
        return replace(self.rows_of("delta"), are_changes=True)

    def lattice_type(self, lattice: str) -> str:
        """Type that defines a lattice; empty if the run holds neither W nor ``cells``.

        Raises
        ------
        InvalidArgument
            For an unknown lattice.
        VariableNotRecorded
            If the run holds only ``cells``, and the lattice is not bfloat16.
        """
        if "W" in self.ds:
            return chosen_type(lattice, native_dtype(self.ds["W"]))
        chosen = chosen_type(lattice, "bfloat16")
        if "cells" not in self.ds:
            return ""
        if lattice == chosen == "bfloat16":
            return chosen
        raise VariableNotRecorded(
            f"lattice={lattice!r} requires W, but this run holds only its bfloat16 cells; use "
            "lattice='bfloat16'"
        )

    def _own_name(self, lattice: str) -> str:
        """Canonical name of a lattice: 'native' for the native one."""
        if "W" in self.ds and lattice == native_dtype(self.ds["W"]):
            return "native"
        return lattice

    def pair(self, measure: str, lattice: str = "native") -> xr.DataArray:
        """Measure of the change between rows.

        Parameters
        ----------
        measure : str
            One of `trajstore.analysis.scan.rows.MEASURES`.
        lattice : str
            Round W to this type first.

        Returns
        -------
        DataArray, (step, token)
            One row fewer than the Dataset. Each row has the step of the later row.
        """
        self.require_rows(1, "a quantity of motion")
        lattice = self._own_name(lattice)
        measures = self._measured_together.get(lattice, ())
        measures = measures if measure in measures else (measure,)
        if (lattice, measures) not in self._measured:
            points = self.recorded() if measures == ("step_norm",) else self.points(lattice)
            measured = block_tasks.measure(
                measure_pairs,
                points,
                dims=("step", "token"),
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
        dims: Iterable[str] = DIMS[:2],
    ) -> xr.DataArray:
        """DataArray with those coordinates of a variable that have dimensions in `dims`."""
        dims = tuple(dims)
        return xr.DataArray(data, self.coords(like, dims, rows), dims)

    def coords(
        self, like: str, dims: Sequence[str], rows: slice | npt.NDArray[np.int64] = slice(None)
    ) -> dict[Any, xr.DataArray]:
        """Coordinates of a variable that have only the given dimensions."""
        kept = self.variable(like).isel(step=rows).coords.items()
        return {name: values for name, values in kept if set(values.dims) <= set(dims)}

    def of_tokens(
        self,
        measured: da.Array,
        variables: ResultVariables,
        like: str,
        *,
        rows: slice | npt.NDArray[np.int64] = slice(None),
        dims: Sequence[str] = DIMS[:2],
    ) -> xr.Dataset:
        """Variables of each token, from the results of a kernel.

        Parameters
        ----------
        measured : dask Array of `record_of` the variables, (step, token)
        variables : mapping of str to ResultVariable
        like : str
            Variable with their coordinates.
        rows : slice or ndarray of int
            Its rows that have a result.
        dims : sequence of str
            Dimensions of the result.
        """
        return table(measured, variables, dims, self.coords(like, dims, rows))

    @property
    def units(self) -> str:
        """Units of W."""
        source = next((name for name in ("W", "delta") if name in self.ds), None)
        return "1" if source is None else str(self.ds[source].attrs.get("units", "1"))

    @property
    def _every_row(self) -> bool:
        """True if each row follows its previous row in the run."""
        rows = self.ds.attrs.get("committed_rows")
        return bool((np.diff(self.steps) == 1).all()) or self.rows == rows

    def _stored(self, name: str) -> xr.DataArray | None:
        """Stored summary of the change between rows; None if missing or not valid here."""
        if name not in self.ds or not self._every_row:
            return None
        return self.ds[name].transpose("step", "token").isel(step=slice(1, None)).drop_attrs()

    def step_norm(self) -> xr.DataArray:
        """Length of the displacement between rows, float32 (step, token)."""
        stored = self._stored("W_step_norm")
        if stored is None and hold_only_changes(self.ds):
            dtype = result_dtype(self.blocks("delta").dtype)
            return self._of_changes(measure_rows, dtype)
        return self.pair("step_norm") if stored is None else stored

    def _of_changes(self, kernel: Callable[[Array], Array], dtype: npt.DTypeLike) -> xr.DataArray:
        """Measure of each recorded change, except that of the first row."""
        self.require_rows(1, "a quantity of motion")
        points = self.recorded()
        measured = measure(kernel, points.blocks, dims=("step", "token"), dtype=dtype)
        return self.wrap(measured[1:], points.variable, rows=slice(1, None))

    def ulp_l1(self, lattice: str = "native") -> xr.DataArray:
        """Displacement between rows in lattice spacings, float32 (step, token)."""
        stored = self._stored_hops(lattice)
        return self.pair("ulp_1", lattice) if stored is None else stored

    def moved(self, lattice: str = "native") -> xr.DataArray:
        """True if any bit of a token changed between rows, bool (step, token)."""
        stored = self._stored_hops(lattice)
        if stored is None and lattice == "native" and hold_only_changes(self.ds):
            return self._of_changes(_has_moved, np.bool_)
        # A changed NaN has NaN hops, which are also not 0.
        return self.pair("moved", lattice) if stored is None else stored != 0

    def _stored_hops(self, lattice: str) -> xr.DataArray | None:
        """Stored ``W_ulp_l1``, which is valid only on the native lattice."""
        is_native = self._own_name(lattice) == "native"
        stored = self._stored("W_ulp_l1") if is_native else None
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
        points: ConsecutiveRows,
        kernel: Callable[[Array, Array], Array],
        dtype: npt.DTypeLike,
    ) -> xr.DataArray:
        """Elementwise function of every row and its previous row.

        Parameters
        ----------
        points : ConsecutiveRows
            Values of W.
        kernel : callable
            Function of (later, earlier), both (token, hidden).
        dtype : dtype
            Type of its result.

        Returns
        -------
        DataArray, (step, token, hidden)
            One row fewer than the Dataset.
        """
        self.require_rows(1, "a quantity of motion")
        data = measure(kernel, points, dims=DIMS, dtype=dtype, by_row=True)[1:]
        return self.wrap(data, points.variable, rows=slice(1, None), dims=DIMS)


def rows_of_window(ds: xr.Dataset, steps: Steps) -> xr.Dataset:
    """Rows of a Dataset in a window, as selected by `select_part`."""
    if steps is None:
        return ds
    from trajstore.exchange.selection import select_part  # imports zarr

    return select_part(ds, steps=steps)


def windowed_scan(
    ds: xr.Dataset,
    steps: Steps = None,
    *,
    within: bool = False,
    measures: Mapping[str, Sequence[str]] | None = None,
) -> Scan:
    """Prepare a scan of a run with a window of steps.

    Parameters
    ----------
    ds : Dataset
        The whole run.
    steps : str, int, slice or iterable of int, optional
        The window, as for `select_part`. Default: all steps.
    within : bool
        Use only the rows of the window, as if there were no others. By default the window selects
        from the results of the whole run.
    measures : mapping of str to sequence of str
        As for `Scan`.

    Raises
    ------
    InvalidArgument, StepNotFound
        For `within` without a window, or if a step was not recorded.
    """
    if steps is None:
        if within:
            raise InvalidArgument("got within without steps; add steps, such as 100:200")
        return Scan(ds, measures)
    part = rows_of_window(ds, steps)
    return Scan(part, measures) if within else Scan(ds, measures, part["step"].values)


def place_on_lattice(blocks: da.Array, variable: str, native: str, chosen: str) -> da.Array:
    """Lazy `on_lattice` of blocks; the blocks themselves if no check or rounding is needed."""
    if chosen == native and is_within(blocks.dtype, native):
        return blocks
    dtype = blocks.dtype if chosen == native else NATIVE_TYPES[chosen].stored
    return measure(
        on_lattice,
        blocks,
        dims=DIMS,
        variable=variable,
        native=native,
        chosen=chosen,
        dtype=dtype,
    )
