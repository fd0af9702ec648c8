"""Several runs in one Dataset along ``run``: selection, and functions applied to each run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import xarray as xr

from trajstore.analysis.scan.input_checks import RUN, with_own_attributes
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument

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
            [one.to_dataset(name=_ARRAY) for one in results] if arrays else results,
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
