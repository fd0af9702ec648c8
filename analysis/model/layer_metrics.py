"""Metrics of one matrix of a model at one step, computed in float64.

Definitions equal those of pico-analyze where it has them: norm (here ``frobenius``), PER
(``effective_rank_share``), condition number, Gini and Hoyer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from trajstore.analysis.scan.block_tasks import Wide
from trajstore.values.native_types import unsigned_view

__all__ = ["METRICS", "Layer", "Metric", "layer_of"]


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
        left, right = (np.asarray(np.linalg.qr(one, mode="r")) for one in (first, last.T))
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
