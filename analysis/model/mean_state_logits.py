"""Logits of the mean hidden state, and the tokens with the largest ones."""

from __future__ import annotations

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.cloud.identical_vectors import token_labels
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Wide, measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.values.norms import hidden_sum


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
    input_checks.variables(scan.ds, "hidden_mean")
    tokens = scan.ds.sizes["token"]
    if not 1 <= k <= tokens:
        raise InvalidArgument(f"got k={k}, expected 1 to {tokens}, the number of tokens")
    scan.require_rows(1, "mean_logits")
    points = scan.rows_of("W")
    states = scan.ds["hidden_mean"].transpose("step", "hidden").astype(np.float64)
    follows = np.diff(scan.steps, prepend=scan.steps[:1]) == 1
    data = da.asarray(states.where(xr.DataArray(follows, dims="step")).data)
    each = data.rechunk((points.blocks.chunks[0], -1))
    logits = measure(_logits, "st", points, (each, "sh"), dtype=np.float64, by_row=True)
    facts = {
        "top_logit": Fact(f"({k},)f8", "largest logits of the mean hidden state", "nat"),
        "top_token": Fact(
            f"({k},)i8",
            "tokens with the largest logits of the mean hidden state",
            None,
            {-1: "unknown"},
        ),
    }
    labels, whole = token_labels(scan.ds), logits.rechunk({1: -1})
    top = measure(_top, "s", whole, labels=labels, k=k, dtype=facts, by_row=True)
    coords = {"step": scan.ds["step"], "rank": np.arange(1, k + 1)}
    result = table(top, facts, ("step", "rank"), coords)
    result["mean_logit"] = scan.wrap(logits, "W").assign_attrs(
        long_name="logit of the mean hidden state", units="nat"
    )
    return result
