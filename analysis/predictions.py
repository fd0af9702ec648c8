"""Predictions of the model: explained gradients of dead tokens, logits, and the logit lens.

`explain_gradient` computes gradients of dead tokens from the recorded hidden states. With logits
z = W h and probabilities p = softmax(z) at each position, the mean cross-entropy of a step over N
targets has the derivative 1/N · Σ (p_v − [v is the target]) · h with respect to row v of W. A dead
token is never a target, so its gradient is 1/N · Σ p_v · h. If W is also the input embedding, this
adds nothing, because a dead token is never an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.geometry.identical_vectors import token_labels
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Wide, along, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, table
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Positive
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded
from trajstore.provenance import RunAttributes
from trajstore.values.native_types import cast
from trajstore.values.norms import hidden_sum

_DIMS = ("step", "token", "example", "position", "hidden")
_PER_GRADIENT = {
    "explained": ResultVariable("f8", "L2 norm of the gradient that the states explain", "nat"),
    "recorded": ResultVariable("f8", "L2 norm of the recorded gradient", "nat"),
    "relative_error": ResultVariable(
        "f8", "L2 norm of explained minus recorded, over that of recorded"
    ),
    "cosine": ResultVariable("f8", "cosine between the explained and the recorded gradient"),
}


@quantity(alone=True)
def explain_gradient(
    scan: Scan,
    step: int | Sequence[int],
    token: int | Sequence[int],
    *,
    targets: Literal["shifted", "all"] = "shifted",
    denominator: Positive | None = None,
    precision: Literal["float64", "float32", "bfloat16"] = "float64",
) -> xr.Dataset:
    """Gradients of dead tokens from recorded hidden states, and the contribution of each example.

    Parameters
    ----------
    ds : Dataset
        With ``W`` of every token of the vocabulary, ``grad`` and ``hidden_states``. The step before
        each `step` must be recorded, because its W is used in the forward pass.
    step : int or sequence of int
        Steps to explain.
    token : int or sequence of int
        Ids of dead tokens. Gradients of live tokens also depend on targets and inputs.
    targets : {'shifted', 'all'}
        Positions with a target: all but the last, as in causal language models of transformers
        (and all presets), which shift their labels; or all.
    denominator : float, optional
        Divisor of the sum over the targets in the loss. Default: the number of targets.
    precision : {'float64', 'float32', 'bfloat16'}
        Compute in float64; or also round W, the states, the logits, their derivative and the final
        sum to another type, as a model that computes in it does.

    Returns
    -------
    Dataset (step, token)
        ``explained`` and ``recorded``: L2 norms of both gradients; ``relative_error``, L2 norm of
        their difference over ``recorded``; ``cosine`` between them. ``share`` (step, token,
        example): the contribution of an example along the explained gradient, as a fraction of its
        squared norm. The shares of a step sum to 1. ``by_share`` (step, token, rank), int64: the
        examples, largest share first. If recorded, the coordinate ``batch`` holds the indices of
        the examples in the data set. NaN or −1 if the step has fewer examples.

    Raises
    ------
    VariableNotRecorded
        If gradients, states or ``is_dead`` are missing.
    StepNotFound
        If a step or its previous step was not recorded.
    InvalidArgument
        If a token is not dead or unknown, tokens of the vocabulary are missing, the run is a
        what-if run, or an option is invalid.

    Examples
    --------
    >>> states = np.random.default_rng(0).normal(size=(2, 3, 4, 2))
    >>> W = np.zeros((2, 2, 2))  # both tokens are equally probable
    >>> grad = np.stack([states[1, :, :-1].sum((0, 1)) / 2 / 9, np.zeros(2)])
    >>> made = xr.Dataset(
    ...     {
    ...         "W": (("step", "token", "hidden"), W),
    ...         "grad": (("step", "token", "hidden"), np.stack([grad, grad])),
    ...         "hidden_states": (("step", "example", "position", "hidden"), states),
    ...     },
    ...     {"step": [0, 1], "token": [0, 1], "is_dead": ("token", [True, False])},
    ... )
    >>> explain_gradient(made, 1, 0).relative_error.values.round(9)
    array([[0.]])
    """
    ds = scan.ds
    _check(ds)
    steps, tokens = _whole("step", step), _whole("token", token)
    places = _places_of_dead(ds, tokens)
    rows = np.array([_row_after(ds, int(each)) for each in steps])
    of_examples = f"({ds.sizes['example']},)"
    variables = {
        **_PER_GRADIENT,
        "share": ResultVariable(
            f"{of_examples}f8", "share of the example in the explained gradient"
        ),
        "by_share": ResultVariable(
            f"{of_examples}i8", "examples, largest share first", flags={-1: "fewer_examples"}
        ),
    }
    explained = measure(
        _explained,
        _rows(ds, "grad", rows)[:, places].rechunk({1: -1}),
        along(_rows(ds, "W", rows - 1), "step", "vocabulary", "hidden"),
        along(_rows(ds, "hidden_states", rows), "step", "example", "position", "hidden"),
        dims=("step", "token"),
        places=places,
        predicting=slice(None, -1) if targets == "shifted" else slice(None),
        denominator=denominator,
        precision=precision,
        dtype=variables,
    )
    result = table(explained, variables, ("step", "token", "example"), {})
    result["by_share"] = result["by_share"].rename(example="rank")
    coordinates: dict[str, Any] = {"step": steps, "token": tokens}
    if "batch" in ds:
        batch = ds["batch"].isel(step=rows).transpose("step", "example")
        coordinates["batch"] = (("step", "example"), batch.data)
    return result.assign_coords(coordinates)


def _explained(
    gradients: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    states: npt.NDArray[Any],
    *,
    places: npt.NDArray[np.int64],
    predicting: slice,
    denominator: float | None,
    precision: str,
) -> dict[str, npt.NDArray[Any]]:
    """Variables of each gradient of one step, (1, explained token).

    Parameters
    ----------
    gradients : ndarray, (1, explained token, hidden)
    weights : ndarray, (1, token, hidden)
    states : ndarray, (1, example, position, hidden)
    """
    (weights,), (recorded,), (states,) = weights, gradients.astype(np.float64), states
    predicting_states = [state[predicting] for state in states]
    predicting_states = [state[~np.isnan(state).all(-1)] for state in predicting_states]
    count = denominator or sum(map(len, predicting_states))
    W = _rounded(weights, precision)
    parts = np.stack(
        [_of_example(W, state, places, count, precision) for state in predicting_states]
    )
    explained = parts.sum(0)
    share = (parts * explained).sum(-1) / np.square(explained).sum(-1)
    share[[not len(state) for state in predicting_states]] = np.nan
    explained = _rounded(explained, precision)
    norms = np.linalg.norm(explained, axis=-1), np.linalg.norm(recorded, axis=-1)
    variables = {
        "explained": norms[0],
        "recorded": norms[1],
        "relative_error": np.linalg.norm(explained - recorded, axis=-1) / norms[1],
        "cosine": (explained * recorded).sum(-1) / (norms[0] * norms[1]),
        "share": share.T,
        "by_share": _largest_first(share.T),
    }
    return {name: values[None] for name, values in variables.items()}


def _of_example(
    W: Wide, states: npt.NDArray[Any], places: npt.NDArray[np.int64], count: float, precision: str
) -> Wide:
    """Contribution of one example to the gradients, (explained token, hidden)."""
    h = _rounded(states, precision)
    logits = _rounded(h @ W.T, precision)
    logits -= logits.max(-1, keepdims=True, initial=-np.inf)
    np.exp(logits, out=logits)
    derivative = logits[:, places] / logits.sum(-1, keepdims=True) / count
    return _rounded(derivative, precision).T @ h


def _largest_first(share: Wide) -> npt.NDArray[np.int64]:
    order = np.argsort(-share, axis=-1, kind="stable")  # NaN sorts last
    return np.where(np.isnan(np.take_along_axis(share, order, -1)), -1, order)


def _rounded(values: npt.NDArray[Any], precision: str) -> Wide:
    if precision == "float64":
        return values.astype(np.float64)
    return cast(values.astype(np.float32), precision).astype(np.float64)


def _check(ds: xr.Dataset) -> None:
    input_checks.require_variables(ds, "W", "grad", "hidden_states")
    run = RunAttributes.of(ds.attrs)
    if run.what_if:
        raise InvalidArgument(
            "got a what-if run, whose W does not match the recorded hidden states; use the "
            "original run"
        )
    vocabulary = run.vocabulary or int(ds["token"].max()) + 1
    if ds.sizes["token"] != vocabulary:
        raise InvalidArgument(
            f"got {ds.sizes['token']} of the vocabulary's {vocabulary} tokens, but a softmax "
            "requires the logits of all; use the whole run, recorded with tokens='all'"
        )


def _whole(name: str, given: int | Sequence[int]) -> npt.NDArray[np.int64]:
    numbers = np.atleast_1d(given)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise InvalidArgument(f"got {name}={given!r}, expected one or more whole numbers")
    return numbers.astype(np.int64)


def _places_of_dead(ds: xr.Dataset, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions of ids along token. All must be dead tokens."""
    if "is_dead" not in ds.coords:
        raise VariableNotRecorded(
            "explain_gradient requires the coordinate is_dead, which the run does not hold; label "
            "dead tokens with ds.assign_coords(is_dead=('token', …))"
        )
    where = {int(number): place for place, number in enumerate(ds["token"].values)}
    missing = [int(token) for token in tokens if int(token) not in where]
    if missing:
        raise InvalidArgument(f"got token {missing[0]}, expected tokens that the run holds")
    places = np.array([where[int(token)] for token in tokens])
    live = tokens[~ds["is_dead"].values[places].astype(bool)]
    if live.size:
        raise InvalidArgument(
            f"got the live token {live[0]}, expected dead tokens: the gradient of a live token "
            "also depends on its targets and inputs"
        )
    return places


def _row_after(ds: xr.Dataset, step: int) -> int:
    """Row of a step, checked to follow the row of the previous step."""
    row = input_checks.row_of_step(ds, step)
    if step == 0:
        raise StepNotFound(
            "got step 0, which is before training and has no forward pass; use a later step"
        )
    if row == 0 or int(ds["step"][row - 1]) != step - 1:
        raise StepNotFound(
            f"the forward pass of step {step} used W of step {step - 1}, which was not recorded; "
            "use a later step, or record with every=1"
        )
    return row


def _rows(ds: xr.Dataset, name: str, rows: npt.NDArray[np.int64]) -> da.Array:
    """Rows of a variable, one per chunk, with ordered dimensions."""
    array = ds[name].isel(step=rows).transpose(*_DIMS, missing_dims="ignore")
    return array.chunk({dim: 1 if dim == "step" else -1 for dim in array.dims}).data


_FACTS = {
    "logit_min": ResultVariable("f8", "smallest logit", "nat"),
    "logit_max": ResultVariable("f8", "largest logit", "nat"),
    "logit_range": ResultVariable("f8", "largest minus smallest logit", "nat"),
    "logit_std": ResultVariable("f8", "standard deviation of the logits", "nat"),
    "entropy": ResultVariable("f8", "entropy of the softmax", "nat"),
    "dead_mass": ResultVariable("f8", "total probability of all dead tokens"),
}


def _statistics(
    logits: npt.NDArray[Any], dead: npt.NDArray[np.bool_] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Statistics over the tokens, (row)."""
    wide = logits.astype(np.float64)
    low, high = wide.min(-1), wide.max(-1)
    shifted = wide - high[:, None]
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    probabilities = weights / total
    # 0 · log 0 is 0.
    products = np.where(probabilities == 0, 0, probabilities * shifted)
    return {
        "logit_min": low,
        "logit_max": high,
        "logit_range": high - low,
        "logit_std": wide.std(-1),
        "entropy": np.log(total[:, 0]) - products.sum(-1),
        "dead_mass": low * np.nan if dead is None else probabilities[:, dead].sum(-1),
    }


@quantity()
def logit_stats(scan: Scan) -> xr.Dataset:
    """Range, standard deviation and entropy of the prediction at each step.

    Parameters
    ----------
    ds : Dataset
        With ``logits`` (step, token) of the whole vocabulary, which the softmax requires.

    Returns
    -------
    Dataset, float64 (step)
        ``logit_min``, ``logit_max``, ``logit_range``, ``logit_std`` (population standard
        deviation), ``entropy`` of the softmax in nat, and ``dead_mass``, the total probability of
        all dead tokens, if ``is_dead`` is recorded. NaN at row 0, before the first forward pass.

    Raises
    ------
    VariableNotRecorded
        If the run holds no logits.

    Examples
    --------
    >>> logit_stats(ds).dead_mass.isel(step=[1, -1]).values.round(3)
    array([0.822, 0.747])
    """
    ds = scan.ds
    input_checks.require_variables(ds, "logits")
    logits = ds["logits"]
    if set(logits.dims) != {"step", "token"}:
        raise InvalidArgument(
            f"logits has dimensions {', '.join(map(str, logits.dims))}, expected step, token"
        )
    logits = logits.drop_attrs().transpose("step", "token").chunk({"token": -1})
    dead = np.asarray(ds["is_dead"].values, bool) if "is_dead" in ds.coords else None
    statistics = measure(_statistics, logits.data, dims=("step",), dead=dead, dtype=_FACTS)
    coords = {name: values for name, values in logits.coords.items() if "token" not in values.dims}
    result = table(statistics, _FACTS, ("step",), coords)
    return result if dead is not None else result.drop_vars("dead_mass")


def _logits(now: Array, before: Array, state: Wide) -> Wide:
    """Product of the previous row with the state."""
    return hidden_sum(before.astype(np.float64) * state)


def _top(logits: Wide, labels: npt.NDArray[np.int64], k: int) -> dict[str, Array]:
    """The k largest logits and their tokens, NaN last."""
    order = np.argsort(-logits, kind="stable")[:k]
    largest = logits[order]
    return {"top_logit": largest, "top_token": np.where(np.isnan(largest), -1, labels[order])}


@quantity()
def mean_logits(scan: Scan, k: int = 10) -> xr.Dataset:
    """Logits of the mean hidden state h̄ for each token, and the tokens with the largest ones.

    This is the logit lens of h̄: the prediction at a position whose hidden state is the mean.
    Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), the output matrix, and ``hidden_mean``.
    k : int
        Number of tokens in the list.

    Returns
    -------
    Dataset
        ``mean_logit``, float64 (step, token), W_{t−1}·h̄_t in nat, without a bias: the forward pass
        of step t uses the W of the row before. NaN if that row is not the step before. Over (step,
        rank): ``top_token``, int64, the recorded tokens with the largest logits, −1 if unknown, and
        ``top_logit``, float64. Of equal logits, the first token comes first.

    Raises
    ------
    InvalidArgument
        If k is not from 1 to the number of tokens.
    VariableNotRecorded
        If ``hidden_mean`` was not recorded.

    Examples
    --------
    >>> state = ds.W.mean("token").assign_attrs(units="1")  # in place of a recorded mean
    >>> found = mean_logits(ds.assign(hidden_mean=state), k=1)
    >>> bool(ds.is_dead.sel(token=found.top_token.isel(step=-1)).item())
    False
    """
    input_checks.require_variables(scan.ds, "hidden_mean")
    tokens = scan.ds.sizes["token"]
    if not 1 <= k <= tokens:
        raise InvalidArgument(f"got k={k}, expected 1 to {tokens}, the number of tokens")
    scan.require_rows(1, "mean_logits")
    points = scan.rows_of("W")
    states = scan.ds["hidden_mean"].transpose("step", "hidden").astype(np.float64)
    follows = np.diff(scan.steps, prepend=scan.steps[:1]) == 1
    data = da.asarray(states.where(xr.DataArray(follows, dims="step")).data)
    each = data.rechunk((points.blocks.chunks[0], -1))
    logits = measure(
        _logits,
        points,
        along(each, "step", "hidden"),
        dims=("step", "token"),
        dtype=np.float64,
        by_row=True,
    )
    variables = {
        "top_logit": ResultVariable(f"({k},)f8", "largest logits of the mean hidden state", "nat"),
        "top_token": ResultVariable(
            f"({k},)i8",
            "tokens with the largest logits of the mean hidden state",
            None,
            {-1: "unknown"},
        ),
    }
    labels, whole = token_labels(scan.ds), logits.rechunk({1: -1})
    top = measure(_top, whole, dims=("step",), labels=labels, k=k, dtype=variables, by_row=True)
    coords = {"step": scan.ds["step"], "rank": np.arange(1, k + 1)}
    result = table(top, variables, ("step", "rank"), coords)
    result["mean_logit"] = scan.wrap(logits, "W").assign_attrs(
        long_name="logit of the mean hidden state", units="nat"
    )
    return result
