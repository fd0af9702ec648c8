"""Distances and angles between populations."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr

from trajstore.analysis.motion.collective import centroid
from trajstore.analysis.scan.block_tasks import Wide, measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.values.norms import vector_norm


def _directions(vectors: Wide) -> Wide:
    return np.asarray(vectors / vector_norm(vectors)[..., None])


def _pairs(vectors: Wide) -> Wide:
    """Distance and angle in degrees of each pair, (…, 2, population, population)."""
    unit = _directions(vectors)
    distance = vector_norm(vectors[..., :, None, :] - vectors[..., None, :, :])
    apart = vector_norm(unit[..., :, None, :] - unit[..., None, :, :])
    together = vector_norm(unit[..., :, None, :] + unit[..., None, :, :])
    # Accurate for all angles, unlike the arc cosine.
    return np.stack([distance, np.degrees(2 * np.arctan2(apart, together))], -3)


@quantity()
def separation(scan: Scan, of: Literal["centroid", "displacement"] = "centroid") -> xr.Dataset:
    """Distance and angle between populations, and the direction of each.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    of : {'centroid', 'displacement'}
        Vector of a population: its centroid, or the net displacement of its centroid since the
        first row.

    Returns
    -------
    Dataset, float64
        ``separation`` (step, population, other_population), L2 distance between the two vectors,
        units of W; ``separation_angle``, the angle between them in degrees; ``direction`` (step,
        population, hidden), the vector divided by its length. Angle and direction are NaN for a
        vector of length zero, such as the displacement of the first row.

    Raises
    ------
    InvalidArgument
        If `of` is unknown.

    Examples
    --------
    >>> pair = separation(ds).sel(population="dead", other_population="live")
    >>> pair.separation.isel(step=[0, -1]).values.round(3)
    array([1.5  , 1.734])
    """
    scan.require_rows(1, "separation")
    center = centroid(scan)["centroid"]
    vectors = center if of == "centroid" else center - center[:1].drop_vars("step").squeeze("step")
    names = vectors["population"].values
    data = vectors.data.rechunk({1: -1, 2: -1})
    sizes = {"f": 2, "o": len(names)}
    pairs = measure(_pairs, "sfpo", (data, "sph"), dtype=np.float64, sizes=sizes)
    direction = measure(_directions, "sph", (data, "sph"), dtype=np.float64)
    dims = ("step", "population", "other_population")
    distance = Fact("f8", f"distance between {of}s", scan.units)
    found = {
        "separation": (dims, pairs[:, 0], distance),
        "separation_angle": (dims, pairs[:, 1], Fact("f8", f"angle between {of}s", "degree")),
        "direction": (vectors.dims, direction, Fact("f8", f"direction of the {of}")),
    }
    return dataset(found, {**dict(vectors.coords), "other_population": names})
