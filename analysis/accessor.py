"""`ds.traj`: the populations of a run, and every function of `trajstore.analysis` as a method.

xarray gets it through the entry point `traj` of the group `trajstore.accessors`.
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

if TYPE_CHECKING:
    from trajstore.analysis.figures import Figure

__all__ = ["TrajAccessor"]

_OF_SEVERAL_RUNS = ("divergence", "each_run", "over_runs", "with_populations")
"""Functions that take several runs as they are; all others are asked of each."""


class TrajAccessor:
    """What a Dataset of a run knows about its tokens and their motion.

    Every function of `analysis` that takes a Dataset is a method: ``ds.traj.freeze()`` is
    ``analysis.freeze(ds)``, and of several runs (`trajstore.open_runs`) what that is of each of
    them, along ``run``.

    Parameters
    ----------
    ds : Dataset
        A run, or anything with its variables.

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
        """What is in the run, in a line."""
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
        """Write the run, or what was selected of it, to a NetCDF file, block by block.

        NetCDF has no nested attributes, such as ``config``: those become JSON texts. Needs
        h5netcdf, the extra ``hdf5``.

        Parameters
        ----------
        path : path-like
            Ending in ``.nc``; nothing must be there.

        Raises
        ------
        InvalidArgument, RunExists, MissingExtra
            For another ending; if something is there; without h5netcdf.
        """
        from trajstore.analysis.results.write_results import write_result

        if os.path.splitext(path)[1] != ".nc":
            raise InvalidArgument(f"a NetCDF file is called NAME.nc, got {os.fspath(path)}")
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
        """Statistics over the dead, live and all tokens of this run, and its other populations.

        Parameters
        ----------
        da : DataArray, (…, token)
            Anything per token of this run; it need not carry ``is_dead`` itself.
        **options
            Of `analysis.by_population`.
        """
        from trajstore import analysis

        self._is_dead()  # says what is missing
        if not isinstance(da, xr.DataArray) or "token" not in da.dims:
            got = getattr(da, "dims", type(da).__name__)
            raise InvalidArgument(f"got {got}, expected a DataArray along token of this run")
        masks = {
            name: coordinate.variable
            for name, coordinate in self._ds.coords.items()
            if coordinate.dims == ("token",) and coordinate.dtype == bool
        }
        return analysis.by_population(da.assign_coords(masks), **options)

    @property
    def plot(self) -> Plots:
        """Figures of this run: ``ds.traj.plot.gradients()`` draws one, and gives its Axes."""
        return Plots(self._ds)

    def _is_dead(self) -> Any:
        if "is_dead" not in self._ds:
            raise VariableNotRecorded(
                "this run does not say which tokens are dead; it has no coordinate is_dead"
            )
        if self._ds["is_dead"].ndim > 1:
            raise InvalidArgument(
                "these runs differ in which tokens are dead; choose one: ds.isel(run=0)"
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
            f"there is no ds.traj.{name}{did_you_mean(name, dir(self))}; "
            f"there are {', '.join(dir(self))}"
        )

    def __dir__(self) -> list[str]:
        from trajstore import analysis

        return sorted(
            {
                "dead",
                "live",
                "plot",
                "to_netcdf",
                *(name for name in analysis.__all__ if name.islower()),
            }
        )


class Plots:
    """Every kind of figure as a method; needs matplotlib, the extra ``plot``.

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
        from trajstore.analysis.figures import FIGURES

        figure = FIGURES.get(name.replace("_", "-"))
        if figure is None:
            raise AttributeError(
                f"there is no ds.traj.plot.{name}; there are {', '.join(dir(self))}"
            )
        return _method(_described(figure), functools.partial(figure, self._ds))

    def __dir__(self) -> list[str]:
        from trajstore.analysis.figures import FIGURES

        return [name.replace("-", "_") for name in FIGURES]


def _method(described: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that `help` describes as another one without its first argument, the Dataset."""

    @functools.wraps(described)
    def method(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    signature = inspect.signature(described)
    _, *others = signature.parameters.values()
    annotated: Any = method
    annotated.__signature__ = signature.replace(parameters=others)
    return method


def _described(figure: Figure) -> Callable[..., Any]:
    """A function with the name, the docstring and all options of a figure."""
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
