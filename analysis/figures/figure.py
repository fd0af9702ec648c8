"""A figure: its data, computed lazily, and its drawing, separate from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import xarray as xr

from trajstore.analysis.figures.axes_marks import (
    add_legend,
    reword,
    set_log,
    set_title,
    widen_covered,
)
from trajstore.analysis.figures.style import (
    MOST_CURVES,
    PANELS,
    STYLES,
    Group,
    RunStyle,
    SeveralRuns,
    mean_and_spread,
    run_groups,
    style,
    titled_runs,
)
from trajstore.analysis.scan.block_tasks import Report, compute_all
from trajstore.analysis.scan.scan import Scan, windowed_scan
from trajstore.analysis.several_runs import each_run
from trajstore.errors import InvalidArgument, did_you_mean, needs_extra
from trajstore.populations import (
    check_dataset,
    chosen_populations,
    is_of_parameter,
    populations,
    row_words,
)
from trajstore.schema import MIN_UNCHANGED

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from trajstore.exchange.selection import Steps


SIZE = (8.0, 5.0)
"""Width and height of a figure, in inches."""

USUAL = ("dead", "live", "hidden_mean")
"""Populations that figures show; the last is the single vector of `analysis.vectors`."""

_OF_PARAMETER = "of_parameter"
"""Attribute of data of the rows of one parameter."""

ALONE = "alone"
"""Attribute of data that were computed from the rows of a window alone."""

LOGS = ("none", "x", "y", "xy")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that all figures share.

    Attributes
    ----------
    population : str, optional
        By default those of the figure, usually dead and live tokens.
    also : sequence of str
        Populations that figures show besides dead and live tokens.
    lattice : str
        Floating-point grid, for figures that depend on one.
    color : {'regime', 'hop'}
        Colors of the heatmap.
    plane : {'principal', 'hidden_mean'}
        Plane of the trajectory; the axis of the sky is the centroid, or h̄.
    steps : str, int, slice or iterable of int, optional
        Window of steps to show; facts come from the whole run.
    within : bool
        Compute everything from the rows of the window alone.
    min_unchanged : int
        Unchanged steps that make a token frozen, as for `analysis.freeze`.
    metric : str
        Metric of the figure ``layers``, of `analysis.layers`. A prefix names what is measured:
        ``grad:rms``, ``update:rms``, ``ov:spectral``, ``qk:spectral``; default: parameters.
    parameters : str, optional
        Layers in the figure ``layers``: names or patterns such as ``*.c_fc.weight``, separated by
        commas.
    """

    population: str | None = None
    also: Sequence[str] = ()
    lattice: str = "native"
    color: str = "regime"
    plane: str = "principal"
    steps: Steps = None
    within: bool = False
    min_unchanged: int = MIN_UNCHANGED
    metric: str = "frobenius"
    parameters: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("color", ("regime", "hop")), ("plane", ("principal", "hidden_mean"))):
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"got {name}={getattr(self, name)!r}, expected {' or '.join(known)}"
                )

    def populations(self, scan: Scan, usual: Sequence[str] = USUAL) -> list[str]:
        """Names of the populations to show, which have tokens.

        Parameters
        ----------
        scan : Scan
        usual : sequence of str
            Default; ``all`` for a run without populations.

        Raises
        ------
        InvalidArgument
            If the run lacks the chosen population, or no token belongs to it.
        """
        names, groups = populations(scan.ds)
        there = [name for name, group in zip(names, groups, strict=True) if group.any()]
        if self.population is None:
            shown = (*usual, *self.also) if usual is USUAL else usual
            return [name for name in there if name in shown] or ["all"]
        if self.population not in there:
            raise InvalidArgument(
                f"got the population {self.population!r}, which is unknown or empty; choose from "
                f"{', '.join(there)}"
            )
        return [self.population]


class Drawing(Protocol):
    """A method of ``ds.traj.plot``; figures lack the options that they do not depend on."""

    def __call__(
        self,
        ax: Axes | None = None,
        *,
        other: xr.Dataset | None = None,
        style: str = "light",
        log: str | None = None,
        labels: Sequence[str] | None = None,
        title: str | None = None,
        size: tuple[float, float] | None = None,
        population: str | None = None,
        also: Sequence[str] = (),
        lattice: str = "native",
        color: str = "regime",
        plane: str = "principal",
        steps: Steps = None,
        within: bool = False,
        min_unchanged: int = MIN_UNCHANGED,
        metric: str = "frobenius",
        parameters: str | None = None,
    ) -> Axes:
        """Draw the figure, as `Figure` does."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Data of a figure, and what their computation needs.

    Attributes
    ----------
    collect : callable
        Takes a `Scan` and `Options`, and with `SeveralRuns.between` the first run's `Scan`; returns
        lazy data.
    rows : int
        Smallest number of rows.
    measures : tuple of str
        Measures between consecutive rows, as for a `Quantity`.
    of_window : bool
        True if it is computed from the rows of a window alone, as for `Quantity`.
    reading : str
        Name of the pass over the run that computes it. Figures that need much memory have a pass
        of their own.
    """

    collect: Callable[..., xr.Dataset]
    rows: int = 2
    measures: tuple[str, ...] = ()
    of_window: bool = False
    reading: str = "blocks"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One kind of figure.

    Call it to draw: ``grad_norms(ds, ax)`` draws into an Axes and returns it.

    Attributes
    ----------
    name, title : str
    computation : Computation
    draw : callable
        Takes an Axes, the computed data and a `RunStyle`.
    options : tuple of str
        Those of the options that not all figures have: ``population``, ``lattice``, ``metric`` (of
        layers, with ``parameters``), ``log``.
    runs : SeveralRuns
    projection : str
        Projection of its axes, one of matplotlib's.
    """

    name: str
    title: str
    computation: Computation
    draw: Callable[[Axes, xr.Dataset, RunStyle], None]
    options: tuple[str, ...] = ("population", "log")
    runs: SeveralRuns = PANELS
    projection: str = "rectilinear"

    def has(self, option: str) -> bool:
        """True if this option of drawing has an effect on the figure."""
        needed = {"also": "population", "parameters": "metric"}.get(option, option)
        return needed in self.options or needed not in ("population", "lattice", "metric")

    def data(self, scans: Sequence[Scan], options: Options) -> list[xr.Dataset]:
        """Lazy data of each run, or of each run but the first how it differs from the first.

        Raises
        ------
        InvalidArgument
            If there are too few rows, or runs.
        VariableNotRecorded
            If a run lacks a variable.
        """
        rows = self.computation.rows
        for scan in scans:
            if scan.window.size < rows:
                of = "the window" if scan.has_window else "the run"
                raise InvalidArgument(
                    f"{self.name} needs at least {rows} rows, and {of} has {scan.window.size}"
                )
        if not self.runs.between:
            return [self._data_of_run(scan, options) for scan in scans]
        first, *others = scans
        if not others:
            raise InvalidArgument(f"{self.name} compares runs, got one; add another")
        return [self._data_of_run(scan, options, first) for scan in others]

    def _data_of_run(self, scan: Scan, options: Options, *first: Scan) -> xr.Dataset:
        of_window = self.computation.of_window
        data = self.computation.collect(scan.of_window() if of_window else scan, options, *first)
        if options.within or (of_window and scan.has_window):
            data.attrs[ALONE] = f"computed from steps {scan.window[0]} to {scan.window[-1]} alone"
        if is_of_parameter(scan.ds):
            data.attrs[_OF_PARAMETER] = True
        return data

    def __call__(
        self,
        ds: xr.Dataset,
        ax: Axes | None = None,
        *,
        other: xr.Dataset | None = None,
        style: str = "light",
        log: str | None = None,
        labels: Sequence[str] | None = None,
        title: str | None = None,
        size: tuple[float, float] | None = None,
        **options: Any,
    ) -> Axes:
        """Draw this figure of a run.

        Parameters
        ----------
        ds : Dataset
            A run or a part of it, or several runs along ``run``. Each run has a line. With more
            than eight, those that differ only in their seeds share a mean and its spread.
        ax : Axes of matplotlib, optional
            By default a new figure.
        other : Dataset, optional
            One more run in the same axes.
        style : {'light', 'dark'}
        log : {'none', 'x', 'y', 'xy'}, optional
            Logarithmic axes; the default depends on the figure.
        labels : sequence of str, optional
            One per run; by default the settings that differ. Runs of one label share a curve:
            their mean and spread.
        title : str, optional
            By default the figure's title and the run.
        size : tuple of float, optional
            Width and height of a new figure, in inches.
        **options
            Of `Options`: ``population``, ``also``, ``lattice``, ``color``, ``plane``, ``steps``,
            ``within``, ``min_unchanged``, ``metric``, ``parameters``.

        Returns
        -------
        Axes

        Raises
        ------
        VariableNotRecorded
            If the run lacks a variable.
        InvalidArgument
            For an option that is unknown, or unknown to this figure.
        MissingExtra
            Without matplotlib.
        """
        check_matplotlib()
        for run in (ds, ds if other is None else other):
            check_dataset(run)
        _check_axes(ax, self.projection)
        if ax is not None and size is not None:
            raise InvalidArgument(
                f"got ax and size={size!r}; size needs a new figure, so leave out ax"
            )
        chosen = asked_for(options)
        self.check(chosen, log=log)
        runs = [*(each_run(ds) if "run" in ds.dims else [ds]), *([] if other is None else [other])]
        groups = run_groups(runs, labels)
        if not self.in_one_axes(groups):
            raise InvalidArgument(
                f"{self.name} cannot show these runs in one axes; choose one, ds.isel(run=0), or "
                "draw a panel for each: trajstore plot RUN… FIGURE"
            )
        scans = [prepared(run, [self], chosen) for run in runs]
        data = compute_together(self.data(scans, chosen))
        target = new_axes(style, size, self.projection) if ax is None else ax
        with in_style(style):
            self.draw_groups(target, data, groups, style=style, log=log)
            about = titled_runs(runs, labels)
            set_title(target, title or f"{worded(self.title, data[0])}\n{about}")
        return target

    def in_one_axes(self, groups: Sequence[Group]) -> bool:
        """True if one axes can show these runs or means of runs."""
        one_each = all(len(group.members) == 1 for group in groups)
        if len(groups) == 1 and one_each:
            return True
        return (
            self.runs.overlays and len(groups) <= MOST_CURVES and (one_each or self.runs.averages)
        )

    def check(self, options: Options, *, log: str | None = None) -> None:
        """Check that the figure has these options.

        Raises
        ------
        InvalidArgument
            For a population, a lattice, a metric or scales that the figure lacks.
        """
        if options.population is not None and "population" not in self.options:
            raise InvalidArgument(
                f"{self.name} has no populations, got {options.population!r}; select tokens instead"
            )
        if options.lattice != "native" and "lattice" not in self.options:
            raise InvalidArgument(
                f"{self.name} has no lattice, got {options.lattice!r}; leave it out"
            )
        if "metric" not in self.options and (options.metric, options.parameters) != (
            "frobenius",
            None,
        ):
            raise InvalidArgument(
                f"{self.name} is not a figure of layers, got metric={options.metric!r} and "
                f"parameters={options.parameters!r}; leave them out"
            )
        if log is not None and log not in LOGS:
            raise InvalidArgument(f"got log={log!r}, expected one of {', '.join(LOGS)}")
        if log is not None and "log" not in self.options:
            raise InvalidArgument(f"{self.name} has fixed scales, got log={log!r}; leave out log")

    def draw_groups(
        self,
        ax: Axes,
        data_of_runs: Sequence[xr.Dataset],
        groups: Sequence[Group],
        *,
        style: str,
        log: str | None = None,
    ) -> None:
        """Draw computed data: each run, or the mean of a group."""
        shown = _after_the_first(groups) if self.runs.between else groups
        runs = len(groups) if len(shown) > 1 else 1
        curves: list[xr.Dataset] = []
        drawn: dict[str, list[Artist]] = {}
        notes: list[str] = []
        others = {*ax.figure.axes}
        for number, group in enumerate(shown, runs - len(shown)):  # colors as in other figures
            data, band = data_of_runs[group.members[0]], None
            if len(group.members) > 1:
                data, band = mean_and_spread(
                    [data_of_runs[at] for at in group.members], self.runs.bounds
                )
            same = next((at for at, other in enumerate(curves, 1) if other.equals(data)), None)
            curves.append(data)
            label = group.label if same is None else f"{group.label} (same as no. {same})"
            look = RunStyle(
                style=STYLES[style], run=label, number=number, runs=runs, band=band, notes=notes
            )
            if band is not None:
                look.note("line: mean over runs; band: ± one standard deviation between runs")
            before = {*ax.get_children()}
            self.draw(ax, data, look)
            drawn[group.label] = [each for each in ax.get_children() if each not in before]
            label, alone = ax.get_xlabel(), data.attrs.get(ALONE, "")
            if alone and alone not in label:
                ax.set_xlabel(f"{label} ({alone})")
        if log is not None:
            ax.set(xscale="linear", yscale="linear")
            for axis in {*log} & {*"xy"}:
                set_log(ax, axis)
        notes[:] = [worded(note, data_of_runs[0]) for note in notes]
        for axes in (ax, *({*ax.figure.axes} - others)):  # also a color bar
            reword(axes, partial(worded, data=data_of_runs[0]))
        notes += widen_covered(ax, drawn)
        add_legend(ax, notes)


def worded(text: str, data: xr.Dataset) -> str:
    """A text about tokens; for data of one parameter, about its rows."""
    return row_words(text) if _OF_PARAMETER in data.attrs else text


def _after_the_first(groups: Sequence[Group]) -> list[Group]:
    """Groups without the first run, with positions among the other runs."""
    moved = [
        Group(label=group.label, members=tuple(at - 1 for at in group.members if at))
        for group in groups
    ]
    return [group for group in moved if group.members]


def figure(
    collect: Callable[..., xr.Dataset],
    *,
    rows: int = 2,
    measures: tuple[str, ...] = (),
    of_window: bool = False,
    reading: str = "blocks",
    **traits: Any,
) -> Callable[[Callable[[Axes, xr.Dataset, RunStyle], None]], Figure]:
    """Make a `Figure` of a drawing function, with its name, and its docstring as the title.

    Parameters
    ----------
    collect, rows, measures, of_window, reading
        As for `Computation`.
    **traits
        Other attributes of `Figure`.
    """
    computation = Computation(
        collect=collect, rows=rows, measures=measures, of_window=of_window, reading=reading
    )

    def decorate(draw: Callable[[Axes, xr.Dataset, RunStyle], None]) -> Figure:
        title = (draw.__doc__ or "").rstrip(".")
        return Figure(name=draw.__name__, title=title, computation=computation, draw=draw, **traits)

    return decorate


def _check_axes(ax: object, projection: str) -> None:
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes | None):
        raise InvalidArgument(
            f"got ax={ax!r}, expected Axes of matplotlib, as pyplot.subplots() makes them"
        )
    if isinstance(ax, Axes) and ax.name != projection:
        raise InvalidArgument(
            f"got {ax.name} axes, expected {projection}; make them with "
            f"pyplot.subplots(subplot_kw={{'projection': {projection!r}}})"
        )


def asked_for(options: Mapping[str, Any]) -> Options:
    """Options from keywords.

    Raises
    ------
    InvalidArgument
        For an unknown name.
    """
    known = tuple(Options.__dataclass_fields__)
    options = {"color" if name == "colour" else name: value for name, value in options.items()}
    unknown = [name for name in options if name not in known]
    if unknown:
        unknown_names = [f"{name!r}{did_you_mean(name, known)}" for name in unknown]
        raise InvalidArgument(
            f"got {', '.join(unknown_names)}, "
            f"expected options among other, style, log, labels, title, size, {', '.join(known)}"
        )
    return Options(**options)


def prepared(ds: xr.Dataset, figures: Sequence[Figure], options: Options) -> Scan:
    """Scan that reads each block once for all these figures."""
    measures: dict[str, tuple[str, ...]] = {}
    for figure in figures:
        lattice = options.lattice if "lattice" in figure.options else "native"
        measures[lattice] = (*measures.get(lattice, ()), *figure.computation.measures)
    return windowed_scan(ds, options.steps, within=options.within, measures=measures)


def after_first_row(data: xr.Dataset, scan: Scan) -> xr.Dataset:
    """Data without the first row of the run, which no step produced."""
    return data.isel(step=slice(int(scan.window[0] == scan.steps[0]), None))


def with_members(data: xr.Dataset, scan: Scan, options: Options) -> xr.Dataset:
    """Data of each token, with the members of the populations that a figure shows."""
    shown = options.populations(scan)
    _, members = chosen_populations(scan.ds, shown)
    return data.assign(member=(("population", "token"), members)).assign_coords(population=shown)


def compute_together(lazy: Sequence[xr.Dataset], report: Report | None = None) -> list[xr.Dataset]:
    """Compute several Datasets in one pass, and report the number of finished tasks."""
    # As arrays: of several Datasets, dask 2026.8 loses tasks when it joins their graphs.
    arrays = [
        (number, name, variable.data)
        for number, ds in enumerate(lazy)
        for name, variable in ds.variables.items()
        if variable.chunks is not None
    ]
    values = compute_all([data for _, _, data in arrays], report)
    datasets = list(lazy)
    for (number, name, _), value in zip(arrays, values, strict=True):
        computed = datasets[number][name].copy(data=value)
        datasets[number] = datasets[number].assign({name: computed})
    return datasets


def check_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises
    ------
    MissingExtra
        Without matplotlib.
    """
    with needs_extra("a figure", "plot"):
        import matplotlib  # noqa: F401


def in_style(name: str) -> Any:
    """Context that sets a style of matplotlib."""
    from matplotlib import rc_context

    settings: Any = dict(style(name).settings)  # whose keys matplotlib types one by one
    return rc_context(settings)


def new_axes(
    name: str, size: tuple[float, float] | None = None, projection: str = "rectilinear"
) -> Axes:
    """Axes of a new figure in a style; a notebook shows the figure."""
    from matplotlib import pyplot

    # Outside of the context: the first figure of a notebook loads its backend, which turns
    # interactive mode on, and the context would turn it off again.
    figure = pyplot.figure(
        figsize=size or SIZE, dpi=150, layout="constrained", facecolor=style(name).ground
    )
    with in_style(name):
        return figure.add_subplot(projection=projection)
