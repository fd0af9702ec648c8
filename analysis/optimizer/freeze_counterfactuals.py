"""Effect of single changes of the optimizer on frozen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.optimizer.moments import Recurrence, steps_taken
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, along, chunks_of, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, count_by_population, dataset
from trajstore.analysis.scan.rows import chosen_type, moved_elements, tiles
from trajstore.analysis.scan.scan import Scan, native_dtype
from trajstore.arguments import Count
from trajstore.errors import InvalidArgument
from trajstore.populations import POPULATIONS, members
from trajstore.values.native_types import spacing
from trajstore.values.norms import result_dtype, token_norm
from trajstore.values.optimizer_rule import MOMENTS, OptimizerRule, next_weights

COUNTERFACTUALS: tuple[str, ...] = (
    "recorded",
    "exact_moments",
    "peak_lr",
    "live_moments",
    "float32_weights",
)
"""Changes of the optimizer. The first is no change, for comparison."""

OUTCOMES: tuple[str, ...] = ("moving", "rounded_away", "moves", "unknown")
"""In the order of their flag values."""

_KINDS = len(COUNTERFACTUALS)

# State per token that is passed from block to block: rows since its last motion, number of computed
# steps among them, and for each counterfactual whether it moved W, and its largest change.
_UNCHANGED, _TRIED, _MOVED, _MARGIN = 0, 1, slice(2, 2 + _KINDS), slice(2 + _KINDS, 2 + 2 * _KINDS)
_COMPUTED_TOGETHER = 1 << 17
"""Elements per batch. The computation needs several times their memory."""

_NOTHING = np.r_[np.zeros(2 + _KINDS), np.full(_KINDS, np.nan)]


@quantity(only_native=True)
def freeze_attribution(
    scan: Scan,
    optimizer: Mapping[str, Any] | None = None,
    window: Count = 100,
    lattice: str = "native",
) -> xr.Dataset:
    """Part of the optimizer that keeps each frozen token unchanged.

    A token counts as frozen after its last motion, as in `freeze` with ``min_unchanged=1``. The
    first `window` optimizer steps after that motion are computed again, each from the recorded
    state before it, and each with one change. If W + update then rounds to another W in any element
    at any of these steps, the changed part is the cause: the token would not have frozen there.

    - ``recorded``: no change, for comparison
    - ``exact_moments``: both moments without rounding, as `exact_moments` computes them
    - ``peak_lr``: the largest learning rate of all steps
    - ``live_moments``: the moments of the live token whose gradient has the median norm of all live
      tokens at each step (the lower median for an even number)
    - ``float32_weights``: W in float32, and the update computed in float32

    Parameters
    ----------
    ds : Dataset
        With ``W``, ``grad``, ``clip_coef``, ``exp_avg``, ``exp_avg_sq`` and ``lr`` of consecutive
        steps; with ``is_dead`` for `live_moments`.
    optimizer : mapping, optional
        ``class`` and ``hyperparameters``. Default: the attribute ``optimizer`` of the run.
    window : int
        Maximum optimizer steps after the last motion to compute.
    lattice : 'native'
        No other value is accepted, because each change acts on the rounding of W itself.

    Returns
    -------
    Dataset
        ``attribution``, int8 (counterfactual, token), with CF ``flag_values`` and
        ``flag_meanings``: ``moving``, the token moved at the last row; ``rounded_away``, the token
        would have frozen anyway; ``moves``, it would have moved; ``unknown``, the inputs are
        missing (no live token, only skipped steps, NaN, or float64 weights for
        `float32_weights`). ``attribution_margin``, float64 (counterfactual, token): the largest
        ``|update|``/spacing(W) of all elements and steps that were computed, in spacings of the
        native type, or of float32 for `float32_weights`. W moves if it is at least one half, or one
        quarter for a step down from a power of two. ``attribution_steps``, int64 (token): the
        number of steps that were computed. ``attribution_counts``, int64 (counterfactual,
        population, outcome_name): the number of tokens.

    Raises
    ------
    VariableNotRecorded
        If a variable or the optimizer is not recorded.
    InvalidArgument
        If steps are missing; for an unsupported optimizer, or amsgrad; if `window` is below 1; for
        another lattice than that of W; and for a run with skipped steps whose first rows are
        missing, because skipped steps affect the bias correction.

    Examples
    --------
    >>> counts = freeze_attribution(ds).attribution_counts.sel(outcome_name="moves")
    >>> counts.sel(population="dead").to_series()[["recorded", "exact_moments"]].to_dict()
    {'recorded': 0, 'exact_moments': 118}
    """
    _check_lattice(scan, lattice)
    input_checks.require_variables(scan.ds, "W", "grad", "clip_coef", *MOMENTS, "lr")
    recurrence = Recurrence.of(scan, optimizer, "freeze_attribution")
    states = _states_of_tokens(recurrence, window)[0]
    attribution = measure(
        _outcome_kernel,
        along(states, "token", "number"),
        dims=("token", "counterfactual"),
        dtype=np.int8,
        sizes={"counterfactual": _KINDS},
    )
    counts = count_by_population(
        scan.wrap(attribution.T, "W", dims=("counterfactual", "token")),
        len(OUTCOMES),
        "outcome_name",
    )
    units = f"{native_dtype(scan.ds['W'])} spacings; of float32 for float32_weights"
    dims = ("counterfactual", "token")
    outcome = ResultVariable("i1", "outcome of the counterfactual", None, OUTCOMES)
    margin = ResultVariable("f8", "largest update of the computed steps", units)
    steps = ResultVariable("i8", "computed steps after the last motion")
    variables = {
        "attribution": (dims, attribution.T, outcome),
        "attribution_margin": (dims, states[:, _MARGIN].T, margin),
        "attribution_steps": ("token", states[:, _TRIED].astype(np.int64), steps),
        "attribution_counts": (counts.dims, counts.data, ResultVariable("i8", "number of tokens")),
    }
    coords = {
        **scan.coords("W", ("token",)),
        "population": counts["population"],
        "counterfactual": list(COUNTERFACTUALS),
        "outcome_name": list(OUTCOMES),
    }
    return dataset(variables, coords)


def _check_lattice(scan: Scan, lattice: str) -> None:
    """Raise for any lattice but that of the type in which W was trained."""
    native = native_dtype(scan.variable("W"))
    if chosen_type(lattice, native) != native:
        raise InvalidArgument(
            f"freeze_attribution computes on the lattice that W was trained on, {native}; got "
            f"lattice={lattice!r}; use freeze_cause for another lattice: there below_cell means "
            "that W moved within its cell"
        )


def _states_of_tokens(recurrence: Recurrence, window: int) -> da.Array:
    """State of each token after the last row: (1, token, fact).

    Each block of rows updates the state of the previous block, so that earlier blocks are freed.
    """
    ds, gradient = recurrence.scan.ds, recurrence.gradient
    lr = np.asarray(ds["lr"].values, np.float64)
    peak = np.max(lr[recurrence.taken & ~np.isnan(lr)], initial=-np.inf)
    by_row = (
        lr,
        steps_taken(recurrence.scan, "freeze_attribution"),
        recurrence.taken,
        np.arange(lr.size) > 0,  # the first row has no previous row
        recurrence.numbers,
    )
    points = recurrence.rows_of("W")
    recorded = {moment: recurrence.recorded(moment) for moment in MOMENTS}
    live = _live_moments(recurrence, recorded)
    nothing = da.from_array(
        np.tile(_NOTHING, (1, gradient.shape[1], 1)),
        chunks=((1,), gradient.chunks[1], (_NOTHING.size,)),
    )
    ends = np.cumsum(gradient.chunks[0])[:-1]

    def compute(number: int, exact: Mapping[str, da.Array], known: list[da.Array]) -> da.Array:
        return measure(
            _fold_kernel,
            points.blocks.blocks[number],
            along([nothing, *known][-1], "end", "token", "number"),
            points.boundaries.blocks[number],
            *(recorded[moment].blocks[number] for moment in MOMENTS),
            *(exact[moment] for moment in MOMENTS),
            *(live[moment].blocks[number] for moment in MOMENTS),
            *(np.split(values, ends)[number] for values in by_row),
            dims=("end", "token", "number"),
            rule=recurrence.rule,
            native=native_dtype(ds["W"]),
            peak=peak if np.isfinite(peak) else np.nan,
            window=window,
            dtype=np.float64,
        )

    return recurrence.in_turn(compute)[-1]


def _fold_kernel(
    W: Array,
    states: Array,
    W_boundary: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    exact_avg: Array,
    exact_avg_sq: Array,
    live_avg: Array,
    live_avg_sq: Array,
    lr: Array,
    count: Array,
    taken: Array,
    counts: Array,
    numbers: npt.NDArray[np.void],
    *,
    rule: OptimizerRule,
    native: str,
    peak: float,
    window: int,
) -> Array:
    """Update the state, (1, token, fact), with a block of rows."""
    rows, tokens, hidden = W.shape
    result = states.copy()
    for part in tiles(rows, tokens, hidden, _COMPUTED_TOGETHER):
        state = result[0, part]
        before = np.concatenate([W_boundary[:, part], W[:-1, part]])
        unchanged = _unchanged_since(before, np.ascontiguousarray(W[:, part]))
        state[~unchanged[0]] = _NOTHING
        state[:, _UNCHANGED] += (unchanged & counts[..., 0]).sum(0)
        tried = unchanged & taken[..., 0]
        tried &= state[:, _TRIED] + np.cumsum(tried, axis=0) <= window
        state[:, _TRIED] += tried.sum(0)
        at = np.nonzero(tried)
        kept, rate, number = before[at], lr[at[0], 0], count[at[0], 0]
        step_rule = rule.at(numbers[at[0], 0])
        recorded = exp_avg[:, part][at], exp_avg_sq[:, part][at]
        exact = exact_avg[:, part][at].astype(W.dtype), exact_avg_sq[:, part][at].astype(W.dtype)
        live = live_avg[at[0], 0], live_avg_sq[at[0], 0]
        highest = np.full_like(rate, peak)
        changes = (
            (recorded, rate, native),
            (exact, rate, native),
            (recorded, highest, native),
            (live, rate, native),
            (recorded, rate, "float32"),
        )
        for kind, (moments, lrs, weights) in enumerate(changes):
            if weights == "float32" and native == "float64":
                continue  # a float64 W is not converted to float32
            change = step_rule.change(kept, *moments, lrs, number, weights)
            moved, margin = _judge(kept, change, weights)
            np.maximum.at(state[:, _MOVED][:, kind], at[1], moved)
            np.fmax.at(state[:, _MARGIN][:, kind], at[1], margin)
    return result


def _unchanged_since(before: Array, after: Array) -> npt.NDArray[np.bool_]:
    """Rows from which on each token does not move any more: (row, token)."""
    unchanged = np.asarray(~moved_elements(before, after).any(-1))
    return np.asarray(np.logical_and.accumulate(unchanged[::-1], axis=0)[::-1])


def _judge(W: Array, change: Array, native: str) -> tuple[npt.NDArray[np.bool_], Array]:
    """True for each vector that would move, and its largest change in spacings, ignoring NaN."""
    after = next_weights(W, change, native)
    moved = ((after != W) & ~np.isnan(after)).any(-1)
    hops = np.abs(change.astype(np.float64)) / spacing(W, native)
    return moved, np.fmax.reduce(hops, axis=-1)


def _outcome_kernel(states: Array) -> npt.NDArray[np.int8]:
    """Index of `OUTCOMES`, (token, counterfactual)."""
    moving = states[:, _UNCHANGED, None] == 0
    unknown = np.isnan(states[:, _MARGIN])
    moves = states[:, _MOVED] > 0
    cases = {"moving": moving, "unknown": unknown, "moves": moves}
    outcome = np.select(
        [np.broadcast_to(flags, moves.shape) for flags in cases.values()],
        [OUTCOMES.index(name) for name in cases],
        OUTCOMES.index("rounded_away"),
    )
    return outcome.astype(np.int8)


def _live_moments(recurrence: Recurrence, recorded: Mapping[str, da.Array]) -> dict[str, da.Array]:
    """Moments of the typical live token at each step: (step, 1, hidden); NaN without any."""
    ds, (by_step, _, by_hidden) = recurrence.scan.ds, recurrence.gradient.chunks
    live = np.zeros(ds.sizes["token"], bool)
    if "is_dead" in ds.coords:
        live = members(ds)[POPULATIONS.index("live")]
    if not live.any():
        shape = (len(recurrence.taken), 1, sum(by_hidden))
        nothing = da.full(
            shape, np.nan, dtype=recorded["exp_avg"].dtype, chunks=(by_step, (1,), by_hidden)
        )
        return dict.fromkeys(MOMENTS, nothing)
    grad = recurrence.recorded("grad")
    norms = measure(token_norm, grad, dims=("step", "token"), dtype=result_dtype(grad.dtype))
    whole = norms.rechunk({1: -1})
    typical = measure(_typical_kernel, whole, dims=("step",), live=live, dtype=np.int64)[
        :, None, None
    ]
    return {
        moment: measure(
            _pick_kernel,
            array,
            along(typical, "step", "single_token", "single_element"),
            dims=("step", "typical_token", "hidden"),
            dtype=array.dtype,
            sizes={"typical_token": 1},
        )
        for moment, array in recorded.items()
    }


def _typical_kernel(norms: Array, live: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Position of the live token with the lower median norm in each row; NaN sorts last."""
    positions = np.nonzero(live)[0]
    order = np.argsort(norms[:, live], axis=1, kind="stable")
    return np.asarray(positions[order[:, (positions.size - 1) // 2]])


def _pick_kernel(moment: Any, typical: Array) -> Array:
    """Vector of each row's typical token, (row, 1, hidden)."""
    chunks = chunks_of(moment)
    ends = np.cumsum([chunk.shape[1] for chunk in chunks])
    result = np.empty((typical.size, 1, chunks[0].shape[2]), chunks[0].dtype)
    for row, token in enumerate(typical.ravel()):
        place = np.searchsorted(ends, token, side="right")
        result[row, 0] = chunks[place][row, token - ends[place]]
    return result
