"""Velocity, norms and displacement of vectors, and Datasets of other vectors in place of W."""

from __future__ import annotations

from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.collective import centroid, per_population
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import DIMS, Along, Array, along, measure
from trajstore.analysis.scan.input_checks import hold_only_changes
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable
from trajstore.analysis.scan.rows import measure_rows
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.populations import chosen_populations, populations, row_vectors
from trajstore.schema import variable
from trajstore.values.native_types import unsigned_view
from trajstore.values.norms import result_dtype


def displacements(later: npt.NDArray[Any], earlier: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Change between two rows, for `Scan.between_rows`."""
    return np.asarray(np.subtract(later, earlier, dtype=np.float64))


def _velocity(scan: Scan) -> xr.DataArray:
    """Velocity in float64, (step, token, hidden)."""
    spacing = scan.spacing()
    return scan.between_rows(scan.recorded(), displacements, np.float64) / spacing


def _result(da: xr.DataArray, scan: Scan, name: str, long_name: str) -> xr.DataArray:
    dtype = result_dtype(scan.recorded().blocks.dtype)
    return (
        da.astype(dtype)
        .rename(name)
        .assign_attrs(long_name=long_name, units=f"{scan.units} per step")
    )


@quantity()
def velocity(scan: Scan) -> xr.DataArray:
    """Change of W per optimizer step, ΔW_t/(s_t − s_{t−1}).

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step.

    Returns
    -------
    DataArray, float32 (step, token, hidden)
        One row fewer than `ds`. Each has the step of the later of its two rows.

    Examples
    --------
    >>> velocity(ds).sel(step=1, token=ord("e")).values
    array([ 0.0078125,  0.0078125, -0.0078125,  0.0078125], dtype=float32)
    """
    return _result(_velocity(scan), scan, "velocity", "change of W per step")


@quantity(measures=("step_norm",))
def speed(scan: Scan) -> xr.DataArray:
    """Length of the velocity, ‖ΔW_t‖₂/(s_t − s_{t−1}).

    Parameters
    ----------
    ds : Dataset
        With ``W``, a stored ``W_step_norm``, or ``delta`` of every step.

    Returns
    -------
    DataArray, float32 (step, token)
        One row fewer than `ds`.

    Examples
    --------
    >>> speed(ds).sel(step=[1, 14], token=ord("e")).values  # unchanged at step 14
    array([0.015625, 0.      ], dtype=float32)
    """
    norm = scan.step_norm()
    return (
        (norm / scan.spacing())
        .astype(norm.dtype)
        .rename("speed")
        .assign_attrs(long_name="length of the velocity", units=f"{scan.units} per step")
    )


@quantity()
def acceleration(scan: Scan) -> xr.DataArray:
    """Change of the velocity from one recorded row to the next.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step.

    Returns
    -------
    DataArray, float32 (step, token, hidden)
        Two rows fewer than `ds`. Units of W per step: the velocities are divided by the spacing
        between rows, but their difference is not.

    Examples
    --------
    >>> acceleration(ds).sel(step=14, token=ord("e")).values  # the step at which it stops
    array([-0.0078125, -0.0078125,  0.0078125, -0.0078125], dtype=float32)
    """
    velocities = _velocity(scan)
    change = velocities.isel(step=slice(1, None)) - velocities.isel(step=slice(None, -1)).drop_vars(
        "step"
    )
    return _result(change, scan, "acceleration", "change of the velocity between rows")


OF_TOKENS = ("grad", "exp_avg", "exp_avg_sq", "delta")
OF_POPULATIONS = ("centroid", "largest_cluster")
VECTORS: tuple[str, ...] = (*OF_TOKENS, "hidden_mean", *OF_POPULATIONS)


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
        W = _per_token(scan, of)
        coords = {
            name: values for name, values in ds.coords.items() if set(values.dims) == {"token"}
        }
    else:
        W, coords = _per_step(scan, of, population)
    if of not in OF_POPULATIONS and variable(of).row0 == "nan":
        W = W.sel(step=W["step"].values[W["step"].values > 0])
    others = ds.drop_vars([name for name, each in ds.variables.items() if "token" in each.dims])
    label = of if population is None else f"{of} of {population}"
    result = others.sel(step=W["step"]).assign_coords(coords)
    result = result.assign(W=W.variable).assign_attrs(vectors=label)
    result.encoding = dict(ds.encoding)
    return result


def _per_token(scan: Scan, of: str) -> xr.DataArray:
    if of == "delta" and of not in scan.ds:
        points = scan.recorded()
        return scan.between_rows(points, displacements, np.float64).assign_attrs(units=scan.units)
    input_checks.require_variables(scan.ds, of)
    return scan.variable(of)


def _per_step(scan: Scan, of: str, population: str | None) -> tuple[xr.DataArray, dict[str, Any]]:
    """One vector per step or population, (step, token, hidden), with its coordinates."""
    if of == "hidden_mean":
        input_checks.require_variables(scan.ds, of)
        W = scan.ds[of].transpose("step", "hidden").expand_dims(token=[0], axis=1)
        # The unit of W is that of a weight; axes would be labeled with it.
        W.attrs["units"] = of
        return W, {"token": [0], "token_text": ("token", [of]), f"is_{of}": ("token", [True])}
    names, groups = populations(scan.ds)
    if population is not None:
        names, groups = chosen_populations(scan.ds, population)
    elif "is_dead" in scan.ds.coords:
        names, groups = names[:2], groups[:2]
    else:
        names = names[:1]
    names = [name for name, group in zip(names, groups, strict=False) if group.any()] or names
    if of == "centroid":
        W = centroid(scan, names)["centroid"]
    else:
        shape = f"({scan.variable('W').sizes['hidden']},)f8"
        variables = {"vector": ResultVariable(shape, "vector of the largest cluster", scan.units)}
        W = per_population(scan, names, _largest_cluster_kernel, variables, motion=False)["vector"]
    W = W.drop_vars("population").rename(population="token")
    masks: dict[str, Any] = {}
    if population is None and "is_dead" in scan.ds.coords:
        masks = {"is_dead": ("token", [name == "dead" for name in names])}
    return W, {"token": np.arange(len(names)), "token_text": ("token", names), **masks}


def vectors_named(ds: xr.Dataset, text: str | None) -> xr.Dataset:
    """`vectors` by a text such as ``grad`` or ``centroid:all``; without one, `ds` itself."""
    if text is None:
        return ds
    of, _, population = text.partition(":")
    return vectors(ds, of, population or None)


def check_order(order: float) -> float:
    """Order of a norm as a number.

    Raises
    ------
    InvalidArgument
        If it is not 1, 2 or inf.
    """
    if order not in (1, 2, np.inf):
        raise InvalidArgument(f"got a norm of order {order!r}, expected 1, 2 or inf")
    return float(order)


def order_label(order: float) -> str:
    """Label of a norm of the given order."""
    return "Linf" if np.isinf(order) else f"L{order:.0f}"


def _measured(scan: Scan, name: str, *reference: Along, order: float = 2) -> xr.DataArray:
    blocks = scan.blocks(name)
    dtype = result_dtype(blocks.dtype)
    data = measure(
        measure_rows, blocks, *reference, dims=("step", "token"), order=order, dtype=dtype
    )
    return scan.wrap(data, name)


@quantity()
def grad_norms(scan: Scan, ord: float = 2) -> xr.DataArray:
    """Norm of each token's gradient, ‖grad_t,i‖.

    Parameters
    ----------
    ds : Dataset
        With ``grad`` (step, token, hidden). For order 2, a stored ``grad_token_norm`` is used
        instead of the gradients.
    ord : {1, 2, inf}
        Order of the norm.

    Returns
    -------
    DataArray, float32 (step, token)
        Accumulated in float64. NaN at row 0, before the first step.

    Raises
    ------
    VariableNotRecorded
        If the run holds no gradients.
    InvalidArgument
        For any other order.

    Examples
    --------
    >>> norms = grad_norms(ds)  # lazy
    >>> norms.sel(step=1, token=[ord("e"), ord("z")]).values.round(4)
    array([0.0916, 0.0087], dtype=float32)
    """
    order = check_order(ord)
    ds = scan.ds
    source = "grad_token_norm" if order == 2 and "grad_token_norm" in ds else "grad"
    if source == "grad":
        norms = _measured(scan, source, order=order)
    else:
        norms = ds[source].transpose("step", "token").drop_attrs()
    return norms.rename("grad_norms").assign_attrs(
        long_name=f"{order_label(order)} norm of the gradient",
        units=ds[source].attrs.get("units", "nat"),
    )


def _cumulated(blocks: da.Array) -> da.Array:
    """Cumulative sum of the changes after the first row, in float64: W relative to it."""
    # The change that led to the first row is not part of the displacement from it.
    later = np.arange(len(blocks)) > 0
    begin = measure(_without_first, blocks, later, dims=DIMS, dtype=np.float64)
    return da.cumsum(begin, axis=0, method="sequential")


def _without_first(block: Array, later: Array) -> Array:
    wide = block.astype(np.float64)
    wide[~later.ravel()] = 0
    return wide


@quantity()
def displacement(scan: Scan, since: int | Literal["first", "previous"] = "first") -> xr.DataArray:
    """Distance of each token from a reference row, ‖W_t − W_since‖₂.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step. Without W, the changes are
        added in float64, with the precision of the file.
    since : int, 'first' or 'previous'
        Step of the reference, the first row, or the previous row. For ``'previous'``, a stored
        ``W_step_norm`` is used if the Dataset holds every row of the run.

    Returns
    -------
    DataArray, float32 (step, token)
        Computed in float64. With ``since='previous'`` it has one row fewer, and each row has the
        step of the later of its two rows.

    Raises
    ------
    StepNotFound
        If the run has no row for the step.
    InvalidArgument
        For any other `since`.

    Examples
    --------
    >>> displacement(ds).sel(step=[0, 1, 20], token=ord("e")).values.round(4)
    array([0.    , 0.0156, 0.2031], dtype=float32)
    """
    if since == "first":
        scan.require_rows(1, "displacement")
        since = int(scan.steps[0])
    if since == "previous":
        distance = scan.step_norm()
        origin = "the previous row"
    else:
        row = input_checks.row_of_step(scan.ds, int(since))
        distance = (
            _by_changes(scan, row)
            if hold_only_changes(scan.ds)
            else _measured(scan, "W", along(scan.blocks("W")[row], "token", "hidden"))
        )
        origin = f"step {since}"
    return distance.rename("displacement").assign_attrs(
        long_name=f"distance from {origin}", units=scan.units
    )


def _by_changes(scan: Scan, row: int) -> xr.DataArray:
    """Distance from a row, computed from recorded changes."""
    changes = scan.recorded()
    places = _cumulated(changes.blocks)
    data = measure(
        measure_rows,
        places,
        along(places[row], "token", "hidden"),
        dims=("step", "token"),
        order=2,
        dtype=np.float64,
    )
    return scan.wrap(data.astype(result_dtype(changes.blocks.dtype)), changes.variable)
