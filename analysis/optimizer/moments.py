"""Adam's moments without rounding of their state, computed from the recorded gradients in float64.

m ← β₁·m + (1 − β₁)·g and v ← β₂·v + (1 − β₂)·g² (Kingma and Ba, arXiv:1412.6980, algorithm 1), of
the gradient g as the optimizer takes it. `follow` is the recurrence on arrays of NumPy, with an
optional compiled loop; `Recurrence` applies it to the blocks of a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import (
    DIMS,
    Array,
    ConsecutiveRows,
    Wide,
    last_row,
    last_rows,
    measure,
    waiting,
)
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import tiles
from trajstore.analysis.scan.scan import Scan, native_dtype
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.schema import variable
from trajstore.threads import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.optimizer_rule import MOMENTS, NUMBERS, OptimizerRule

_LOOP = CompiledLoop("trajstore.analysis.optimizer.moments", "follow_rows")


DECAY_RATES = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}
"""Name of the decay rate β of each moment."""

_TOGETHER = 4096  # elements per batch, so that the previous row stays in the cache


def follow_rows(
    gradient: npt.NDArray[Any],
    gradient_stride: int,
    squared: bool,
    betas: Wide,
    before: Wide,
    taken: npt.NDArray[np.bool_],
    out: Wide,
    out_stride: int,
) -> None:
    """Compute a moving average over several rows: the loop of `follow`, for numba.

    Indices are unsigned, because the compiler does not vectorize loops with indices that may be
    negative and count from the end. Each operation rounds like NumPy's, in the same order. Only the
    sign of a NaN may differ.

    Parameters
    ----------
    gradient : ndarray, 1-D
        Memory of the rows.
    gradient_stride, out_stride : int
        Elements between the starts of consecutive rows.
    squared : bool
        True for the average of the squares.
    betas : ndarray of float64, 1-D
        Decay rate β in the step of each row.
    before : ndarray of float64, 1-D
        The previous row, with the length of all rows.
    taken : ndarray of bool, 1-D
        Rows that update the average.
    out : ndarray of float64, 1-D
        Memory for the result.
    """
    for first in range(0, before.size, _TOGETHER):
        count = np.uint64(min(_TOGETHER, before.size - first))
        for row in range(taken.size):
            target = np.uint64(row * out_stride + first)
            if row == 0:
                start = np.uint64(first)
                for at in range(count):
                    out[target + at] = before[start + at]
            else:
                last = np.uint64((row - 1) * out_stride + first)
                for at in range(count):
                    out[target + at] = out[last + at]
            if not taken[row]:
                continue
            beta = betas[row]
            weight = 1 - beta
            source = np.uint64(row * gradient_stride + first)
            if squared:
                for at in range(count):
                    value = np.float64(gradient[source + at])
                    out[target + at] = out[target + at] * beta + (value * value) * weight
            else:
                for at in range(count):
                    value = np.float64(gradient[source + at])
                    out[target + at] = out[target + at] * beta + value * weight


@np.errstate(all="ignore")  # NaN and infinity are valid results
def follow(
    moment: str,
    betas: Wide,
    before: Array,
    gradient: Array,
    taken: npt.NDArray[np.bool_],
    out: Wide,
    loop: CompiledLoop = _LOOP,
) -> None:
    """Compute a moment over several steps.

    Parameters
    ----------
    moment : str
        One of `MOMENTS`.
    betas : ndarray of float64, (row)
        Its decay rate β in each step.
    before : ndarray, (token, hidden)
        The moment before the first step.
    gradient : ndarray, (row, token, hidden)
        Gradient as the optimizer takes it.
    taken : ndarray of bool, (row)
        False for skipped steps, which leave the moment unchanged.
    out : ndarray of float64, (row, token, hidden)
        Receives the moment after each step.
    loop : CompiledLoop
        Of `follow_rows`.
    """
    known = gradient.dtype in (np.float32, np.float64)  # float types of numba
    if known and loop.is_worth(gradient.size) and rows_in_one_piece(gradient, out):
        done = loop.run(
            memory_of(gradient),
            gradient.strides[0] // gradient.itemsize,
            moment == "exp_avg_sq",
            np.array(betas),  # writeable: numba compiles again for other flags
            np.ascontiguousarray(before, np.float64).ravel(),
            taken,
            memory_of(out),
            out.strides[0] // out.itemsize,
        )
        if done:
            return
    state, change = before.astype(np.float64), np.empty(before.shape)
    for row, (step, beta) in enumerate(zip(taken, betas, strict=True)):
        if step:
            # The result is newly allocated memory; access it as rarely as possible.
            _target(moment, gradient[row], change)
            change *= 1 - beta
            np.multiply(state, beta, out=out[row])
            out[row] += change
        else:
            out[row] = state
        state = out[row]


@np.errstate(all="ignore")
def intended_change(rule: OptimizerRule, moment: str, before: Array, gradient: Array) -> Wide:
    """Intended change of a moment in a step: (1 − β)(g − m), or (1 − β)(g² − v).

    Parameters
    ----------
    rule : OptimizerRule
    moment : str
        One of `MOMENTS`.
    before : ndarray, any shape
        The moment before the step.
    gradient : ndarray, same shape
        Gradient as the optimizer takes it.
    """
    change = np.empty(gradient.shape)
    _target(moment, gradient, change)
    change -= before
    change *= 1 - getattr(rule, DECAY_RATES[moment])
    return change


def _target(moment: str, gradient: Array, out: Wide) -> None:
    """Write the averaged value, g or g², into `out`."""
    np.copyto(out, gradient)
    if moment == "exp_avg_sq":
        out *= out


_COUNT = "step_count"
_TASK_BYTES = 16 << 20
"""Maximum bytes of the float64 result of a task."""

_BATCH = 1 << 16
"""Elements of a row per batch, so that all arrays of a row stay in the cache. With smaller batches,
threads would wait longer for the interpreter's lock than the cache saves."""

_ROUNDED_BATCH = 1 << 17
"""Elements per batch of rounding. Its temporary arrays must stay below 2 MiB: allocation of larger
ones is four times as slow, because their pages return to the system each time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """The gradients of a run as its optimizer used them, step by step.

    Attributes
    ----------
    scan : Scan
    rule : OptimizerRule
    numbers : ndarray of `NUMBERS`, (step)
        Those of each step, for `OptimizerRule.at`.
    gradient : dask Array, (step, token, hidden)
        Input of the moments, in smaller chunks than `grad` if those are large.
    read : dask Array, (step, token, hidden)
        The same, in the chunks of `grad` if the gradient needs no computation. Slices of these
        chunks need no copy.
    taken : ndarray of bool, (step)
        True for rows that are one optimizer step after the previous row: not the first row, and not
        skipped steps.
    """

    scan: Scan
    rule: OptimizerRule
    numbers: npt.NDArray[np.void]
    gradient: da.Array
    read: da.Array
    taken: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, scan: Scan, optimizer: Mapping[str, Any] | None, quantity: str) -> Recurrence:
        """Recurrence of a prepared Dataset.

        Raises
        ------
        VariableNotRecorded, InvalidArgument
            As for `exact_moments`.
        """
        ds = scan.ds
        scan.require_rows(1, quantity)
        rule, numbers = input_checks.adam_rule(ds, optimizer)
        couples = not rule.decoupled and numbers["weight_decay"].any()
        if rule.amsgrad:
            raise InvalidArgument(
                "got a run trained with amsgrad, expected another optimizer: amsgrad divides by "
                "the largest second moment so far"
            )
        input_checks.require_variables(ds, "grad", "clip_coef", *(["W"] if couples else []))
        _require_every_step(scan.steps, quantity)
        taken = _taken(scan)
        clip = np.asarray(ds["clip_coef"].values)
        _require_known_factors(scan, clip, taken, quantity)
        _require_known_numbers(numbers, taken, scan.steps, quantity)
        read = scan.blocks("grad")
        by_step, by_token, by_hidden = read.chunks
        chunks = (by_step, _split(by_token, max(by_step) * sum(by_hidden)), by_hidden)
        gradient = read.rechunk(chunks)
        if couples or rule.maximize or (clip[taken] != 1).any():
            sources: list[Any] = [gradient, clip, numbers]
            if couples:
                W = scan.rows_of("W")
                sources.append(replace(W, blocks=W.blocks.rechunk(chunks)))
            dtype = np.dtype(np.float64) if couples else gradient.dtype
            native = native_dtype(ds["grad"])
            gradient = read = measure(
                _gradient_kernel,
                *sources,
                dims=DIMS,
                rule=rule,
                native=native,
                dtype=dtype,
            )
        return cls(scan=scan, rule=rule, numbers=numbers, gradient=gradient, read=read, taken=taken)

    def recorded(self, name: str) -> da.Array:
        """Blocks of a matrix with the chunks of the gradient."""
        return self.scan.blocks(name).rechunk(self.gradient.chunks)

    def rows_of(self, name: str) -> ConsecutiveRows:
        """Rows of a matrix, and the row before each, with the chunks of the gradient."""
        return replace(self.scan.rows_of(name), blocks=self.recorded(name))

    def betas(self, moment: str) -> npt.NDArray[np.float64]:
        """Decay rate of a moment in the step of each row, (step)."""
        return np.asarray(self.numbers[DECAY_RATES[moment]])

    def exact(self) -> dict[str, da.Array]:
        """Moments after each step without rounding, float64 (step, token, hidden).

        A block is computed from its gradients and the last row of the previous block.
        """
        return {moment: self._followed(moment) for moment in MOMENTS}

    def _followed(self, moment: str) -> da.Array:
        first, chunks, betas = self.first(moment), self.gradient.chunks, self.betas(moment)
        by_step, by_token, by_hidden = self.read.chunks
        parts = _pieces(by_token, max(by_step) * sum(by_hidden))
        # xarray replaces NaN by these zeros in a sum; both moments share them by name. If a sum had
        # to wait for them, all its blocks would stay in memory. So each block depends on them, too.
        zeros = da.zeros_like(da.empty(self.read.shape, chunks=chunks))
        name = f"{moment}-{tokenize(self.read.name, first.name, self.taken, betas)}"
        follow = partial(_follow, moment=moment)
        tasks: dict[Any, Any] = {}
        for number_of_piece, (block, part) in enumerate(parts):
            before = (first.name, 0, number_of_piece, 0)
            start = 0
            for number, length in enumerate(by_step):
                rows = slice(start, start + length)
                start += length
                tasks[name, number, number_of_piece, 0] = (
                    follow,
                    (zeros.name, number, number_of_piece, 0),
                    (self.read.name, number, block, 0),
                    part,
                    before,
                    self.taken[rows],
                    betas[rows],
                )
                if length:
                    before = ("last-" + name, number, number_of_piece, 0)
                    tasks[before] = (last_row, (name, number, number_of_piece, 0))
        graph = HighLevelGraph.from_collections(name, tasks, [self.read, first, zeros])
        return da.Array(graph, name, chunks, meta=np.empty((0, 0, 0)))

    def exact_block(self, moment: str, number: int, before: da.Array) -> da.Array:
        """One block of rows of a moment, from the previous row, (1, token, hidden)."""
        gradient = self.gradient.blocks[number]
        start = sum(self.gradient.chunks[0][:number])
        rows = slice(start, start + len(gradient))
        taken, betas = self.taken[rows], self.betas(moment)[rows]
        return measure(
            _exact_kernel,
            gradient,
            before,
            taken,
            betas,
            dims=DIMS,
            moment=moment,
            dtype=np.float64,
        )

    def in_turn(
        self, compute: Callable[[int, dict[str, da.Array], list[da.Array]], da.Array]
    ) -> list[da.Array]:
        """Results of all blocks of rows, each computed after the previous one.

        Parameters
        ----------
        compute : callable
            Function of the number of a block, its exact moments, and the previous results.
        """
        before = {moment: self.first(moment) for moment in MOMENTS}
        results: list[da.Array] = []
        for number in range(self.gradient.numblocks[0]):
            exact = {
                moment: self.exact_block(moment, number, row) for moment, row in before.items()
            }
            results.append(compute(number, exact, results))
            before = {
                moment: waiting(last_rows(block), results[-1]) for moment, block in exact.items()
            }
        return results

    def first(self, moment: str) -> da.Array:
        """Moment at the first row, (1, token, hidden)."""
        _, by_token, by_hidden = self.gradient.chunks
        count = self.scan.ds[_COUNT].values[0] if _COUNT in self.scan.ds else 0
        if self.scan.steps[0] == 0 == count:
            shape = (1, *self.gradient.shape[1:])
            return da.zeros(shape, chunks=((1,), by_token, by_hidden))
        if moment not in self.scan.ds:
            raise VariableNotRecorded(
                f"the rows start at step {self.scan.steps[0]}, and {moment} is not recorded "
                "there; include all steps from 0, or record it with variables='matrix'"
            )
        return self.recorded(moment)[:1]


def _split(sizes: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Split each size into parts of at most one task, with `elements` per unit of size."""
    most = max(1, _TASK_BYTES // (8 * max(1, elements)))
    return tuple(
        (size + at) // parts
        for size in sizes
        for parts in [max(1, -(-size // most))]
        for at in range(parts)
    )


def _pieces(by_token: tuple[int, ...], elements: int) -> Iterator[tuple[int, slice]]:
    """Chunk, and slice within it, of each part of `_split`."""
    for block, size in enumerate(by_token):
        stops = np.cumsum(_split((size,), elements)).tolist()
        yield from ((block, slice(*ends)) for ends in itertools.pairwise((0, *stops)))


def _taken(scan: Scan) -> npt.NDArray[np.bool_]:
    """True for rows that are one optimizer step after the previous row, if every step is held."""
    taken = np.ones(scan.rows, bool)
    if "skipped" in scan.ds:
        taken = scan.ds["skipped"].values != 1
    if _COUNT in scan.ds:  # it does not count a step without a gradient either
        taken[1:] &= np.diff(scan.ds[_COUNT].values) != 0
    taken[:1] = False
    return taken


def steps_taken(scan: Scan, quantity: str) -> npt.NDArray[np.int64]:
    """Number of optimizer steps up to each row, as used in the bias correction.

    Raises
    ------
    InvalidArgument
        If steps between or before the rows may have been skipped.
    """
    if _COUNT in scan.ds and not np.isnan(counts := scan.ds[_COUNT].values).any():
        return counts.astype(np.int64)
    if "skipped" not in scan.ds:
        return scan.steps
    _require_every_step(scan.steps, quantity)
    if scan.steps[:1].any():
        raise InvalidArgument(
            f"{quantity} requires the number of optimizer steps, but the number of skipped steps "
            f"before step {scan.steps[0]} is unknown; include all steps from 0"
        )
    return np.asarray(np.cumsum(_taken(scan)))


def _require_every_step(steps: npt.NDArray[np.int64], quantity: str) -> None:
    gaps = np.nonzero(np.diff(steps) != 1)[0]
    if gaps.size:
        before, after = steps[gaps[0]], steps[gaps[0] + 1]
        raise InvalidArgument(
            f"{quantity} requires consecutive steps, but step {before} is followed by step "
            f"{after}; record with every=1, or select steps without a gap, such as "
            "ds.sel(step=slice(100, 200))"
        )


def _require_known_factors(
    scan: Scan, clip: Array, taken: npt.NDArray[np.bool_], quantity: str
) -> None:
    from trajstore.store.metadata.zarr_json import (
        unproven_rows,  # it imports zarr, which takes long
    )

    # Without a factor, the gradient is the one that the optimizer got, unless a note says more.
    steps, unproven = scan.steps, unproven_rows(scan.ds.attrs, scan.steps)
    unknown = np.array([row for row in unproven if taken[row] and np.isnan(clip[row])], int)
    if unknown.size:
        raise InvalidArgument(
            f"{quantity} requires the clipping factor, but clip_coef is NaN at step "
            f"{steps[unknown[0]]} ({unknown.size} such steps); record with max_grad_norm=, or "
            "assign the factors: ds.assign(clip_coef=…)"
        )


def _require_known_numbers(
    numbers: npt.NDArray[np.void], taken: npt.NDArray[np.bool_], steps: Array, quantity: str
) -> None:
    for name in NUMBERS.names or ():
        unknown = np.nonzero(taken & np.isnan(numbers[name]))[0]
        if unknown.size:
            raise InvalidArgument(
                f"{quantity} requires {name}, but it is NaN in hyperparameters at step "
                f"{steps[unknown[0]]} ({unknown.size} such steps); pass optimizer=, or select "
                "other steps"
            )


def _gradient_kernel(
    grad: Array,
    clip: Array,
    numbers: npt.NDArray[np.void],
    W: Array | None = None,
    boundary: Array | None = None,
    *,
    rule: OptimizerRule,
    native: str,
) -> Array:
    if (clip == 1).all() and not rule.maximize and W is None:
        return grad
    rows, tokens, hidden = grad.shape
    result = np.empty(grad.shape, grad.dtype if W is None else np.float64)
    for part in tiles(rows, tokens, hidden, _ROUNDED_BATCH):
        before = None
        if W is not None and boundary is not None:
            before = np.concatenate([boundary[:, part], W[:-1, part]])
        taken = rule.gradient(grad[:, part], clip, native)
        if before is not None:
            taken = taken + numbers["weight_decay"] * before.astype(np.float64)
        result[:, part] = taken
    return result


def _exact_kernel(gradient: Array, before: Array, taken: Array, betas: Array, moment: str) -> Array:
    _, tokens, hidden = gradient.shape
    result = np.empty(gradient.shape)
    for part in tiles(1, tokens, hidden, _BATCH):
        follow(
            moment, betas.ravel(), before[0, part], gradient[:, part], taken.ravel(),
            result[:, part],
        )  # fmt: skip
    return result


def _follow(
    zeros: Array,
    gradient: Array,
    part: slice,
    before: Array,
    taken: Array,
    betas: Array,
    *,
    moment: str,
) -> Array:
    """Compute some tokens of a block. `zeros` is only a dependency."""
    return _exact_kernel(gradient[:, part], before, taken, betas, moment)


@quantity()
def exact_moments(scan: Scan, optimizer: Mapping[str, Any] | None = None) -> xr.Dataset:
    """Both moments of Adam or AdamW without rounding of their state.

    Computed in float64 from the recorded gradients: m ← β₁·m + (1 − β₁)·g and
    v ← β₂·v + (1 − β₂)·g². The moments start with 0 at row 0, or with the recorded moments if the
    first row is a later step. Only the gradient is rounded: clipping multiplies it in its own type
    before the optimizer step. `moment_error` compares recorded and exact moments in bounded memory;
    a difference of the arrays may hold all of them.

    Parameters
    ----------
    ds : Dataset
        With ``grad`` and ``clip_coef`` of consecutive steps; with ``W`` for coupled weight decay,
        and with the moments if the first row is not row 0.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.

    Returns
    -------
    Dataset, float64 (step, token, hidden)
        ``exact_exp_avg`` and ``exact_exp_avg_sq``, in the units of the moments. Steps that the
        gradient scaler skipped do not change them.

    Raises
    ------
    VariableNotRecorded
        If the gradient, the clipping factor or the optimizer is not recorded.
    InvalidArgument
        If steps are missing; for an unsupported optimizer, or amsgrad.

    Examples
    --------
    >>> exact = exact_moments(ds).exact_exp_avg_sq
    >>> exact.dtype, exact.dims
    (dtype('float64'), ('step', 'token', 'hidden'))
    """
    recurrence = Recurrence.of(scan, optimizer, "exact_moments")
    return xr.Dataset(
        {
            f"exact_{moment}": scan.wrap(blocks, "grad", dims=DIMS).assign_attrs(
                long_name=f"{variable(moment).long_name}, without rounding",
                units=variable(moment).units,
            )
            for moment, blocks in recurrence.exact().items()
        }
    )
