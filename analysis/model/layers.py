"""Metrics of every layer: parameters, gradients, updates, and circuits of attention heads."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.model.attention_circuits import (
    CIRCUITS,
    Attention,
    circuits_of,
    gpt2_attention,
)
from trajstore.analysis.model.layer_metrics import METRICS, Metric, layer_of
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Points, measure, table
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.quantity import registered, takes_scan
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.store.reading.run_info import parameter_dataset, parameter_table
from trajstore.values.optimizer_rule import VECTORS

_SUBJECTS = {
    "params": "parameter",
    "grad": "gradient",
    "update": "update",
    "ov": "OV circuit",
    "qk": "QK circuit",
}
"""Values of ``of``, in words."""

_NORMS = {"params": "param_norm", "grad": "param_grad_norm", "update": "param_update_norm"}
"""Variables of the tier ``norms`` that are Frobenius norms."""


def recorded_norm(ds: xr.Dataset, of: str) -> str | None:
    """Return the variable that serves as the Frobenius norm; None if it has to be computed.

    Recorded norms of updates are of single steps, not of changes since an earlier row.
    """
    name = _NORMS.get(of)
    is_held = name in ds and (of != "update" or bool((np.diff(ds["step"]) == 1).all()))
    return name if is_held or "parameters" not in ds.attrs else None


@registered(alone=True)
@takes_scan
def layers(
    scan: Scan,
    of: Literal["params", "grad", "update", "ov", "qk"] = "params",
    metrics: str | Sequence[str] | None = None,
    steps: int | Sequence[int] | None = None,
    *,
    attention: Attention | None = None,
) -> xr.Dataset:
    """Norms, ranks, condition and sparsity of each parameter, gradient, update or attention head.

    Each matrix is measured alone, in float64. Its singular values are computed once for all
    metrics, and only if one needs them. Only the chosen steps are read; for updates and
    ``unchanged`` also the row before each.

    Parameters
    ----------
    ds : Dataset
        A run of the tier ``everything``. ``metrics="frobenius"`` alone also works for a run with
        norms, and uses these if they are recorded. Recorded norms of updates are of single steps;
        if rows are further apart, only a run without the parameters uses them.
    of : {'params', 'grad', 'update', 'ov', 'qk'}
        Parameters after the step; gradients before clipping; changes since the row before; or a
        circuit of each attention head. With x @ W as the layer, ``ov`` is W_V·W_O and ``qk`` is
        W_Q·W_Kᵀ of the head, without biases and rotary positions (Elhage et al. 2021).
    metrics : str or sequence of str, optional
        Names in the list below; default: all.
    steps : int or sequence of int, optional
        Default: all recorded steps.
    attention : Attention, optional
        Names of the attention weights. Not needed for a GPT-2 of transformers.

    Returns
    -------
    Dataset, float64 (step, parameter)
        One variable for each metric. ``parameter`` holds the names, for circuits such as
        ``transformer.h.0.attn.head.3``. A tensor of more than two dimensions is a matrix of its
        first dimension × all others. NaN at the first row for updates, gradients and
        ``unchanged``.

        - ``frobenius``, ``rms``: √Σx², and over √(mn).
        - ``gini``, ``hoyer``: sparsity of the magnitudes, from 0, all equal, to 1.
        - ``unchanged``: fraction of the elements with the same bits as in the row before.

        These need a matrix, so that vectors have NaN:

        - ``spectral``: the largest singular value σ₁.
        - ``effective_rank``: exponential of the entropy of σ/Σσ; ``effective_rank_share``: over
          the full rank. The full rank of a circuit is the size of its head.
        - ``stable_rank``: ‖X‖_F²/σ₁².
        - ``condition_number``: σ₁ over the last of the singular values up to the full rank; inf
          for a singular matrix.

    Raises
    ------
    VariableNotRecorded
        If the run does not hold all parameters.
    StepNotFound
        If a step was not recorded.
    InvalidArgument
        For an unknown metric, or circuits of a model with unknown names.

    Examples
    --------
    >>> W = np.array([[[2.0, 0.0], [0.0, 1.0]]])
    >>> entry = {"name": "w", "variable": "W", "shape": [2, 2], "dtype": "float32", "group": 0}
    >>> made = xr.Dataset(
    ...     {"W": (("step", "token", "hidden"), W)},
    ...     {"step": [0], "token": [0, 1]},
    ...     {"parameters": [entry]},
    ... )
    >>> found = layers(made, metrics=["spectral", "stable_rank", "condition_number"])
    >>> [round(found[name].values.item(), 6) for name in found]
    [2.0, 1.25, 2.0]
    """
    wanted = _wanted(metrics)
    if attention is not None and of not in CIRCUITS:
        raise InvalidArgument(f"got attention for of={of!r}, expected {' or '.join(CIRCUITS)}")
    ds = scan.ds
    rows = np.unique(input_checks.rows_of_steps(ds, steps))
    rows = rows[np.isin(scan.steps[rows], scan.window)]
    units = {True: "nat" if of == "grad" else "1", False: "1"}
    facts = {
        name: Fact("f8", f"{one.label} of each {_SUBJECTS[of]}", units[one.has_units])
        for name, one in wanted.items()
    }
    if [*wanted] == ["frobenius"] and (norms := recorded_norm(ds, of)):
        input_checks.variables(ds, norms)
        recorded = ds[norms].transpose("step", "parameter").isel(step=rows).astype(np.float64)
        return xr.Dataset({"frobenius": recorded.assign_attrs(facts["frobenius"].attributes)})
    entries = parameter_table(ds.attrs)
    pairs = of == "update" or "unchanged" in wanted
    read = np.union1d(rows, np.maximum(rows - 1, 0)) if pairs else rows
    is_chosen, has_before = np.isin(read, rows), (read > 0) & pairs
    kind = "grad" if of == "grad" else "W"
    stored = {"W": kind, "params": VECTORS[kind]}
    needed = [stored[name] for name in {entry["variable"] for entry in entries}]
    input_checks.variables(ds, *needed)
    part = ds[needed].isel(step=read)

    def measured(
        split: Callable[..., list[Sequence[Array]]], names: Sequence[str], size: int = 1
    ) -> da.Array:
        """Metrics of some parameters, (step, size); `split` makes the factors of each of `size`."""
        sources: list[Any] = []
        for at, name in enumerate(names):
            values = parameter_dataset(part, name)[kind].data.rechunk({1: -1, 2: -1})
            points = Points(variable=name, type="", blocks=values) if pairs else values
            sources.append((points, f"s{string.ascii_uppercase[2 * at :][:2]}"))
        found = measure(
            _measured,
            "sp",
            *sources,
            is_chosen,
            has_before,
            dtype=facts,
            sizes={"p": size},
            by_row=True,
            split=split,
            pairs=pairs,
            is_update=of == "update",
            wanted=tuple(facts),
        )
        return found if is_chosen.all() else found[np.flatnonzero(is_chosen)]

    if of in CIRCUITS:
        known = attention or gpt2_attention(ds.attrs)
        circuits = circuits_of(ds.attrs, of, known)
        split: Callable[..., Any] = partial(_heads, attention=known, roles=CIRCUITS[of])
        found = [measured(split, weights, known.heads) for weights in circuits.values()]
        names = [f"{block}.head.{head}" for block in circuits for head in range(known.heads)]
    else:
        names = [entry["name"] for entry in entries]
        splits = (partial(_whole, is_matrix=len(entry["shape"]) > 1) for entry in entries)
        found = [measured(split, [name]) for split, name in zip(splits, names, strict=True)]
    coords = {"step": scan.steps[rows], "parameter": names}
    return table(da.concatenate(found, axis=1), facts, ("step", "parameter"), coords)


def _wanted(metrics: str | Sequence[str] | None) -> dict[str, Metric]:
    names = [metrics] if isinstance(metrics, str) else [*(METRICS if metrics is None else metrics)]
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        hint = did_you_mean(unknown[0], METRICS) if unknown else ""
        known = ", ".join(METRICS)
        raise InvalidArgument(f"got metrics={metrics!r}{hint}, expected one or more of {known}")
    return {name: METRICS[name] for name in names}


def _measured(
    *given: Any, split: Callable[..., Any], pairs: bool, is_update: bool, wanted: Sequence[str]
) -> dict[str, Any]:
    """Metrics of the layers of one step; NaN for a step that only precedes a chosen one."""
    *values, is_chosen, has_before = given
    if not is_chosen:
        return dict.fromkeys(wanted, np.nan)
    wide = [each.astype(np.float64) for each in values]
    now = split(*wide[:: 1 + pairs])
    before = split(*wide[1::2]) if has_before else [None] * len(now)
    layers = [
        layer_of(one, old, wanted, is_update=is_update)
        for one, old in zip(now, before, strict=True)
    ]
    return {name: [METRICS[name].function(layer) for layer in layers] for name in wanted}


def _whole(values: Array, *, is_matrix: bool) -> list[Sequence[Array]]:
    return [(values if is_matrix else values.ravel(),)]


def _heads(
    first: Array, second: Array, *, attention: Attention, roles: tuple[str, str]
) -> list[Sequence[Array]]:
    """Factors of the circuit of each head, (model, head size) and (head size, model)."""
    return [
        (attention.part(roles[0], head, first), attention.part(roles[1], head, second).T)
        for head in range(attention.heads)
    ]
