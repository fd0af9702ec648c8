"""`ds.traj`: the populations of a run, and every function of `trajstore.analysis` as a method.

xarray finds it through the entry point `traj` of the group `trajstore.accessors`.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.analysis.methods import Methods
from trajstore.analysis.scan.result_variables import by_population
from trajstore.analysis.several_quantities import compute
from trajstore.analysis.several_runs import as_method
from trajstore.errors import InvalidArgument, VariableNotRecorded, did_you_mean
from trajstore.schema import EVALUATION
from trajstore.store.reading.run_attributes import parameter_dataset

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes

    from trajstore.analysis.figures.figure import Drawing

__all__ = ["TrajAccessor"]


class TrajAccessor(Methods):
    """Analyses of a run as methods of its Dataset.

    Every function of `analysis` that takes a Dataset is a method: ``ds.traj.freeze()`` is
    ``analysis.freeze(ds)``. For several runs (`trajstore.open_runs`), methods return the results
    of each run along ``run``.

    Type checkers and editors do not know the attribute ``traj`` of a Dataset. They know all methods
    of ``TrajAccessor(ds)``, which is the same.

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

    compute = as_method(compute)

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def __repr__(self) -> str:
        """One line with runs, rows, tokens and variables."""
        ds = self._ds
        steps = ds["step"].values.tolist() if "step" in ds.coords else []
        span = f", steps {steps[0]} to {steps[-1]}" if len(steps) else ""
        dead = ""
        if "is_dead" in ds.coords and ds["is_dead"].ndim == 1:  # that of several runs may differ
            dead = f", {int(ds['is_dead'].sum())} of them dead"
        runs = f"{ds.sizes['run']} runs" if "run" in ds.dims else "run"
        return (
            f"<{runs}: {len(steps)} rows{span}; {ds.sizes.get('token', 0)} tokens{dead}; "
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
        self._is_dead()  # raises if missing
        if not isinstance(da, xr.DataArray) or "token" not in da.dims:
            got = getattr(da, "dims", type(da).__name__)
            raise InvalidArgument(f"got {got}, expected a DataArray along token of this run")
        masks = {
            name: coordinate.variable
            for name, coordinate in self._ds.coords.items()
            if coordinate.dims == ("token",) and coordinate.dtype == bool
        }
        return by_population(da.assign_coords(masks), **options)

    def token(self, text: str) -> int:
        """Vocabulary id of the token with a text, for ``ds.W.sel(token=ds.traj.token("e"))``.

        Parameters
        ----------
        text : str
            Text as in ``token_text``, with spaces: in most vocabularies, `` the`` is a token.

        Returns
        -------
        int

        Raises
        ------
        VariableNotRecorded
            If the run has no ``token_text``.
        InvalidArgument
            If no token, or more than one, has the text.

        Examples
        --------
        >>> from trajstore import open_run
        >>> ds = open_run("gatsby.zarr")
        >>> ds.traj.token("e")
        101
        >>> ds.W.sel(token=ds.traj.token("e")).shape
        (21, 4)
        """
        ds = self._ds
        if "token_text" not in ds.coords:
            raise VariableNotRecorded(
                "the texts of the tokens are missing: the run has no token_text; label the tokens "
                "with trajstore annotate, or select ids"
            )
        texts = ds["token_text"].values.tolist()
        ids = [
            i for i, known in zip(ds["token"].values.tolist(), texts, strict=True) if known == text
        ]
        if len(ids) > 1:
            raise InvalidArgument(
                f"got text={text!r}, which {len(ids)} tokens have: {', '.join(map(str, ids[:9]))}; "
                "select one by its id: ds.sel(token=ID)"
            )
        if not ids:
            near = [known for known in texts if str(known).strip() == str(text).strip()]
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise InvalidArgument(
                f"got text={text!r}{hint}, expected the text of a token; ds.token_text has all"
            )
        return int(ids[0])

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
        """Figures of this run: ``ds.traj.plot.grad_norms()`` draws one and returns its Axes."""
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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = [method for method in dir(type(self)) if not method.startswith("_")]
            raise AttributeError(
                f"ds.traj has no {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
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

    autocorrelation: Drawing
    bulk_thermal: Drawing
    centroid: Drawing
    clusters: Drawing
    discontinuities: Drawing
    displacement: Drawing
    divergence: Drawing
    freeze: Drawing
    freeze_cause: Drawing
    grad_norms: Drawing
    heatmap: Drawing
    last_motion: Drawing
    lattice_displacement: Drawing
    layers: Drawing
    lifecycle: Drawing
    logit_stats: Drawing
    loss: Drawing
    moment_sizes: Drawing
    moment_tracks: Drawing
    moments: Drawing
    param_update_lost: Drawing
    regimes: Drawing
    sky: Drawing
    spectrum: Drawing
    speed: Drawing
    speed_density: Drawing
    trajectory: Drawing

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def film(self, **options: Any) -> FuncAnimation:
        """Animate the tokens of the run in a fixed plane, above the loss.

        Parameters
        ----------
        **options
            Of `analysis.figures.film.film`, which describes them.

        Returns
        -------
        FuncAnimation of matplotlib
        """
        from trajstore.analysis.figures.film import film

        return film(self._ds, **options)

    def __getattr__(self, name: str) -> Drawing:
        from trajstore.analysis.figures import figures_of
        from trajstore.analysis.figures.figure import Drawing

        known = figures_of(self._ds)
        if name not in known:
            raise AttributeError(
                f"ds.traj.plot has no {name!r}{did_you_mean(name, dir(self))}; it has "
                f"{', '.join(dir(self))}"
            )
        figure = known[name]

        def drawing(*arguments: Any, **options: Any) -> Axes:
            return figure(self._ds, *arguments, **options)

        described: Any = drawing
        described.__name__ = described.__qualname__ = name
        about = (figure.__call__.__doc__ or "").partition("\n")[2]
        described.__doc__ = f"{figure.title}.\n{about}"
        signature = inspect.signature(Drawing.__call__)
        _, *options = signature.parameters.values()
        described.__signature__ = signature.replace(
            parameters=[option for option in options if figure.has(option.name)]
        )
        return drawing

    def __dir__(self) -> list[str]:
        from trajstore.analysis.figures import figures_of

        names = [name.replace("-", "_") for name in figures_of(self._ds)]
        return names if EVALUATION in self._ds.attrs else [*names, "film"]
