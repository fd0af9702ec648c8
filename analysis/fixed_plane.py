"""Tokens' positions in one fixed plane, the same at every step."""

from __future__ import annotations

from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr
from dask.graph_manipulation import bind

from analysis import input_checks
from analysis.consecutive_rows import tiles
from analysis.streaming_scan import Scan
from trajstore.errors import InvalidArgument

__all__ = ["build_positions", "build_principal_plane", "principal_plane"]

Array = npt.NDArray[Any]


def _products(block: Array) -> npt.NDArray[np.float64]:
    """Sums of products of all elements, and of the elements, of the finite vectors: (1, D+1, D+1).

    Its last row and column are the sums of the elements, and how many vectors there are.
    """
    rows, tokens, hidden = block.shape
    total = np.zeros((hidden + 1, hidden + 1))
    for part in tiles(rows, tokens, hidden):
        vectors = block[:, part].reshape(-1, hidden).astype(np.float64)
        vectors = vectors[np.isfinite(vectors).all(-1)]
        total[:-1, :-1] += vectors.T @ vectors
        sums = vectors.sum(0)
        total[-1, :-1] += sums
        total[:-1, -1] += sums
        total[-1, -1] += len(vectors)
    return total[None, None]


def _plane(total: Array, first: Array) -> npt.NDArray[np.float64]:
    """Origin, two axes and the shares of the spread along them: (4, D), but at least two columns.

    The last row begins with the shares. An axis points to where its longest element is
    positive.
    """
    count, hidden = total[-1, -1], total.shape[0] - 1
    result = np.full((4, max(2, hidden)), np.nan)
    if not count:
        return result
    mean = total[-1, :-1] / count
    spread = total[:-1, :-1] / count - np.outer(mean, mean)
    given = first[:hidden] if first.size else np.zeros(hidden)
    # Along a given axis nothing is left to be found.
    away = np.eye(hidden) - np.outer(given, given)
    _, vectors = np.linalg.eigh(away @ spread @ away)
    axes = vectors.T[::-1]
    axes = np.stack([given, axes[0]]) if first.size else axes[:2]
    if len(axes) < 2:
        axes = np.concatenate([axes, np.zeros((1, hidden))])
    longest = np.take_along_axis(axes, abs(axes).argmax(-1)[:, None], -1)
    axes = axes * np.where(longest < 0, -1, 1)
    whole = np.trace(spread)
    shares = np.einsum("ai,ij,aj->a", axes, spread, axes)
    result[0, :hidden], result[1:3, :hidden] = mean, axes
    result[3, :2] = shares / whole if whole > 0 else 0
    return result


def _project(block: Array, plane: Array) -> npt.NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        origin, axes = plane[0, : block.shape[2]], plane[1:3, : block.shape[2]]
        return np.asarray((block.astype(np.float64) - origin) @ axes.T, np.float32)


def principal_plane(
    ds: xr.Dataset, plane: Literal["principal", "hidden_mean"] = "principal"
) -> xr.Dataset:
    """Positions of all tokens at all steps in the plane in which they are spread the most.

    The plane is that of the first two principal components of W over all tokens and steps, so it
    stands still while the tokens move. The blocks are read twice, for the plane and for the
    positions.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden); for the plane of h̄, with ``hidden_mean`` (step, hidden).
    plane : {'principal', 'hidden_mean'}
        With ``'hidden_mean'`` the first axis is the direction of h̄, the mean over the steps, and
        the second is that of the largest spread orthogonal to it.

    Returns
    -------
    Dataset
        ``position``, float32 (step, token, axis), from the mean of W; ``axes``, float64
        (axis, hidden), of length 1; ``origin``, float64 (hidden); ``share``, float64 (axis), of the
        whole variance. Vectors that are not finite have no part in the plane, and no position.

    Raises
    ------
    InvalidArgument
        For another plane.
    VariableNotRecorded
        Without W, or h̄ where it is asked for.

    Examples
    --------
    >>> found = principal_plane(ds).compute()
    >>> found.position.dims, abs(found.share.values).round(3)
    (('step', 'token', 'axis'), array([0.987, 0.013]))
    """
    return build_principal_plane(Scan(ds), plane)


def build_principal_plane(
    history: Scan, plane: Literal["principal", "hidden_mean"] = "principal"
) -> xr.Dataset:
    """`principal_plane` of a prepared Dataset."""
    if plane not in ("principal", "hidden_mean"):
        raise InvalidArgument(f"got plane={plane!r}, expected 'principal' or 'hidden_mean'")
    input_checks.variables(history.ds, "W")
    blocks = history.blocks("W")
    hidden = blocks.shape[2]
    first = da.asarray(np.empty(0))
    if plane == "hidden_mean":
        input_checks.variables(history.ds, "hidden_mean")
        mean = da.nanmean(da.asarray(history.ds["hidden_mean"].data).astype(np.float64), axis=0)
        first = (mean / da.linalg.norm(mean)).rechunk(-1)
    products = blocks.map_blocks(
        _products,
        new_axis=3,
        chunks=(*((1,) * count for count in blocks.numblocks[:2]), (hidden + 1,), (hidden + 1,)),
        dtype=np.float64,
        meta=np.empty((0, 0, 0, 0)),
    ).sum(axis=(0, 1))
    found = da.blockwise(
        _plane,
        "pd",
        products,
        "ab",
        first,
        "c",
        new_axes={"p": 4, "d": max(2, hidden)},
        concatenate=True,
        dtype=np.float64,
        meta=np.empty((0, 0)),
    )
    # Read again when the plane is known: all of W would have to be held until then.
    unit = {"units": history.units}
    return xr.Dataset(
        {
            "position": _positions(history, bind(blocks, found), found),
            "axes": (
                ("axis", "hidden"),
                found[1:3, :hidden],
                {"long_name": "directions of the plane"},
            ),
            "origin": ("hidden", found[0, :hidden], {"long_name": "mean of W", **unit}),
            "share": ("axis", found[3, :2], {"long_name": "share of the variance", "units": "1"}),
        }
    )


def build_positions(history: Scan, plane: xr.Dataset) -> xr.DataArray:
    """Positions of all tokens of a prepared Dataset in a plane that is known.

    Parameters
    ----------
    history : Scan
        With ``W``; its rows and tokens need not be those that the plane was made of.
    plane : Dataset
        ``axes`` (axis, hidden) and ``origin`` (hidden), as of `principal_plane`, computed.

    Returns
    -------
    DataArray, float32 (step, token, axis)
    """
    known = np.concatenate([plane["origin"].values[None], plane["axes"].values])
    return _positions(history, history.blocks("W"), known)


def _positions(history: Scan, blocks: da.Array, plane: da.Array | Array) -> xr.DataArray:
    position = blocks.map_blocks(
        _project,
        plane,
        chunks=(*blocks.chunks[:2], (2,)),
        dtype=np.float32,
        meta=np.empty((0, 0, 0), np.float32),
    )
    return history.wrap(position, "W", dims=("step", "token", "axis")).assign_attrs(
        long_name="position in the plane, from the mean of W", units=history.units
    )
