"""The gradient of a dead token's unembedding, from the states that were unembedded.

A step's mean cross-entropy over N targets has, with logits z = W h and probabilities p = softmax(z)
at each position, the derivative 1/N · Σ (p_v − [v is the target]) · h with respect to row v of W. A
token that occurs nowhere is never a target, so of its row only Σ p_v · h is left; and where W is
the embedding as well, that adds nothing, as the token is never put in either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.flags import flag_attributes
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded
from trajstore.values.rounding import round_to

__all__ = ["explain_gradient"]

Wide = npt.NDArray[np.float64]
Targets = Literal["shifted", "all"]

PRECISIONS = ("float64", "float32", "bfloat16")
_PER_GRADIENT = {
    "explained": ("L2 norm of the gradient that the states explain", "nat"),
    "recorded": ("L2 norm of the recorded gradient", "nat"),
    "relative_error": ("L2 norm of explained minus recorded, over that of recorded", "1"),
    "cosine": ("cosine between the explained and the recorded gradient", "1"),
}


@quantity(alone=True)
def explain_gradient(
    scan: Scan,
    step: int | Sequence[int],
    token: int | Sequence[int],
    *,
    targets: Targets = "shifted",
    denominator: float | None = None,
    precision: str = "float64",
) -> xr.Dataset:
    """Gradients of dead tokens from what their steps saw, and which examples made them.

    Parameters
    ----------
    ds : Dataset
        With ``W``, ``grad`` and ``hidden_states``, of every token of the vocabulary, and the step
        before each of `step`: its W is what the forward pass multiplied by.
    step : int or sequence of int
    token : int or sequence of int
        Ids of dead tokens. Of the others the targets, and where W is the embedding as well what was
        put in, would be missing.
    targets : {'shifted', 'all'}
        Which positions have one: all but the last, as the causal language models of transformers
        (and all presets) shift their labels; or all.
    denominator : float, optional
        What the loss divided the sum over its targets by, if not by their number.
    precision : {'float64', 'float32', 'bfloat16'}
        float64 throughout; or W, the states, the logits, the derivative with respect to them, and
        the sum at the end are rounded to another type, as a model computing in it rounds them.

    Returns
    -------
    Dataset (step, token)
        ``explained`` and ``recorded``: L2 norms of both gradients; ``relative_error``, L2 norm of
        their difference over ``recorded``; ``cosine`` between them. ``share`` (step, token,
        example): what the positions of an example add along the explained gradient, of its
        squared norm; the shares of a step add up to 1. ``by_share`` (step, token, rank), int64: the
        examples, the largest share first. The coordinate ``batch``, where it was recorded, says
        which examples of the data set they are. NaN, and −1, where the step has fewer examples.

    Raises
    ------
    VariableNotRecorded
        If the run holds no gradients, no states, or does not say which tokens are dead.
    StepNotFound
        If a step or the one before was not recorded.
    InvalidArgument
        If a token is not dead or not there, tokens of the vocabulary are missing, the run is a
        what-if, or an option is impossible.

    Examples
    --------
    >>> states = np.random.default_rng(0).normal(size=(2, 3, 4, 2))
    >>> W = np.zeros((2, 2, 2))  # both tokens are as probable
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
    _check(ds, targets, denominator, precision)
    steps, tokens = _whole("step", step), _whole("token", token)
    places = _places_of_dead(ds, tokens)
    rows = np.array([_row_after(ds, int(each)) for each in steps])
    made = xr.apply_ufunc(
        _explained,
        _rows(ds, "W", rows - 1),
        _rows(ds, "grad", rows).isel(token=places).rename(token="explained_token"),
        _rows(ds, "hidden_states", rows),
        kwargs={
            "places": places,
            "predicting": slice(None, -1) if targets == "shifted" else slice(None),
            "denominator": denominator,
            "precision": precision,
        },
        input_core_dims=[
            ["token", "hidden"], ["explained_token", "hidden"], ["example", "position", "hidden"],
        ],
        output_core_dims=[["explained_token", "fact"]],
        dask="parallelized",
        output_dtypes=[np.float64],
        dask_gufunc_kwargs={
            "output_sizes": {"fact": len(_PER_GRADIENT) + ds.sizes["example"]},
            "allow_rechunk": True,
        },
    ).rename(explained_token="token")  # fmt: skip
    coordinates: dict[str, Any] = {"step": steps, "token": tokens}
    if "batch" in ds:
        batch = ds["batch"].isel(step=rows).transpose("step", "example")
        coordinates["batch"] = (("step", "example"), batch.data)
    return _named(made.drop_vars(made.coords)).assign_coords(coordinates)


def _named(made: xr.DataArray) -> xr.Dataset:
    """Results by name, of (step, token, fact): facts of the gradient, then one of each example."""
    share = made.isel(fact=slice(len(_PER_GRADIENT), None)).rename(fact="example")
    order = xr.apply_ufunc(
        _largest_first,
        share,
        input_core_dims=[["example"]],
        output_core_dims=[["rank"]],
        dask="parallelized",
        output_dtypes=[np.int64],
        dask_gufunc_kwargs={"output_sizes": {"rank": share.sizes["example"]}},
    )
    facts = {
        name: made.isel(fact=number).assign_attrs(long_name=long_name, units=units)
        for number, (name, (long_name, units)) in enumerate(_PER_GRADIENT.items())
    }
    return xr.Dataset(
        {
            **facts,
            "share": share.assign_attrs(
                long_name="share of the example in the explained gradient", units="1"
            ),
            "by_share": order.assign_attrs(
                long_name="examples, the largest share first",
                **flag_attributes({-1: "fewer_examples"}),
            ),
        }
    )


def _explained(
    weights: npt.NDArray[Any],
    gradients: npt.NDArray[Any],
    states: npt.NDArray[Any],
    *,
    places: npt.NDArray[np.int64],
    predicting: slice,
    denominator: float | None,
    precision: str,
) -> Wide:
    """Facts of each gradient of one step, behind one another; see `_named`.

    Parameters
    ----------
    weights : ndarray, (1, token, hidden)
    gradients : ndarray, (1, explained token, hidden)
    states : ndarray, (1, example, position, hidden)
    """
    if not len(states):  # dask asks what the result is like
        return np.empty((0, len(places), len(_PER_GRADIENT) + states.shape[1]))
    (weights,), (recorded,), (states,) = weights, gradients.astype(np.float64), states
    made = [state[predicting] for state in states]
    made = [state[~np.isnan(state).all(-1)] for state in made]
    count = denominator or sum(map(len, made))
    W = _rounded(weights, precision)
    parts = np.stack([_of_example(W, state, places, count, precision) for state in made])
    explained = parts.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (parts * explained).sum(-1) / np.square(explained).sum(-1)
        explained = _rounded(explained, precision)
        norms = np.linalg.norm(explained, axis=-1), np.linalg.norm(recorded, axis=-1)
        error = np.linalg.norm(explained - recorded, axis=-1) / norms[1]
        cosine = (explained * recorded).sum(-1) / (norms[0] * norms[1])
    share[[not len(state) for state in made]] = np.nan
    facts: Wide = np.concatenate([np.stack([*norms, error, cosine]), share]).T
    return facts[None]


def _of_example(
    W: Wide, states: npt.NDArray[Any], places: npt.NDArray[np.int64], count: float, precision: str
) -> Wide:
    """What the positions of one example add to the gradients, (explained token, hidden)."""
    h = _rounded(states, precision)
    logits = _rounded(h @ W.T, precision)
    logits -= logits.max(-1, keepdims=True, initial=-np.inf)
    np.exp(logits, out=logits)
    derivative = logits[:, places] / logits.sum(-1, keepdims=True) / count
    return _rounded(derivative, precision).T @ h


def _largest_first(share: Wide) -> npt.NDArray[np.int64]:
    order = np.argsort(-share, axis=-1, kind="stable")  # NaN comes last
    return np.where(np.isnan(np.take_along_axis(share, order, -1)), -1, order)


def _rounded(values: npt.NDArray[Any], precision: str) -> Wide:
    if precision == "float64":
        return values.astype(np.float64)
    return round_to(values.astype(np.float32), precision).astype(np.float64)


def _check(ds: xr.Dataset, targets: str, denominator: float | None, precision: str) -> None:
    input_checks.variables(ds, "W", "grad", "hidden_states")
    for name, value, known in (
        ("targets", targets, ("shifted", "all")),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise InvalidArgument(f"got {name}={value!r}, expected one of {', '.join(known)}")
    if denominator is not None and not denominator > 0:
        raise InvalidArgument(f"got denominator={denominator}, expected a positive number")
    if "what_if" in (ds.attrs.get("provenance") or {}):
        raise InvalidArgument(
            "this run is a what-if: its W is not what the recorded states were multiplied by; ask "
            "the run that it was made of"
        )
    recording: Mapping[str, Any] = ds.attrs.get("recording") or {}
    vocabulary = recording.get("vocabulary", int(ds["token"].max()) + 1)
    if ds.sizes["token"] != vocabulary:
        raise InvalidArgument(
            f"got {ds.sizes['token']} of the vocabulary's {vocabulary} tokens, and a probability "
            "takes the logits of all; ask the whole run, recorded with tokens='all'"
        )


def _whole(name: str, given: int | Sequence[int]) -> npt.NDArray[np.int64]:
    numbers = np.atleast_1d(given)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise InvalidArgument(f"got {name}={given!r}, expected a whole number or several")
    return numbers.astype(np.int64)


def _places_of_dead(ds: xr.Dataset, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions along token of ids, which must be those of dead tokens."""
    if "is_dead" not in ds.coords:
        raise VariableNotRecorded(
            "this question needs the coordinate is_dead, which the run does not hold; say which "
            "tokens occur nowhere in the text with ds.assign_coords(is_dead=('token', …))"
        )
    where = {int(number): place for place, number in enumerate(ds["token"].values)}
    missing = [int(token) for token in tokens if int(token) not in where]
    if missing:
        raise InvalidArgument(f"the run holds no token {missing[0]}; ask about ids that it holds")
    places = np.array([where[int(token)] for token in tokens])
    live = tokens[~ds["is_dead"].values[places].astype(bool)]
    if live.size:
        raise InvalidArgument(
            f"token {live[0]} occurs in the text: where it is a target, and where it is put in, "
            "there is more in its gradient than the states explain; ask about dead tokens"
        )
    return places


def _row_after(ds: xr.Dataset, step: int) -> int:
    """Row of a step whose row before is that of the step before."""
    row = input_checks.row_of_step(ds, step)
    if step == 0:
        raise StepNotFound(
            "step 0 is before training, without a forward pass; ask about a later one"
        )
    if row == 0 or int(ds["step"][row - 1]) != step - 1:
        raise StepNotFound(
            f"the forward pass of step {step} was with W of step {step - 1}, which is not in the "
            "run; ask about a later step, or record with every=1"
        )
    return row


def _rows(ds: xr.Dataset, name: str, rows: npt.NDArray[np.int64]) -> xr.DataArray:
    """Rows of a variable, each a chunk."""
    array = ds[name].isel(step=rows).drop_vars("step")
    return array.chunk({dim: 1 if dim == "step" else -1 for dim in array.dims})
