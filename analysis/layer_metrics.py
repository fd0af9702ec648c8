"""Metrics of the matrices of a model at each step: parameters, gradients, updates and circuits.

`METRICS` holds the metrics of one matrix, computed in float64. `Attention` names the weights whose
products are the OV and QK circuits of attention heads. `layers` measures the matrices of a run.

Definitions equal those of pico-analyze where it has them: norm (here ``frobenius``), PER
(``effective_rank_share``), condition number, Gini and Hoyer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, ConsecutiveRows, Wide, measure
from trajstore.analysis.scan.quantity import registered, takes_scan
from trajstore.analysis.scan.result_variables import ResultVariable, table
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Count, check_fields
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.store.reading.run_attributes import (
    parameter_dataset,
    parameter_entry,
    parameter_table,
)
from trajstore.values.native_types import unsigned_view
from trajstore.values.optimizer_rule import VECTORS


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A matrix X of m × n real numbers, as far as the metrics need it.

    Attributes
    ----------
    shape : tuple of int
        Shape of X; a vector has one dimension.
    elements : ndarray, optional
        X. None for a product, if no metric needs its elements.
    singular_values : ndarray, (r,), optional
        Largest first; r is the full rank. None for a vector, or if no metric needs them.
    unchanged : float
        Fraction of the elements with the same bits as in the row before.
    """

    shape: tuple[int, ...]
    elements: Wide | None
    singular_values: Wide | None
    unchanged: float

    @property
    def spectrum(self) -> Wide:
        """Singular values; NaN for a vector."""
        return np.array([np.nan]) if self.singular_values is None else self.singular_values

    @property
    def magnitudes(self) -> Wide:
        """Magnitudes of the elements, or singular values if no metric needs the elements."""
        known: Any = self.singular_values if self.elements is None else self.elements
        return np.asarray(np.abs(known).ravel())


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a `Layer`.

    Attributes
    ----------
    function : callable
    label : str
    of : {'norm', 'spectrum', 'elements'}
        What it needs: either form of the matrix, its singular values, or its elements.
    has_units : bool
        True if it has the unit of the elements.
    """

    function: Callable[[Layer], Any]
    label: str
    of: str
    has_units: bool


METRICS: dict[str, Metric] = {}
"""Metrics by name."""


def _metric(label: str, of: str, *, units: bool = False) -> Callable[..., Callable[[Layer], Any]]:
    def register(function: Callable[[Layer], Any]) -> Callable[[Layer], Any]:
        METRICS[function.__name__] = Metric(function=function, label=label, of=of, has_units=units)
        return function

    return register


@_metric("Frobenius norm", "norm", units=True)
def frobenius(layer: Layer) -> Any:
    """Frobenius norm, √Σx²: for a vector, the L2 norm."""
    return np.linalg.norm(layer.magnitudes)


@_metric("spectral norm", "spectrum", units=True)
def spectral(layer: Layer) -> Any:
    """Spectral norm: the largest singular value σ₁."""
    return layer.spectrum[0]


@_metric("root mean square", "norm", units=True)
def rms(layer: Layer) -> Any:
    """Root of the mean square of the elements, ‖X‖_F / √(mn)."""
    return frobenius(layer) / np.sqrt(np.prod(layer.shape))


@_metric("effective rank", "spectrum")
def effective_rank(layer: Layer) -> Any:
    """Exponential of the entropy of p = σ/Σσ, exp(−Σ p ln p) (Roy and Vetterli 2007)."""
    share = layer.spectrum / layer.spectrum.sum()
    return np.exp(-np.where(share > 0, share * np.log(share), 0 * share).sum())


@_metric("effective rank / full rank", "spectrum")
def effective_rank_share(layer: Layer) -> Any:
    """Effective rank over the full rank r, as the proportional effective rank of pico-analyze."""
    return effective_rank(layer) / layer.spectrum.size


@_metric("stable rank", "spectrum")
def stable_rank(layer: Layer) -> Any:
    """Stable rank, ‖X‖_F² / σ₁² (Rudelson and Vershynin 2007)."""
    return (np.linalg.norm(layer.spectrum) / layer.spectrum[0]) ** 2


@_metric("condition number", "spectrum")
def condition_number(layer: Layer) -> Any:
    """Condition number σ₁/σ_r in the 2-norm (Golub and Van Loan, Matrix Computations).

    Infinite for a singular matrix: one whose σ_r is at most max(m, n)·2⁻⁵²·σ₁, its rounding error.
    """
    largest, smallest = layer.spectrum[[0, -1]]
    rounding = max(layer.shape) * np.finfo(np.float64).eps * largest
    return np.inf if smallest <= rounding else largest / smallest


@_metric("Gini coefficient", "elements")
def gini(layer: Layer) -> Any:
    """Gini coefficient of the N magnitudes a in ascending order, Σ(2i − N − 1)aᵢ / (N Σa).

    From 0, all equal, toward 1, sparse (Hurley and Rickard 2009). 0 if all elements are 0.
    """
    sizes = np.sort(layer.magnitudes)
    places = 2 * np.arange(1, sizes.size + 1) - sizes.size - 1
    total = sizes.sum()
    return 0.0 if total == 0 else places @ sizes / (sizes.size * total)


@_metric("Hoyer sparsity", "elements")
def hoyer(layer: Layer) -> Any:
    """Hoyer's sparsity of the N elements, (√N − ‖x‖₁/‖x‖₂) / (√N − 1) (Hoyer 2004).

    From 0, all magnitudes equal, to 1, one element that is not 0.
    """
    root = np.sqrt(layer.magnitudes.size)
    return (root - layer.magnitudes.sum() / frobenius(layer)) / (root - 1)


@_metric("fraction of unchanged elements", "elements")
def unchanged(layer: Layer) -> float:
    """Fraction of the elements with the same bits as in the row before."""
    return layer.unchanged


def layer_of(
    factors: Sequence[Wide],
    before: Sequence[Wide] | None,
    wanted: Collection[str],
    *,
    is_update: bool = False,
) -> Layer:
    """Prepare a matrix, a vector or a product of two matrices for some metrics.

    The full rank of a product is at most the common dimension of its factors. Its singular values
    are those of the product of their two triangular factors R.

    Parameters
    ----------
    factors : sequence of ndarray of float64
        One matrix or vector, or the two factors of a product.
    before : sequence of ndarray of float64, optional
        The same at the row before.
    wanted : collection of str
        Names in `METRICS`.
    is_update : bool
        Use the change since the row before; NaN if there is none.
    """
    needs = {METRICS[name].of for name in wanted}
    first, last = factors[0], factors[-1]
    is_product = len(factors) > 1
    elements: Any = None
    same = np.nan
    if "elements" in needs or not is_product:
        elements = reduce(np.matmul, factors)
        if before is not None:
            old = reduce(np.matmul, before)
            same = float((unsigned_view(elements) == unsigned_view(old)).mean())
        if is_update:
            elements = elements - (np.nan if before is None else old)
    core = elements
    if is_product:
        left, right = (np.asarray(np.linalg.qr(factor, mode="r")) for factor in (first, last.T))
        core = left @ right.T
    decompose = is_product or ("spectrum" in needs and first.ndim > 1)
    return Layer(
        shape=(*first.shape[:1], *last.shape[1:]),
        elements=elements,
        singular_values=_singular_values(core) if decompose else None,
        unchanged=same,
    )


def _singular_values(matrix: Wide) -> Wide:
    """Singular values, the largest first; NaN if values are not finite."""
    if not np.isfinite(matrix).all():
        return np.full(min(matrix.shape), np.nan)
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), np.float64)


CIRCUITS = {"ov": ("value", "output"), "qk": ("query", "key")}
"""Roles of the two weights of each circuit."""

_LAYER = "{layer}"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Names and layout of the attention weights of a model.

    Attributes
    ----------
    query, key, value, output : str
        Names of the parameters, with ``{layer}`` in place of the number of the layer. Weights of
        one name share that parameter: its output dimensions hold them one after another.
    heads : int
    kv_heads : int, optional
        Number of heads of key and value, of which each serves as many consecutive heads. Default:
        `heads`.
    transposed : bool
        True for weights of shape (output, input), as of ``torch.nn.Linear``. False for (input,
        output), as of GPT-2.

    Raises
    ------
    InvalidArgument
        For a field of another type, or if `kv_heads` does not divide `heads`.

    Examples
    --------
    >>> llama = Attention(
    ...     query="model.layers.{layer}.self_attn.q_proj.weight",
    ...     key="model.layers.{layer}.self_attn.k_proj.weight",
    ...     value="model.layers.{layer}.self_attn.v_proj.weight",
    ...     output="model.layers.{layer}.self_attn.o_proj.weight",
    ...     heads=32,
    ...     kv_heads=8,
    ... )
    """

    query: str
    key: str
    value: str
    output: str
    heads: Count
    kv_heads: Count | None = None
    transposed: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heads % (self.kv_heads or self.heads):
            raise InvalidArgument(
                f"got kv_heads={self.kv_heads} for heads={self.heads}, expected a divisor"
            )

    def part(self, role: str, head: int, weight: Array) -> Array:
        """Columns of a weight that belong to a head, (model, head size).

        Parameters
        ----------
        role : {'query', 'key', 'value', 'output'}
            For ``output`` the transpose: rows of a weight (head size, model).
        head : int
        weight : ndarray
            Whole parameter.

        Raises
        ------
        InvalidArgument
            If the number of heads does not divide the length of the parameter.
        """
        columns = weight if self.transposed == (role == "output") else weight.T
        shared = self.kv_heads or self.heads
        heads = {"query": self.heads, "key": shared, "value": shared, "output": self.heads}
        same = [other for other in heads if getattr(self, other) == getattr(self, role)]
        total = sum(heads[other] for other in same)
        size, rest = divmod(columns.shape[1], total)
        if rest:
            raise InvalidArgument(
                f"{getattr(self, role)} has {columns.shape[1]} dimensions for {total} heads of "
                f"{', '.join(same)}, expected a multiple; correct heads, kv_heads or transposed"
            )
        before = sum(heads[other] for other in same[: same.index(role)])
        first = (before + head * heads[role] // self.heads) * size
        return columns[:, first : first + size]


def circuits_of(
    attributes: Mapping[str, Any], of: str, attention: Attention
) -> dict[str, tuple[str, str]]:
    """Names of the two weights of each layer's circuits, by the name of the attention module.

    Parameters
    ----------
    attributes : mapping
        Root attributes of a run that holds all parameters.
    of : {'ov', 'qk'}
    attention : Attention

    Raises
    ------
    InvalidArgument
        If no parameter has the name of a weight, or the heads do not divide its length.
    """
    first, second = (getattr(attention, role) for role in CIRCUITS[of])
    named = re.compile(re.escape(first).replace(re.escape(_LAYER), r"(\d+)"))
    layers = [match[1] for name in _names(attributes) if (match := named.fullmatch(name))]
    if not layers or _LAYER not in first:
        raise InvalidArgument(
            f"no parameter is named {first!r} with a number in place of {_LAYER}; list the names "
            "with: trajstore info"
        )
    circuits = {}
    before, _, after = attention.output.partition(_LAYER)
    for layer in layers:
        weights = (first.replace(_LAYER, layer), second.replace(_LAYER, layer))
        for role, name in zip(CIRCUITS[of], weights, strict=True):
            shape = parameter_entry(attributes, name)["shape"]
            attention.part(role, 0, np.broadcast_to(0.0, shape))  # raises if heads do not fit
        circuits[f"{before}{layer}{after.removesuffix('.weight').rpartition('.')[0]}"] = weights
    return circuits


def gpt2_attention(attributes: Mapping[str, Any]) -> Attention:
    """Attention of a GPT-2 of transformers, from the names of its parameters and its config.

    Raises
    ------
    InvalidArgument
        For any other model.
    """
    last = "h.0.attn.c_attn.weight"
    prefix = next((name[: -len(last)] for name in _names(attributes) if name.endswith(last)), None)
    heads = attributes.get("model_config", {}).get("config", {}).get("n_head")
    if prefix is None or heads is None:
        raise InvalidArgument(
            "the run is not of a GPT-2 of transformers, so the names of its attention weights are "
            "unknown; pass attention=analysis.Attention(query=…, key=…, value=…, output=…, heads=…)"
        )
    joint = f"{prefix}h.{_LAYER}.attn.c_attn.weight"
    output = f"{prefix}h.{_LAYER}.attn.c_proj.weight"
    return Attention(
        query=joint, key=joint, value=joint, output=output, heads=heads, transposed=False
    )


def _names(attributes: Mapping[str, Any]) -> list[str]:
    return [entry["name"] for entry in parameter_table(attributes)]


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
    chosen_metrics = _wanted(metrics)
    if attention is not None and of not in CIRCUITS:
        raise InvalidArgument(f"got attention for of={of!r}, expected {' or '.join(CIRCUITS)}")
    ds = scan.ds
    rows = np.unique(input_checks.rows_of_steps(ds, steps))
    rows = rows[np.isin(scan.steps[rows], scan.window)]
    units = {True: "nat" if of == "grad" else "1", False: "1"}
    variables = {
        name: ResultVariable(
            "f8", f"{metric.label} of each {_SUBJECTS[of]}", units[metric.has_units]
        )
        for name, metric in chosen_metrics.items()
    }
    if [*chosen_metrics] == ["frobenius"] and (norms := recorded_norm(ds, of)):
        input_checks.require_variables(ds, norms)
        recorded = ds[norms].transpose("step", "parameter").isel(step=rows).astype(np.float64)
        return xr.Dataset({"frobenius": recorded.assign_attrs(variables["frobenius"].attributes)})
    entries = parameter_table(ds.attrs)
    pairs = of == "update" or "unchanged" in chosen_metrics
    read = np.union1d(rows, np.maximum(rows - 1, 0)) if pairs else rows
    is_chosen, has_before = np.isin(read, rows), (read > 0) & pairs
    kind = "grad" if of == "grad" else "W"
    stored = {"W": kind, "params": VECTORS[kind]}
    needed = [stored[name] for name in {entry["variable"] for entry in entries}]
    input_checks.require_variables(ds, *needed)
    part = ds[needed].isel(step=read)

    def measured(
        split: Callable[..., list[Sequence[Array]]], names: Sequence[str], size: int = 1
    ) -> da.Array:
        """Metrics of some parameters, (step, size); `split` makes the factors of each of `size`."""
        matrices = (parameter_dataset(part, name)[kind].data for name in names)
        # Matrices of different shapes are measured together: each is one chunk, named alike.
        blocks = [matrix.rechunk({1: -1, 2: -1}) for matrix in matrices]
        sources = [ConsecutiveRows(blocks=matrix) for matrix in blocks] if pairs else blocks
        metrics_of_matrices = measure(
            _measured,
            *sources,
            is_chosen,
            has_before,
            dims=("step", "parameter"),
            dtype=variables,
            sizes={"parameter": size},
            by_row=True,
            split=split,
            pairs=pairs,
            is_update=of == "update",
            wanted=tuple(variables),
        )
        return (
            metrics_of_matrices
            if is_chosen.all()
            else metrics_of_matrices[np.flatnonzero(is_chosen)]
        )

    if of in CIRCUITS:
        known = attention or gpt2_attention(ds.attrs)
        circuits = circuits_of(ds.attrs, of, known)
        split: Callable[..., Any] = partial(_heads, attention=known, roles=CIRCUITS[of])
        metrics_of_all = [measured(split, weights, known.heads) for weights in circuits.values()]
        names = [f"{block}.head.{head}" for block in circuits for head in range(known.heads)]
    else:
        names = [entry["name"] for entry in entries]
        splits = (partial(_whole, is_matrix=len(entry["shape"]) > 1) for entry in entries)
        metrics_of_all = [
            measured(split, [name]) for split, name in zip(splits, names, strict=True)
        ]
    coords = {"step": scan.steps[rows], "parameter": names}
    return table(da.concatenate(metrics_of_all, axis=1), variables, ("step", "parameter"), coords)


def _wanted(metrics: str | Sequence[str] | None) -> dict[str, Metric]:
    names = [metrics] if isinstance(metrics, str) else [*(METRICS if metrics is None else metrics)]
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        hint = did_you_mean(unknown[0], METRICS) if unknown else ""
        known = ", ".join(METRICS)
        raise InvalidArgument(f"got metrics={metrics!r}{hint}, expected one or more of {known}")
    return {name: METRICS[name] for name in names}


def _measured(
    *arguments: Any, split: Callable[..., Any], pairs: bool, is_update: bool, wanted: Sequence[str]
) -> dict[str, Any]:
    """Metrics of the layers of one step; NaN for a step that only precedes a chosen one."""
    *values, is_chosen, has_before = arguments
    if not is_chosen:
        return dict.fromkeys(wanted, np.nan)
    wide = [each.astype(np.float64) for each in values]
    now = split(*wide[:: 1 + pairs])
    before = split(*wide[1::2]) if has_before else [None] * len(now)
    layers = [
        layer_of(factors, factors_before, wanted, is_update=is_update)
        for factors, factors_before in zip(now, before, strict=True)
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
