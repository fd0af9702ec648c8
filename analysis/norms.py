"""Lengths of vectors over the hidden dimension."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from analysis import require
from analysis.steps import between_rows
from trajstore.errors import InvalidArgument

__all__ = ["displacement", "grad_norms", "vector_norm"]


def vector_norm(vectors: npt.NDArray[Any], order: float = 2) -> npt.NDArray[Any]:
    """Norm over the last axis, accumulated in float64.

    The square of a 16-bit value is exact in float64, and so, but for the widest spreads of
    exponents, is a sum of them: the result does not depend on the order of summation.

    Parameters
    ----------
    vectors : ndarray, (…, hidden)
    order : {1, 2, inf}

    Returns
    -------
    ndarray, (…)
        float64.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        wide = vectors.astype(np.float64, copy=False)
    if order == 2:
        return np.asarray(np.sqrt(np.einsum("...h,...h->...", wide, wide)))
    if order == 1:
        return np.asarray(np.abs(wide).sum(-1))
    return np.asarray(np.abs(wide).max(-1))


def _check_order(order: float) -> float:
    if order not in (1, 2, np.inf):
        raise InvalidArgument(f"got a norm of order {order!r}, expected 1, 2 or inf")
    return float(order)


def _result_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")


def _over_hidden(vectors: xr.DataArray, order: float, result: np.dtype[Any]) -> xr.DataArray:
    def kernel(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):  # beyond float32 a norm is inf, as it should be
            return vector_norm(block, order).astype(result)

    norms: xr.DataArray = xr.apply_ufunc(
        kernel,
        vectors,
        input_core_dims=[["hidden"]],
        dask="parallelized",
        output_dtypes=[result],
        keep_attrs=False,
    )
    return norms


def grad_norms(ds: xr.Dataset, ord: float = 2) -> xr.DataArray:
    """Norm of each token's gradient, ‖grad_t,i‖.

    Parameters
    ----------
    ds : Dataset
        With ``grad`` (step, token, hidden).
    ord : {1, 2, inf}

    Returns
    -------
    DataArray, float32 (step, token)
        Accumulated in float64. NaN at row 0, where no step has been taken.

    Raises
    ------
    VariableNotRecorded
        If the run holds no gradients.
    InvalidArgument
        For another order.

    Examples
    --------
    >>> norms = grad_norms(ds)                    # doctest: +SKIP
    >>> norms.sel(step=1).mean().compute()        # doctest: +SKIP
    """
    order = _check_order(ord)
    require.variables(ds, "grad")
    norms = _over_hidden(ds["grad"], order, _result_dtype(ds["grad"].dtype))
    label = "inf" if np.isinf(order) else f"{order:.0f}"
    return norms.rename("grad_norms").assign_attrs(
        long_name=f"L{label} norm of the gradient",
        units=ds["grad"].attrs.get("units", "nat"),
    )


def displacement(ds: xr.Dataset, since: int | Literal["previous"] = 0) -> xr.DataArray:
    """Distance of each token from where it was, ‖W_t − W_since‖₂.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    since : int or 'previous'
        Step number of the reference, or the row before each.

    Returns
    -------
    DataArray, float32 (step, token)
        Differences and their norm in float64. With ``since='previous'`` it has one row fewer, and
        each has the step of the later of its two.

    Raises
    ------
    StepNotFound
        If the run has no row of that step.
    InvalidArgument
        If `since` is neither.

    Examples
    --------
    >>> displacement(ds).isel(step=-1).mean().compute()   # doctest: +SKIP
    """
    require.variables(ds, "W")
    W = ds["W"]
    result = _result_dtype(W.dtype)

    def kernel(earlier: npt.NDArray[Any], later: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return vector_norm(later.astype(np.float64) - earlier).astype(result)

    if since == "previous":
        distance = between_rows(W, kernel, result)
        origin = "the previous row"
    elif isinstance(since, int | np.integer):
        distance = xr.apply_ufunc(
            kernel,
            W.isel(step=require.row_of_step(ds, int(since)), drop=True),
            W,
            input_core_dims=[["hidden"], ["hidden"]],
            dask="parallelized",
            output_dtypes=[result],
            keep_attrs=False,
        ).transpose("step", "token")
        origin = f"step {since}"
    else:
        raise InvalidArgument(f"got since={since!r}, expected a step number or 'previous'")
    return distance.rename("displacement").assign_attrs(
        long_name=f"distance from {origin}", units=W.attrs.get("units", "1")
    )
