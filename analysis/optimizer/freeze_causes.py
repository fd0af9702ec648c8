"""Intended updates, and the causes of tokens that do not move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.moments import steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import DIMS, Array, in_turn, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, dataset, field, flag_attributes
from trajstore.analysis.scan.rows import changed_vectors, lattice_attributes, moved_vectors, tiles
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.values.native_types import cast, spacing, unsigned_view
from trajstore.values.norms import result_dtype
from trajstore.values.optimizer_rule import OptimizerRule, next_weights

CAUSES: tuple[str, ...] = (
    "moved",
    "no_gradient",
    "lost_update",
    "learning_rate",
    "skipped",
    "unexplained",
    "below_cell",
)
"""In the order of their flag values."""

_EVIDENCE = np.dtype(
    [
        (name, bool)
        for name in ("unchanged", "cell_unchanged", "no_gradient", "back", "stepped", "force")
    ]
)
"""Evidence per token; ``stepped`` and ``force`` are evidence of all tokens in a chunk's row."""

_CHECKED_TOGETHER = 1 << 14
"""Elements per check, which ends when one element is found."""


def _second_moment(scan: Scan, rule: OptimizerRule) -> da.Array:
    """The second moment under the root of the divisor."""
    moment = scan.aligned("W", "exp_avg_sq")
    if not rule.amsgrad:
        return moment
    if scan.steps[0] != 0 or (np.diff(scan.steps) != 1).any():
        raise InvalidArgument(
            f"got steps {scan.steps[0]} to {scan.steps[-1]} with gaps or without the beginning, "
            "expected all steps from 0: amsgrad divides by the largest second moment so far; use "
            "the whole run, recorded with every=1"
        )
    return da.reductions.cumreduction(
        np.maximum.accumulate, np.maximum, -np.inf, moment, axis=0, dtype=moment.dtype
    )


def _learning_rates(scan: Scan) -> npt.NDArray[np.float64]:
    input_checks.require_variables(scan.ds, "lr")
    return np.asarray(scan.ds["lr"].values, np.float64)


def _follows(scan: Scan) -> npt.NDArray[np.bool_]:
    """True for each row that is one optimizer step after the previous row."""
    return np.asarray(np.diff(scan.steps, prepend=scan.steps[:1] - 1) == 1)


def _earlier(block: Array, boundary: Array, part: slice) -> Array:
    return np.concatenate([boundary[:, part], block[:-1, part]])


def _update_kernel(
    block: Array,
    boundary: Array,
    exp_avg: Array,
    second: Array,
    lr: Array,
    step: Array,
    follows: Array,
    numbers: npt.NDArray[np.void],
    rule: OptimizerRule,
    native: str,
    in_ulp: bool,
) -> Array:
    rows, tokens, hidden = block.shape
    rule = rule.at(numbers)
    result = np.empty((rows, tokens, hidden), result_dtype(block.dtype))
    for part in tiles(rows, tokens, hidden):
        W = _earlier(block, boundary, part)
        change = rule.change(W, exp_avg[:, part], second[:, part], lr, step, native)
        if in_ulp:
            change = change / spacing(W, native).astype(np.float64)
        result[:, part] = change
    uses_W = in_ulp or ((numbers["weight_decay"] != 0) & rule.decoupled)
    result[(~follows & uses_W)[:, 0, 0]] = np.nan  # the W before the step was not recorded
    return result


@quantity()
def adam_update(scan: Scan, optimizer: Mapping[str, Any] | None = None) -> xr.Dataset:
    """Update that Adam or AdamW computed at each step, before rounding into W.

    The update includes ε, bias correction and decoupled weight decay in the optimizer's order, with
    intermediate results rounded to the native type as in the optimizer. W_{t−1} + update, rounded
    once, equals the recorded W_t. `RoundedAdamW`, whose state has its own type, does not round
    intermediate results. Then the equality holds if the state is float32 or wider. With a narrower
    state, or a fused kernel, the recorded moments are rounded, so the update is approximate.
    With stochastic rounding, W_t is one of the two neighbors of W_{t−1} + update.

    Parameters
    ----------
    ds : Dataset
        With ``W``, ``exp_avg``, ``exp_avg_sq`` and ``lr``.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.

    Returns
    -------
    Dataset, (step, token, hidden), one row fewer than `ds`
        ``adam_update``, float32; ``adam_update_ulp``, the update in spacings of W_{t−1}. An update
        below one half is lost. If the step before a row was not recorded, ``adam_update_ulp`` is
        NaN, and ``adam_update`` is, too, with decoupled weight decay.

    Raises
    ------
    VariableNotRecorded
        If the moments, the learning rate or the optimizer are not recorded.
    InvalidArgument
        For an unsupported optimizer, or amsgrad with missing rows; and for a run with skipped steps
        whose first rows are missing, because skipped steps affect the bias correction.

    Examples
    --------
    >>> wanted = abs(adam_update(ds).adam_update_ulp).sel(token=ord("z")).max("hidden")
    >>> wanted.sel(step=[16, 18]).values.round(2)  # below one half: unchanged
    array([0.63, 0.37], dtype=float32)
    """
    input_checks.require_variables(scan.ds, "W", "exp_avg", "exp_avg_sq", "lr")
    scan.require_rows(1, "adam_update")
    rule, numbers = input_checks.adam_rule(scan.ds, optimizer)
    points = scan.rows_of("W")

    def update(in_ulp: bool) -> da.Array:
        return measure(
            _update_kernel,
            points,
            scan.aligned("W", "exp_avg"),
            _second_moment(scan, rule),
            _learning_rates(scan),
            steps_taken(scan, "adam_update"),
            _follows(scan),
            numbers,
            dims=DIMS,
            rule=rule,
            native=points.type,
            in_ulp=in_ulp,
            dtype=result_dtype(points.blocks.dtype),
        )[1:]

    dims = ("step", "token", "hidden")
    change = ResultVariable("f8", "update before rounding", scan.units)
    hop = ResultVariable(
        "f8", "update before rounding, in spacings of W", f"{points.type} spacings"
    )
    variables = {
        "adam_update": (dims, update(in_ulp=False), change),
        "adam_update_ulp": (dims, update(in_ulp=True), hop),
    }
    return dataset(variables, scan.coords("W", dims, slice(1, None)))


def _unchanged(before: Array, after: Array) -> npt.NDArray[np.bool_]:
    """True for vectors with equal bits, where −0.0 and +0.0 are equal."""
    return ~moved_vectors(before, after, changed_vectors(before, after))


def _rows_in_which(
    holds: Callable[..., npt.NDArray[np.bool_]], *blocks: Array
) -> npt.NDArray[np.bool_]:
    """Rows in which a condition holds for any token, (row, 1); stops at the first match."""
    rows, tokens, hidden = blocks[0].shape
    matches = np.zeros(rows, bool)
    for part in tiles(rows, tokens, hidden, most=_CHECKED_TOGETHER):
        left = np.nonzero(~matches)[0]
        if not left.size:
            break
        matches[left] = holds(*(block[left, part] for block in blocks)).any((1, 2))
    return matches[:, None]


def _not_zero(values: Array) -> npt.NDArray[np.bool_]:
    return np.asarray(values != 0)  # NaN is not 0


def _differ(later: Array, earlier: Array) -> npt.NDArray[np.bool_]:
    return np.asarray(unsigned_view(later) != unsigned_view(earlier))


def _rows_that_differ(block: Array, boundary: Array) -> npt.NDArray[np.bool_]:
    """Rows that differ from the previous row in any bit, (row, 1)."""
    return np.concatenate(
        [
            _rows_in_which(_differ, block[:1], boundary),
            _rows_in_which(_differ, block[1:], block[:-1]),
        ]
    )


def _evidence_kernel(
    block: Array,
    boundary: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_boundary: Array,
    exp_avg_sq: Array,
    exp_avg_sq_boundary: Array,
    second: Array,
    lr: Array,
    step: Array,
    numbers: npt.NDArray[np.void],
    rule: OptimizerRule,
    native: str,
    chosen: str,
) -> npt.NDArray[np.void]:
    rows, tokens, hidden = block.shape
    result = np.zeros((rows, tokens), _EVIDENCE)
    result["force"] = _rows_in_which(_not_zero, grad)
    result["stepped"] = _rows_that_differ(exp_avg, exp_avg_boundary) | _rows_that_differ(
        exp_avg_sq, exp_avg_sq_boundary
    )
    for part in tiles(rows, tokens, hidden):
        out = result[:, part]
        W = _earlier(block, boundary, part)
        later = np.ascontiguousarray(block[:, part])
        unchanged = _unchanged(W, later)
        out["unchanged"] = unchanged
        out["cell_unchanged"] = (
            unchanged if chosen == native else _unchanged(cast(W, chosen), cast(later, chosen))
        )
        # Other evidence is needed only for unchanged tokens.
        at = np.nonzero(unchanged)
        weights, first = W[at], exp_avg[:, part][at]
        forces = [grad[:, part][at], first, exp_avg_sq[:, part][at]]
        out["no_gradient"][at] = ~np.any([_not_zero(each).any(-1) for each in forces], axis=0)
        numbers_of_step, rate, count = (values[at[0], 0] for values in (numbers, lr, step))
        change = rule.at(numbers_of_step).change(
            weights, first, second[:, part][at], rate, count, native
        )
        out["back"][at] = (next_weights(weights, change, native) == weights).all(-1)
    return result


def _decide(evidence: npt.NDArray[np.void], *of_rows: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Cause per (step, token): the first one that applies."""
    stepped, force, lr, follows = (values[..., 0] for values in of_rows)
    shape = evidence.shape
    rules = {
        "moved": ~evidence["cell_unchanged"],
        "below_cell": ~evidence["unchanged"],
        "no_gradient": evidence["no_gradient"],
        "learning_rate": np.broadcast_to(lr == 0, shape),
        "skipped": np.broadcast_to((~stepped & force) | np.isnan(lr), shape),
        "lost_update": evidence["back"] & follows,
    }
    cause = np.select(
        list(rules.values()), [CAUSES.index(name) for name in rules], CAUSES.index("unexplained")
    )
    return cause.astype(np.int8)


@quantity()
def freeze_cause(
    scan: Scan, optimizer: Mapping[str, Any] | None = None, lattice: str = "native"
) -> xr.DataArray:
    """Cause for each token that did not move, at each step.

    - ``moved``: the token moved
    - ``below_cell``: W moved, but stayed in its cells of another `lattice` than the native one
    - ``no_gradient``: the gradient and both moments of the token are exactly zero
    - ``learning_rate``: the learning rate is 0
    - ``skipped``: no optimizer step was taken, because the learning rate is NaN, or no moment of
      any token changed despite gradients
    - ``lost_update``: W + update rounds to W in every element
    - ``unexplained``: none of these: the previous step was not recorded, or other code changed W

    The first of these that applies is the cause.

    Parameters
    ----------
    ds : Dataset
        With ``W``, ``grad``, ``exp_avg``, ``exp_avg_sq`` and ``lr``.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type to decide if the token moved. All other causes use the unrounded W.

    Returns
    -------
    DataArray, int8 (step, token)
        With CF ``flag_values`` and ``flag_meanings``. One row fewer than `ds`.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        As for `adam_update`; also for an unknown lattice, or if W holds values that its
        ``native_dtype`` does not.

    Examples
    --------
    >>> cause = freeze_cause(ds)
    >>> lost_update = cause == cause.attrs["flag_meanings"].split().index("lost_update")
    >>> lost_update.sum("token").sel(step=[12, 15, 18]).values
    array([  0,  10, 128])
    """
    input_checks.require_variables(scan.ds, "W", "grad", "exp_avg", "exp_avg_sq", "lr")
    scan.require_rows(1, "freeze_cause")
    rule, numbers = input_checks.adam_rule(scan.ds, optimizer)
    lr = _learning_rates(scan)
    W = scan.points()
    evidence = in_turn(
        functools.partial(
            measure,
            _evidence_kernel,
            dims=("step", "token"),
            rule=rule,
            native=W.type,
            chosen=scan.lattice_type(lattice),
            dtype=_EVIDENCE,
        ),
        W,
        scan.aligned("W", "grad"),
        scan.rows_of("exp_avg", like="W"),
        scan.rows_of("exp_avg_sq", like="W"),
        _second_moment(scan, rule),
        lr,
        steps_taken(scan, "freeze_cause"),
        numbers,
    )
    anywhere = (
        field(evidence, name).any(axis=1, keepdims=True)[..., None] for name in ("stepped", "force")
    )
    cause = measure(
        _decide, evidence, *anywhere, lr, _follows(scan), dims=("step", "token"), dtype=np.int8
    )
    return (
        scan.wrap(cause[1:], "W", rows=slice(1, None))
        .rename("freeze_cause")
        .assign_attrs(
            long_name="cause of no motion",
            **flag_attributes(CAUSES, np.int8),
            **lattice_attributes(lattice),
        )
    )
