"""Points of floating-point types, and motion between them, one element at a time."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@functools.cache
def points_of(native: str) -> np.ndarray:
    """All magnitudes of a 16-bit type in order, float64, and the index of infinity."""
    patterns = np.arange(0x7F80 if native == "bfloat16" else 0x7C00, dtype=np.uint16)
    finite = patterns.view(TYPES[native]).astype(np.float64)
    return np.append(finite, 2 * finite[-1] - finite[-2])


def nearest(values: np.ndarray, native: str) -> np.ndarray:
    """The nearest point of each value, of two the one with the even pattern; NaN is NaN."""
    if native == "float32":
        return values
    points = points_of(native)
    result = np.empty(values.shape, np.float32)
    for at in np.ndindex(values.shape):
        value = float(values[at])
        if np.isnan(value) or np.isinf(value):
            result[at] = value
            continue
        above = int(np.searchsorted(points, abs(value)))
        if above == len(points):
            found = above - 1
        elif points[above] == abs(value):
            found = above
        else:
            down, up = abs(value) - points[above - 1], points[above] - abs(value)
            found = above - 1 if down < up or (down == up and above % 2) else above
        magnitude = np.inf if found == len(points) - 1 else points[found]
        result[at] = np.copysign(magnitude, value)
    return result


def spacing_of(value: float, native: str) -> float:
    """From a magnitude to the next point above it."""
    if not np.isfinite(value):
        return np.nan
    if native == "float32":
        exponent = np.frexp(abs(value))[1] if value else -125
        return float(2.0 ** (max(exponent, -125) - 24))
    points = points_of(native)
    at = int(np.searchsorted(points, abs(value)))
    return float(points[at + 1] - points[at])


def hops_of(cells: np.ndarray, native: str) -> np.ndarray:
    """ΔW/spacing of each element of float32 cells; 0 for equal bits, and for −0 and +0."""
    hops = np.zeros((len(cells) - 1, *cells.shape[1:]))
    for at in np.ndindex(hops.shape):
        before, after = cells[:-1][at], cells[1:][at]
        if before != after and before.tobytes() != after.tobytes():
            with np.errstate(invalid="ignore"):
                hops[at] = (float(after) - float(before)) / spacing_of(before, native)
    return hops


def regime_of(hops: np.ndarray) -> str:
    """Regime of one vector of hops."""
    size = np.abs(hops)
    with np.errstate(invalid="ignore"):
        if size.sum() == 0:
            return "unchanged"
        if size.sum() <= 1:
            return "single"
        if size.max() <= 1:
            return "neighbor"
        return "local" if np.sqrt((size**2).sum()) <= np.sqrt(hops.size) else "jump"
