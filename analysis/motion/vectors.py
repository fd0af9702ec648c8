"""Other vectors in place of W: a gradient of each token, or one vector per step."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.motion.collective import centroid, per_population
from trajstore.analysis.motion.velocity import displacements
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array
from trajstore.analysis.scan.input_checks import Fact
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.populations import chosen_populations, populations, row_vectors
from trajstore.schema import variable
from trajstore.values.native_types import unsigned_view

OF_TOKENS = ("grad", "exp_avg", "exp_avg_sq", "delta")
OF_POPULATIONS = ("centroid", "largest_cluster")
VECTORS = (*OF_TOKENS, "hidden_mean", *OF_POPULATIONS)


def _largest_cluster_kernel(now: Array) -> dict[str, Any]:
    bits = unsigned_view(np.ascontiguousarray(now))
    whole = bits.view(f"V{bits.shape[1] * bits.itemsize}").ravel()
    _, first, sizes = np.unique(whole, return_index=True, return_counts=True)
    largest = np.lexsort((first, -sizes))[0]
    alone = sizes[largest] == 1
    return {"vector": now[first[largest]].astype(np.float64) * (np.nan if alone else 1)}


@checks_types
def vectors(ds: xr.Dataset, of: str, population: str | None = None) -> xr.Dataset:
    """A Dataset with another vector in place of W, for every quantity and figure of W.

    Parameters
    ----------
    ds : Dataset
        A run.
    of : str
        Per token: ``grad``, ``exp_avg``, ``exp_avg_sq``, or ``delta``, the change since the row
        before, recorded or computed. Per step: ``hidden_mean``, the recorded h̄. Per population:
        ``centroid``, the mean of W, or ``largest_cluster``, the vector that most tokens share bit
        for bit (of several, that of the first token; NaN where all tokens differ).
    population : str, optional
        Population of the centroid or the largest cluster. Default: dead and live tokens, each with
        a vector; all tokens if dead tokens are not labeled.

    Returns
    -------
    Dataset
        ``W`` (step, token, hidden) with the vectors, and the variables of `ds` without tokens. For
        one vector per step or population, ``token`` counts the vectors, and ``token_text`` names
        them. A variable without a value at step 0, such as the gradient, has rows from step 1.

    Raises
    ------
    InvalidArgument
        For an unknown vector or population, or a population of a vector that has none.
    VariableNotRecorded
        If the run does not hold the variable.

    Examples
    --------
    >>> means = vectors(ds, "centroid")
    >>> means.token_text.values.tolist(), means.traj.path_efficiency().path_length.values.round(3)
    (['dead', 'live'], array([[0.203, 0.195]]))
    """
    if of not in VECTORS:
        raise InvalidArgument(
            f"got vectors={of!r}{did_you_mean(of, VECTORS)}, expected one of {', '.join(VECTORS)}"
        )
    if population is not None and of not in OF_POPULATIONS:
        raise InvalidArgument(
            f"got population={population!r} for {of}, expected it for one of "
            f"{', '.join(OF_POPULATIONS)}; leave it out"
        )
    scan = Scan(ds)
    ds = row_vectors(ds)
    coords: dict[Any, Any]
    if of in OF_TOKENS:
        found = _per_token(scan, of)
        coords = {
            name: values for name, values in ds.coords.items() if set(values.dims) == {"token"}
        }
    else:
        found, coords = _per_step(scan, of, population)
    if of not in OF_POPULATIONS and variable(of).row0 == "nan":
        found = found.sel(step=found["step"].values[found["step"].values > 0])
    others = ds.drop_vars([name for name, each in ds.variables.items() if "token" in each.dims])
    label = of if population is None else f"{of} of {population}"
    result = others.sel(step=found["step"]).assign_coords(coords)
    result = result.assign(W=found.variable).assign_attrs(vectors=label)
    result.encoding = dict(ds.encoding)
    return result


def _per_token(scan: Scan, of: str) -> xr.DataArray:
    if of == "delta" and of not in scan.ds:
        points = scan.recorded()
        return scan.between_rows(points, displacements, np.float64).assign_attrs(units=scan.units)
    input_checks.variables(scan.ds, of)
    return scan.variable(of)


def _per_step(scan: Scan, of: str, population: str | None) -> tuple[xr.DataArray, dict[str, Any]]:
    """One vector per step or population, (step, token, hidden), with its coordinates."""
    if of == "hidden_mean":
        input_checks.variables(scan.ds, of)
        found = scan.ds[of].transpose("step", "hidden").expand_dims(token=[0], axis=1)
        # The unit of W is that of a weight; axes would be labeled with it.
        found.attrs["units"] = of
        return found, {"token": [0], "token_text": ("token", [of]), f"is_{of}": ("token", [True])}
    names, groups = populations(scan.ds)
    if population is not None:
        names, groups = chosen_populations(scan.ds, population)
    elif "is_dead" in scan.ds.coords:
        names, groups = names[:2], groups[:2]
    else:
        names = names[:1]
    names = [name for name, group in zip(names, groups, strict=False) if group.any()] or names
    if of == "centroid":
        found = centroid(scan, names)["centroid"]
    else:
        shape = f"({scan.variable('W').sizes['hidden']},)f8"
        facts = {"vector": Fact(shape, "vector of the largest cluster", scan.units)}
        found = per_population(scan, names, _largest_cluster_kernel, facts, motion=False)["vector"]
    found = found.drop_vars("population").rename(population="token")
    masks: dict[str, Any] = {}
    if population is None and "is_dead" in scan.ds.coords:
        masks = {"is_dead": ("token", [name == "dead" for name in names])}
    return found, {"token": np.arange(len(names)), "token_text": ("token", names), **masks}


def vectors_named(ds: xr.Dataset, text: str | None) -> xr.Dataset:
    """`vectors` by a text such as ``grad`` or ``centroid:all``; without one, `ds` itself."""
    if text is None:
        return ds
    of, _, population = text.partition(":")
    return vectors(ds, of, population or None)
