"""`ds.traj`: the populations of a run, and every function of `trajstore.analysis` as a method.

xarray finds it through the entry point `traj` of the group `trajstore.accessors`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.nearest_name import did_you_mean
from trajstore.store.reading.recorded_parameters import parameter_dataset

if TYPE_CHECKING:
    from trajstore.analysis.figures import Figure

__all__ = ["TrajAccessor"]

_OF_SEVERAL_RUNS = ("divergence", "each_run", "over_runs", "with_populations")
"""Functions that take several runs at once. All others are applied to each run."""


class TrajAccessor:
    """Analyses of a run as methods of its Dataset.

    Every function of `analysis` that takes a Dataset is a method: ``ds.traj.freeze()`` is
    ``analysis.freeze(ds)``. For several runs (`trajstore.open_runs`), methods return the results
    of each run along ``run``.

    Parameters
    ----------
    ds : Dataset
        A run, or a Dataset with variables of a run.

    Examples
    --------
    >>> from trajstore import open_run
    >>> ds = open_run("gatsby.zarr")
    >>> ds.traj.dead.sizes["token"], ds.traj.live.sizes["token"]
    (118, 10)
    >>> int(ds.traj.freeze().last_motion.sel(token=ord("e")))
    13
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def __repr__(self) -> str:
        """One line with rows, tokens and variables."""
        ds = self._ds
        steps = ds["step"].values.tolist() if "step" in ds.coords else []
        span = f", steps {steps[0]} to {steps[-1]}" if len(steps) else ""
        dead = f", {int(ds['is_dead'].sum())} of them dead" if "is_dead" in ds.coords else ""
        return (
            f"<run: {len(steps)} rows{span}; {ds.sizes.get('token', 0)} tokens{dead}; "
            f"{', '.join(map(str, ds.data_vars)) or 'no variables'}; "
            f"{ds.attrs.get('status', 'part of a run')}>"
        )

    def to_netcdf(self, path: str | os.PathLike[str]) -> None:
        """Write the Dataset to a NetCDF file, block by block.

        NetCDF has no nested attributes: ``config`` and others become JSON texts. Requires
        h5netcdf, the extra ``hdf5``.

        Parameters
        ----------
        path : path-like
            Path with the extension ``.nc``. It must not exist.

        Raises
        ------
        InvalidArgument, RunExists, MissingExtra
            For another extension; if the path exists; if h5netcdf is not installed.
        """
        from trajstore.analysis.results.write_results import write_result

        if os.path.splitext(path)[1] != ".nc":
            raise InvalidArgument(f"got {os.fspath(path)}, expected NAME.nc")
        texts = {
            name: json.dumps(value)
            for name, value in self._ds.attrs.items()
            if value is None or isinstance(value, bool | dict | list)
        }
        write_result(self._ds.assign_attrs(texts), path)

    @property
    def dead(self) -> xr.Dataset:
        """The tokens that occur nowhere in the training corpus."""
        return self._ds.isel(token=self._is_dead())

    @property
    def live(self) -> xr.Dataset:
        """The tokens that occur in the training corpus."""
        return self._ds.isel(token=~self._is_dead())

    def by_population(self, da: xr.DataArray, **options: Any) -> xr.Dataset:
        """Statistics over each population of this run.

        Parameters
        ----------
        da : DataArray, (…, token)
            Values per token of this run, with or without ``is_dead``.
        **options
            Options of `analysis.by_population`.
        """
        from trajstore import analysis

        self._is_dead()  # raises if missing
        if not isinstance(da, xr.DataArray) or "token" not in da.dims:
            got = getattr(da, "dims", type(da).__name__)
            raise InvalidArgument(f"got {got}, expected a DataArray along token of this run")
        masks = {
            name: coordinate.variable
            for name, coordinate in self._ds.coords.items()
            if coordinate.dims == ("token",) and coordinate.dtype == bool
        }
        return analysis.by_population(da.assign_coords(masks), **options)

    def parameter(self, name: str) -> xr.Dataset:
        """History of one parameter of a run that was recorded with the tier ``everything``.

        Parameters
        ----------
        name : str
            Name in the model, such as ``transformer.h.0.mlp.c_fc.weight``; `trajstore info` lists
            them.

        Returns
        -------
        Dataset
            ``W``, ``grad``, ``exp_avg``, ``exp_avg_sq`` of dims (step, row, column), read when
            their values are accessed; and the variables along ``step``, with the ``lr`` of the
            parameter's group. A vector has one column.

        Raises
        ------
        VariableNotRecorded, InvalidArgument
            If the run does not hold all parameters, or none of that name.
        """
        return parameter_dataset(self._ds, name)

    @property
    def plot(self) -> Plots:
        """Figures of this run: ``ds.traj.plot.gradients()`` draws one and returns its Axes."""
        return Plots(self._ds)

    def _is_dead(self) -> Any:
        if "is_dead" not in self._ds:
            raise VariableNotRecorded(
                "dead tokens are not labeled: the coordinate is_dead is missing; label them with "
                "trajstore annotate"
            )
        if self._ds["is_dead"].ndim > 1:
            raise InvalidArgument(
                "the runs have different dead tokens; select one run: ds.isel(run=0)"
            )
        return self._ds["is_dead"].values

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from trajstore import analysis

        if callable(getattr(analysis, name, None)) and name in analysis.__all__:
            wanted = getattr(analysis, name)
            if "run" in self._ds.dims and name not in _OF_SEVERAL_RUNS:
                return _method(wanted, functools.partial(analysis.over_runs, self._ds, wanted))
            return _method(wanted, functools.partial(wanted, self._ds))
        raise AttributeError(
            f"ds.traj has no {name!r}{did_you_mean(name, dir(self))}; it has {', '.join(dir(self))}"
        )

    def __dir__(self) -> list[str]:
        from trajstore import analysis

        return sorted(
            {
                "dead",
                "live",
                "parameter",
                "plot",
                "to_netcdf",
                *(name for name in analysis.__all__ if name.islower()),
            }
        )


class Plots:
    """Every kind of figure as a method, and `film`. Requires matplotlib, the extra ``plot``.

    Parameters
    ----------
    ds : Dataset
        A run.

    Examples
    --------
    >>> from trajstore import open_run
    >>> ax = open_run("gatsby.zarr").traj.plot.last_motion()
    >>> ax.get_xlabel()
    'optimizer step of the last motion'
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from trajstore.analysis.figures import figures_of
        from trajstore.analysis.figures.film import film

        if name == "film":
            return _method(film, functools.partial(film, self._ds))
        known = figures_of(self._ds)
        figure = known.get(name.replace("_", "-")) or known.get(name)
        if figure is None:
            raise AttributeError(f"ds.traj.plot has no {name!r}; it has {', '.join(dir(self))}")
        return _method(_described(figure), functools.partial(figure, self._ds))

    def __dir__(self) -> list[str]:
        from trajstore.analysis.figures import figures_of

        return [*(name.replace("-", "_") for name in figures_of(self._ds)), "film"]


def _method(described: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` with the help of `described`, without its first argument, the Dataset."""

    @functools.wraps(described)
    def method(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    signature = inspect.signature(described)
    _, *others = signature.parameters.values()
    annotated: Any = method
    annotated.__signature__ = signature.replace(parameters=others)
    return method


def _described(figure: Figure) -> Callable[..., Any]:
    """Function with the name, docstring and options of a figure."""
    from trajstore.analysis.figures import Options

    def described() -> None: ...

    _, *known = inspect.signature(type(figure).__call__).parameters.values()
    options = inspect.signature(Options).parameters.values()
    named: Any = described
    named.__name__ = named.__qualname__ = figure.name.replace("-", "_")
    named.__doc__ = figure.title + ".\n" + (figure.__call__.__doc__ or "").partition("\n")[2]
    named.__signature__ = inspect.Signature(
        [each for each in known if each.kind is not inspect.Parameter.VAR_KEYWORD]
        + [
            each
            for each in options
            if (each.name != "lattice" or figure.on_lattice)
            and (each.name != "population" or figure.of_populations)
        ],
        return_annotation="Axes",
    )
    return described
