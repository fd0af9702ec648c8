"""Several runs: functions applied to each, their distance over time, and their first difference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, along, measure
from trajstore.analysis.scan.input_checks import RUN, with_own_attributes
from trajstore.analysis.scan.quantity import registered
from trajstore.analysis.scan.result_variables import ResultVariable, field, flag_attributes, table
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations import populations
from trajstore.schema import NAMES, VARIABLES, variables_of
from trajstore.store.reading.run_attributes import comparable_settings
from trajstore.values.native_types import unsigned_view

P = ParamSpec("P")
R = TypeVar("R")

_ARRAY = "result"


@checks_types
def each_run(ds: xr.Dataset) -> list[xr.Dataset]:
    """Runs of a Dataset, each as returned by `trajstore.open_run`.

    Parameters
    ----------
    ds : Dataset
        Several runs from `trajstore.open_runs`.

    Raises
    ------
    InvalidArgument
        If `ds` has no dimension run.

    Examples
    --------
    >>> import trajstore
    >>> [one.sizes["step"] for one in each_run(trajstore.open_runs(["gatsby.zarr"]))]
    [21]
    """
    if RUN not in ds.dims:
        raise InvalidArgument(
            "got one run, expected several along the dimension run; open them with "
            "open_runs('runs/*.zarr')"
        )
    along = [name for name, coordinate in ds.coords.items() if coordinate.dims == (RUN,)]
    return [
        with_own_attributes(ds.isel({RUN: number})).drop_vars(along)
        for number in range(ds.sizes[RUN])
    ]


@checks_types
def over_runs(
    ds: xr.Dataset,
    function: Callable[..., xr.DataArray | xr.Dataset],
    *arguments: Any,
    **options: Any,
) -> Any:
    """Apply a function of a single run to each run, and join the results along ``run``.

    The result is as lazy as the function. Values are read block by block on computation.

    Parameters
    ----------
    ds : Dataset
        Several runs from `trajstore.open_runs`.
    function : callable
        Function of a run and further arguments that returns a DataArray or Dataset.
    *arguments, **options
        Further arguments of `function`.

    Returns
    -------
    DataArray or Dataset, (run, …)
        With the coordinates of `ds` along run.

    Raises
    ------
    InvalidArgument
        If `ds` has no dimension run, or the results of two runs cannot be joined.

    Examples
    --------
    >>> from trajstore import open_runs
    >>> over_runs(open_runs("gatsby.zarr"), lambda run: run.traj.speed().mean("token")).dims
    ('run', 'step')
    """
    results: list[Any] = [function(run, *arguments, **options) for run in each_run(ds)]
    arrays = not isinstance(results[0], xr.Dataset)
    try:
        joined: Any = xr.concat(
            [each.to_dataset(name=_ARRAY) for each in results] if arrays else results,
            RUN,
            data_vars="all",
            coords="different",
            compat="equals",
            join="exact",
            combine_attrs="drop_conflicts",
        )
    except ValueError as error:
        raise InvalidArgument(f"the results of the runs cannot be joined: {error}") from error
    along = {name: c for name, c in ds.coords.items() if c.dims == (RUN,)}
    joined = joined.assign_coords(along)
    return joined[_ARRAY].rename(results[0].name) if arrays else joined


def as_method(
    function: Callable[Concatenate[xr.Dataset, P], R], *, each: bool = True
) -> Callable[Concatenate[Any, P], R]:
    """Return a function of a Dataset as a method of an accessor.

    Parameters
    ----------
    function : callable
        Its first argument is a Dataset.
    each : bool
        Apply it to each of several runs; False for functions that take them together.
    """

    def method(self: Any, /, *arguments: P.args, **options: P.kwargs) -> R:
        if each and RUN in self._ds.dims:
            of_run: Any = function
            result: R = over_runs(self._ds, of_run, *arguments, **options)
            return result
        return function(self._ds, *arguments, **options)

    functools.update_wrapper(method, function)
    return method


DIFFERENCE = np.dtype([("differing", np.int64), ("square", np.float64)])
"""Number of elements that differ in any bit, and the squared distance."""


def differences(first: Array, second: Array) -> npt.NDArray[np.void]:
    """`DIFFERENCE` of two arrays of one type along their last axis, (row, …)."""
    x, y = np.ascontiguousarray(first), np.ascontiguousarray(second)
    result = np.empty(x.shape[:-1], DIFFERENCE)
    different = unsigned_view(x) != unsigned_view(y)
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.square(np.subtract(x, y, dtype=np.float64))
    square[~different] = 0  # equal infinities and NaN have no distance
    result["differing"] = different.sum(-1)
    result["square"] = square.sum(-1)
    return result


def first_step(differs: xr.DataArray) -> xr.DataArray:
    """First step at which two runs differ, −1 if they never do: (step, …) of bool to (…)."""
    steps = differs["step"].values
    first: xr.DataArray = xr.apply_ufunc(
        lambda flags: np.where(flags.any(-1), steps[np.argmax(flags, axis=-1)], -1),
        differs.chunk(step=-1),
        input_core_dims=[["step"]],
        dask="parallelized",
        output_dtypes=[np.int64],
    )
    return first.assign_attrs(
        long_name="first step at which any bit differs",
        units="1",
        **flag_attributes({-1: "never"}),
    )


def differing_names(a: xr.Dataset, b: xr.Dataset) -> list[str]:
    """Full names of the settings in which two runs differ, including those of the optimizer."""
    keys = ("config", "segments", "optimizer")
    first, second = comparable_settings([a.attrs, b.attrs], keys)
    return sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )


def check_comparable(a: xr.Dataset, b: xr.Dataset) -> None:
    """Check that two runs have the same tokens and hidden dimensions.

    Raises
    ------
    InvalidArgument
    """
    problems = []
    dims: tuple[Hashable, ...] = ("token", "hidden")
    for dim in dims:
        if a.sizes.get(dim) != b.sizes.get(dim):
            problems.append(f"{dim} has length {a.sizes.get(dim)} and {b.sizes.get(dim)}")
        elif dim in a.coords and dim in b.coords and not (a[dim].values == b[dim].values).all():
            differing = int((a[dim].values != b[dim].values).sum())
            problems.append(f"{differing} of {a.sizes[dim]} ids along {dim} differ")
    if problems:
        names = ", ".join(differing_names(a, b))
        raise InvalidArgument(
            f"the runs cannot be compared: {'; '.join(problems)}"
            + (f"; their configurations differ in {names}" if names else "")
            + "; select the same tokens in the same order from both"
        )


_OTHER_DEAD = (
    "the runs have different dead tokens, so their populations cannot be compared; remove is_dead "
    "with drop_vars('is_dead')"
)


@registered(across_runs=True)
@checks_types
def divergence(ds: xr.Dataset, other: xr.Dataset | None = None) -> xr.Dataset:
    """Distance of W between the first run and the others, per step and population.

    Runs with a common start, such as a run and its fork, have distance 0 before
    ``first_difference``.

    Parameters
    ----------
    ds : Dataset
        Several runs from `trajstore.open_runs`; or, with `other`, the first of two runs.
    other : Dataset, optional
        A second run with the same tokens and hidden dimensions. Only common steps are compared, and
        the result has no dimension run.

    Returns
    -------
    Dataset
        ``distance``, float64 (run, step, population): L2 norm of the difference over all values of
        a population; ``mean_distance``: mean over its tokens of the L2 norm of each token's
        difference; ``differing``: fraction of its elements that differ in any bit.
        ``first_difference``, int64 (run): the first step at which any element differs, −1 if none.
        The first three are 0 for the first run, and NaN for a population without tokens.

    Raises
    ------
    InvalidArgument
        If `ds` has no dimension run and `other` is missing, or has one and `other` is given; if
        dead tokens, tokens or hidden dimensions differ, or if there is no common step.
    VariableNotRecorded
        If a run does not hold W.

    Examples
    --------
    >>> from trajstore import open_runs
    >>> divergence(open_runs("gatsby.zarr")).distance.sel(population="dead").values.max()
    np.float64(0.0)
    >>> changed = ds.assign(W=ds.W.where(ds.step < 7, 0))
    >>> int(divergence(ds, changed).first_difference)
    7
    """
    if other is not None:
        first, second = _of_common_steps(ds, other)
        return _divergence([first, second]).isel(run=1)
    if any(c.dims == ("run", "token") for c in ds.coords.values() if c.dtype == bool):
        raise InvalidArgument(_OTHER_DEAD)
    distances = _divergence(each_run(ds))
    return distances.assign_coords({name: c for name, c in ds.coords.items() if c.dims == ("run",)})


def _of_common_steps(ds: xr.Dataset, other: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    if "run" in ds.dims:
        raise InvalidArgument("got several runs and other; open all runs together with open_runs")
    check_comparable(ds, other)
    if "is_dead" in ds and "is_dead" in other and (ds.is_dead.values != other.is_dead.values).any():
        raise InvalidArgument(_OTHER_DEAD)
    steps = (ds["step"].values, other["step"].values)
    common, in_first, in_second = np.intersect1d(*steps, return_indices=True)
    if not common.size:
        raise InvalidArgument("the runs have no common step; compare runs with common steps")
    return ds.isel(step=in_first), other.isel(step=in_second)


def _divergence(runs: Sequence[xr.Dataset]) -> xr.Dataset:
    scans = [Scan(run) for run in runs]
    names, groups = populations(scans[0].ds)
    first = scans[0].blocks("W")
    unit = scans[0].units
    facts = {
        "distance": ResultVariable("f8", "L2 distance of W from that of the first run", unit),
        "mean_distance": ResultVariable(
            "f8", "mean distance of the tokens from those of the first run", unit
        ),
        "differing": ResultVariable(
            "f8", "fraction of the elements that differ in any bit from the first run"
        ),
    }
    tables = []
    for scan in scans:
        blocks = scan.blocks("W")
        widest = np.result_type(blocks.dtype, first.dtype)
        pieces = measure(
            differences,
            blocks.astype(widest).rechunk(first.chunks),
            first.astype(widest),
            dims=("step", "token"),
            dtype=DIFFERENCE,
        )
        tables.append(
            measure(
                _measures,
                pieces.rechunk({1: -1}),
                dims=("step", "population"),
                groups=groups,
                hidden=first.shape[-1],
                dtype=facts,
                sizes={"population": len(groups)},
                by_row=True,
            )
        )
    coords = {"step": scans[0].ds["step"], "population": names}
    result = table(da.stack(tables), facts, ("run", "step", "population"), coords)
    return result.assign(first_difference=first_step((result["differing"] > 0).any("population")))


def _measures(
    pieces: npt.NDArray[np.void], groups: npt.NDArray[np.bool_], hidden: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Distance, mean distance and differing fraction of each group, (group)."""
    squares = [np.ascontiguousarray(pieces["square"][group]) for group in groups]
    sizes = groups.sum(-1)
    distances = np.sqrt([each.sum() for each in squares])
    means = np.array([np.sqrt(each).sum() for each in squares]) / sizes
    differing = np.array([pieces["differing"][group].sum() for group in groups]) / sizes / hidden
    return {
        "distance": np.where(sizes > 0, distances, np.nan),
        "mean_distance": means,
        "differing": differing,
    }


def _shape_of_rows(array: xr.DataArray) -> dict[Hashable, int]:
    return {dim: length for dim, length in array.sizes.items() if dim != "step"}


def _over_rows(pieces: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    if pieces.ndim == 1:
        return pieces
    result = np.empty(pieces.shape[0], DIFFERENCE)
    others = tuple(range(1, pieces.ndim))
    result["differing"] = np.ascontiguousarray(pieces["differing"]).sum(others)
    result["square"] = np.ascontiguousarray(pieces["square"]).sum(others)
    return result


def _difference(a: xr.DataArray, b: xr.DataArray) -> da.Array:
    """Structured array (step) of `DIFFERENCE`."""
    dims = VARIABLES[str(a.name)].dims
    x, y = (
        array.transpose(*dims).chunk() if array.chunks is None else array.transpose(*dims)
        for array in (a, b)
    )
    if len(dims) == 1:
        x, y = x.expand_dims("value", -1), y.expand_dims("value", -1)
    last = x.ndim - 1
    widest = np.result_type(x.dtype, y.dtype)  # the narrower type would round differences away
    first = x.data.astype(widest).rechunk({last: -1})
    second = y.data.astype(widest).rechunk(first.chunks)
    names = tuple(map(str, x.dims))
    pair = along(first, *names), along(second, *names)
    pieces = measure(differences, *pair, dims=names[:last], dtype=DIFFERENCE)
    whole = pieces.rechunk(dict.fromkeys(range(1, last), -1))
    return measure(_over_rows, along(whole, *names[:last]), dims=("step",), dtype=DIFFERENCE)


def _without_empty_start(late: xr.DataArray, other: xr.DataArray) -> xr.DataArray:
    """Replace the first row by that of the other run if it is NaN: no step produced its values."""
    start, rest = late.isel(step=[0]), late.isel(step=slice(1, None))
    filled = start.where(~start.isnull().all(), other.isel(step=[0]))
    return xr.concat([filled, rest], "step", combine_attrs="override").rename(late.name)


def _relative(first: Array, second: Array) -> Array:
    size = np.abs(second - first)
    with np.errstate(divide="ignore"):
        return np.asarray(size / np.where(size > 0, np.abs(first), 1))


def _loss_difference(a: xr.Dataset, b: xr.Dataset, over: float) -> dict[str, xr.DataArray]:
    """Relative difference of the losses, and the first step at which it exceeds `over`."""
    if not 0 <= over < math.inf:
        raise InvalidArgument(f"got over={over!r}, expected a fraction such as 0.01")
    for run in (a, b):
        input_checks.require_variables(run, "loss")
    losses = (run["loss"].astype(np.float64) for run in (a, b))
    relative = xr.apply_ufunc(
        _relative, *losses, join="override", dask="parallelized", output_dtypes=[np.float64]
    )
    return {
        "loss_difference": relative.assign_attrs(
            long_name="difference of the losses, relative to that of the first run", units="1"
        ),
        "first_over": first_step(relative > over).assign_attrs(
            long_name=f"first step at which the losses differ by more than {over:g} of the first"
        ),
    }


@checks_types
def compare(a: xr.Dataset, b: xr.Dataset, over: float | None = None) -> xr.Dataset:
    """First step at which two runs differ in any bit, per variable, and their distance.

    NaNs of the same bits are equal. If one run begins later than the other, the NaN of its first
    row are not compared: no recorded step produced these values.

    Parameters
    ----------
    a, b : Dataset
        Two runs with the same tokens and hidden dimensions. Only common variables and steps are
        compared, those of two types in a type that holds both. Variables of single examples are
        left out if the number of examples differs, and variables of all parameters, or of
        hyperparameters, if their names differ.
    over : float, optional
        A fraction, such as 0.01: also return from which step on the losses differ by more.

    Returns
    -------
    Dataset
        ``first_difference``, int64 (variable): the first common step at which any bit differs, −1
        if none; ``differs``, bool (step, variable); ``distance``, float64 (step, variable): L2
        norm of the difference of all values of a row. The attribute ``differing_settings`` names
        the fields of configuration and optimizer that differ. With `over`, also
        ``loss_difference``, float64 (step): abs(b − a) / abs(a) of the losses, and ``first_over``,
        int64: the first step at which it is larger than `over`, −1 if there is none.

    Raises
    ------
    InvalidArgument
        If tokens or hidden dimensions differ, or there is no common step or variable. The message
        names the difference. For a negative `over`.
    VariableNotRecorded
        With `over`, if a run does not hold ``loss``.

    Examples
    --------
    >>> other = ds[["W", "loss"]].assign(W=ds.W.where(ds.step < 7, 0))
    >>> compare(ds, other).first_difference.to_series().to_dict()
    {'W': 7, 'loss': -1}
    """
    check_comparable(a, b)
    steps, rows_a, rows_b = np.intersect1d(a["step"].values, b["step"].values, return_indices=True)
    names = [
        name
        for name in variables_of(a.attrs)
        if name in a and name in b and _shape_of_rows(a[name]) == _shape_of_rows(b[name])
        if all(a[dim].equals(b[dim]) for dim in NAMES if dim in VARIABLES[name].dims)
    ]
    if not steps.size or not names:
        what = "step" if names else "variable"
        raise InvalidArgument(f"the runs have no common {what}; compare runs with a common {what}")
    begins = int(a["step"][0]), int(b["step"][0])
    a, b = a.isel(step=rows_a), b.isel(step=rows_b)
    pairs = []
    for name in names:
        first, second = a[name], b[name]
        if VARIABLES[name].row0 == "nan" and begins[0] != begins[1] and steps[0] == max(begins):
            if begins[0] == steps[0]:
                first = _without_empty_start(first, second)
            else:
                second = _without_empty_start(second, first)
        pairs.append(_difference(first, second).rechunk(-1))
    table = da.stack(pairs, axis=1)

    differs = xr.DataArray(
        field(table, "differing") > 0,
        dims=("step", "variable"),
        coords={"step": steps, "variable": names},
    )
    distance = differs.copy(data=np.sqrt(field(table, "square")))
    return xr.Dataset(
        {
            "first_difference": first_step(differs),
            "differs": differs.assign_attrs(long_name="any bit differs"),
            "distance": distance.assign_attrs(long_name="L2 norm of the difference"),
            **({} if over is None else _loss_difference(a, b, over)),
        },
        attrs={"differing_settings": differing_names(a, b)},
    )
