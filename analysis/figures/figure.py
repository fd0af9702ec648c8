"""What a figure is: what it computes, lazily, and how that is drawn, apart from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.analysis.figures.across_runs import Group, mean_and_spread, run_groups
from trajstore.analysis.figures.style import STYLES, Style, style
from trajstore.analysis.motion.stillness import MIN_STILL
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.scan.task_progress import Report, compute_all
from trajstore.analysis.scan.window import windowed_scan
from trajstore.analysis.several.many_runs import each_run
from trajstore.errors import InvalidArgument, MissingExtra
from trajstore.nearest_name import did_you_mean
from trajstore.populations.masks import check_dataset, populations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trajstore.exchange.selection import Steps

__all__ = [
    "MOST_GROUPS",
    "Figure",
    "Look",
    "Options",
    "after_first_row",
    "check_matplotlib",
    "compute_together",
    "figure",
    "prepared",
    "run_name",
    "run_system",
]

MOST_GROUPS = 2
"""Of settings in one axes: whole lines and broken ones."""

_ALONE = "alone"
"""Attribute of what is drawn: which rows alone were looked at."""

LOGS = ("none", "x", "y", "xy")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of a run, the same for every figure.

    Attributes
    ----------
    population : str, optional
        Only this one; by default what the figure is about, dead and live tokens mostly.
    lattice : str
        For the figures that have one.
    colour : {'regime', 'hop'}
        Of the map of tokens and steps.
    plane : {'principal', 'hidden_mean'}
        Of the paths.
    steps : str, int, slice or iterable of int, optional
        Window that is shown, of facts of the whole run.
    within : bool
        Compute everything from the rows of the window alone.
    min_still : int
        Steps without motion that make a token frozen, as for `analysis.freeze`.
    """

    population: str | None = None
    lattice: str = "native"
    colour: str = "regime"
    plane: str = "principal"
    steps: Steps = None
    within: bool = False
    min_still: int = MIN_STILL

    def __post_init__(self) -> None:
        for name, known in (("colour", ("regime", "hop")), ("plane", ("principal", "hidden_mean"))):
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"got {name}={getattr(self, name)!r}, expected {' or '.join(known)}"
                )

    def populations(self, scan: Scan, usual: Sequence[str] = ("dead", "live")) -> list[str]:
        """Names of those to be shown: such as have tokens.

        Parameters
        ----------
        scan : Scan
        usual : sequence of str
            Without a choice; ``all`` where the run says nothing of them.

        Raises
        ------
        InvalidArgument
            If the run does not know the chosen one, or no token belongs to it.
        """
        names, groups = populations(scan.ds)
        there = [name for name, group in zip(names, groups, strict=True) if group.any()]
        if self.population is None:
            return [name for name in there if name in usual] or ["all"]
        if self.population not in there:
            raise InvalidArgument(
                f"there are no tokens of the population {self.population!r} here; expected "
                f"{', '.join(there)}"
            )
        return [self.population]


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a figure is drawn.

    Attributes
    ----------
    style : Style
    run : str
        In front of the labels, where two runs are in one axes.
    second : bool
        Whether this is the second of them, which has broken lines.
    spread : Dataset, optional
        Of the mean of several runs: the standard deviation between them, of each variable.
    """

    style: Style = field(default_factory=lambda: STYLES["light"])
    run: str = ""
    second: bool = False
    spread: xr.Dataset | None = None

    @property
    def band(self) -> float:
        """How opaque the bands of this run are."""
        return self.style.band / 2 if self.second else self.style.band

    @property
    def line(self) -> str:
        """Style of the lines of this run."""
        return "--" if self.second else "-"

    def label(self, text: str) -> str:
        """Label in a legend."""
        return f"{self.run}: {text}" if self.run else text


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One kind of figure.

    It can be called: ``gradients(ds, ax)`` draws it into an Axes and returns that.

    Attributes
    ----------
    name, title : str
    collect : callable
        From a prepared Dataset and `Options` to what is drawn, lazy.
    draw : callable
        From an Axes, what `collect` found, computed, and a `Look`.
    rows : int
        Without so many rows there is nothing to draw.
    measures : tuple of str
        What it needs of the way between rows, as a `Quantity` does.
    on_lattice : bool
        Whether it can be asked on a lattice.
    overlays : bool
        Whether two runs go into one axes.
    averages : bool
        Whether it can show the mean and the spread of several runs; of others, each is shown.
    scales : bool
        Whether the scales of its axes are a matter of choice.
    of_populations : bool
        Whether it can show a single population.
    of_window : bool
        Whether it describes the rows of a window as if there were no others, as `Quantity` does.
    reading : str
        Figures of one reading of the run are computed together. What holds all tokens of a block
        at once has its own, so that not everything is held at once.
    """

    name: str
    title: str
    collect: Callable[[Scan, Options], xr.Dataset]
    draw: Callable[[Axes, xr.Dataset, Look], None]
    rows: int = 2
    measures: tuple[str, ...] = ()
    on_lattice: bool = False
    overlays: bool = False
    averages: bool = False
    scales: bool = True
    of_populations: bool = True
    of_window: bool = False
    reading: str = "blocks"

    def data(self, scan: Scan, options: Options) -> xr.Dataset:
        """What is drawn, lazy.

        Raises
        ------
        InvalidArgument
            If there are too few rows.
        VariableNotRecorded
            If the run does not hold what it is about.
        """
        if scan.window.size < self.rows:
            of = "the window" if scan.has_window else "the run"
            raise InvalidArgument(
                f"{self.name} needs at least {self.rows} rows, and {of} has {scan.window.size}"
            )
        found = self.collect(scan.of_window() if self.of_window else scan, options)
        if options.within or (self.of_window and scan.has_window):
            found.attrs[_ALONE] = f"computed from steps {scan.window[0]} to {scan.window[-1]} alone"
        return found

    def __call__(
        self,
        ds: xr.Dataset,
        ax: Axes | None = None,
        *,
        other: xr.Dataset | None = None,
        style: str = "light",
        log: str | None = None,
        **options: Any,
    ) -> Axes:
        """Draw this figure of a run.

        Parameters
        ----------
        ds : Dataset
            A run, or a part of it; or several along ``run``, of which the mean and the spread are
            drawn, of up to two settings.
        ax : Axes of matplotlib, optional
            By default those of a new figure.
        other : Dataset, optional
            A second run in the same axes, with broken lines.
        style : {'light', 'dark'}
        log : {'none', 'x', 'y', 'xy'}, optional
            Which axes are logarithmic; by default what suits the figure.
        **options
            Of `Options`: ``population``, ``lattice``, ``colour``, ``plane``, ``steps``, ``within``,
            ``min_still``.

        Returns
        -------
        Axes

        Raises
        ------
        VariableNotRecorded
            If the run does not hold what it is about.
        InvalidArgument
            For an option that is unknown, or that this figure does not have.
        MissingExtra
            Without matplotlib.
        """
        check_matplotlib()
        for run in (ds, ds if other is None else other):
            check_dataset(run)
        _check_axes(ax)
        chosen = asked_for(options)
        self.check(chosen, other=other is not None, log=log)
        if "run" in ds.dims:
            groups, runs = self._groups(ds, other), each_run(ds)
            draw, about = partial(self.draw_groups, groups=groups), described_runs(runs)
        else:
            runs = [ds] if other is None else [ds, other]
            draw, about = partial(self.draw_all, runs=runs), " | ".join(map(described, runs))
        found = compute_together([self.data(prepared(run, [self], chosen), chosen) for run in runs])
        with in_style(style):
            target = new_axes() if ax is None else ax
            draw(target, found, style=style, log=log)
            target.set_title(f"{self.title}\n{about}", loc="left")
        return target

    def _groups(self, ds: xr.Dataset, other: xr.Dataset | None) -> list[Group]:
        """Groups of several runs, if this figure can show them in one axes."""
        groups = run_groups(ds)
        if other is not None or not self.averages or len(groups) > MOST_GROUPS:
            why = f"they have {len(groups)} settings" if self.averages else "it is not averaged"
            why = "there is another one, too" if other is not None else why
            raise InvalidArgument(
                f"{self.name} cannot show these runs in one axes, as {why}; choose one, "
                "ds.isel(run=0), or draw them beside each other: trajstore plot RUN… KIND"
            )
        return groups

    def check(self, options: Options, *, other: bool, log: str | None = None) -> None:
        """Refuse what this figure does not have.

        Raises
        ------
        InvalidArgument
            For a second run, a population, a lattice or scales, where it has none.
        """
        if options.population is not None and not self.of_populations:
            raise InvalidArgument(
                f"{self.name} is not about a population; leave it out, or choose tokens instead"
            )
        if options.lattice != "native" and not self.on_lattice:
            raise InvalidArgument(f"{self.name} knows of no lattice; leave it out")
        if other and not self.overlays:
            raise InvalidArgument(f"{self.name} shows a single run; leave the other out")
        if log is not None and log not in LOGS:
            raise InvalidArgument(f"got log={log!r}, expected {', '.join(LOGS)}")
        if log is not None and not self.scales:
            raise InvalidArgument(f"the scales of {self.name} are what they are; leave out log")

    def draw_all(
        self,
        ax: Axes,
        found: Sequence[xr.Dataset],
        runs: Sequence[xr.Dataset],
        *,
        style: str,
        log: str | None = None,
    ) -> None:
        """Draw what has been computed of one run, or of two."""
        for number, (data, ds) in enumerate(zip(found, runs, strict=True)):
            name = run_name(ds) if len(found) > 1 else ""
            if number and name == run_name(runs[0]):
                name = f"{name} (2)"
            self._draw(ax, data, Look(style=STYLES[style], run=name, second=number > 0))
        _scale(ax, log)

    def draw_groups(
        self,
        ax: Axes,
        found: Sequence[xr.Dataset],
        groups: Sequence[Group],
        *,
        style: str,
        log: str | None = None,
    ) -> None:
        """Draw what has been computed of several runs: mean and spread of each group."""
        for number, group in enumerate(groups):
            data = [found[member] for member in group.members]
            mean, spread = mean_and_spread(data) if self.averages else (data[0], None)
            label = f"{group.label} ({len(data)} {'run' if len(data) == 1 else 'runs'})"
            look = Look(
                style=STYLES[style],
                run=label if len(groups) > 1 else "",
                second=number > 0,
                spread=spread,
            )
            self._draw(ax, mean, look)
        _scale(ax, log)

    def _draw(self, ax: Axes, data: xr.Dataset, look: Look) -> None:
        self.draw(ax, data, look)
        label, alone = ax.get_xlabel(), data.attrs.get(_ALONE, "")
        if alone and alone not in label:
            ax.set_xlabel(f"{label} ({alone})")


def figure(
    collect: Callable[[Scan, Options], xr.Dataset], **traits: Any
) -> Callable[[Callable[[Axes, xr.Dataset, Look], None]], Figure]:
    """Make a `Figure` of the function that draws it: its name, and its docstring as the title.

    Parameters
    ----------
    collect : callable
    **traits
        The other attributes of `Figure`.
    """

    def decorate(draw: Callable[[Axes, xr.Dataset, Look], None]) -> Figure:
        name, title = draw.__name__.replace("_", "-"), (draw.__doc__ or "").rstrip(".")
        return Figure(name=name, title=title, collect=collect, draw=draw, **traits)

    return decorate


def _check_axes(ax: object) -> None:
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes | None):
        raise InvalidArgument(
            f"got ax={ax!r}, expected Axes of matplotlib, as pyplot.subplots() makes them"
        )


def _scale(ax: Axes, log: str | None) -> None:
    if log is not None:
        ax.set_xscale("log" if "x" in log else "linear")
        ax.set_yscale("log" if "y" in log else "linear")


def asked_for(options: Mapping[str, Any]) -> Options:
    """Options from keywords.

    Raises
    ------
    InvalidArgument
        If one is unknown.
    """
    known = tuple(Options.__dataclass_fields__)
    unknown = [name for name in options if name not in known]
    if unknown:
        unknown_names = [f"{name!r}{did_you_mean(name, known)}" for name in unknown]
        raise InvalidArgument(
            f"got {', '.join(unknown_names)}, "
            f"expected some of other, style, log, {', '.join(known)}"
        )
    return Options(**options)


def prepared(ds: xr.Dataset, figures: Sequence[Figure], options: Options) -> Scan:
    """A run on which all these figures can be asked, each block being walked once."""
    measures: dict[str, tuple[str, ...]] = {}
    for figure in figures:
        lattice = options.lattice if figure.on_lattice else "native"
        measures[lattice] = (*measures.get(lattice, ()), *figure.measures)
    return windowed_scan(ds, options.steps, within=options.within, measures=measures)


def after_first_row(data: xr.Dataset, scan: Scan) -> xr.Dataset:
    """What is shown of the steps that were taken: of the first row, none was."""
    return data.isel(step=slice(int(scan.window[0] == scan.steps[0]), None))


def compute_together(lazy: Sequence[xr.Dataset], report: Report | None = None) -> list[xr.Dataset]:
    """Compute several Datasets in one pass, and report tasks done and in all."""
    # As arrays: of several Datasets, dask 2026.8 loses tasks when it joins their graphs.
    arrays = [
        (number, name, variable.data)
        for number, ds in enumerate(lazy)
        for name, variable in ds.variables.items()
        if variable.chunks is not None
    ]
    values = compute_all([data for _, _, data in arrays], report)
    found = list(lazy)
    for (number, name, _), value in zip(arrays, values, strict=True):
        computed = found[number][name].copy(data=value)
        found[number] = found[number].assign({name: computed})
    return found


def check_matplotlib() -> None:
    """Say what is missing.

    Raises
    ------
    MissingExtra
        Without matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra("figures need matplotlib; install trajstore[plot]") from error


def in_style(name: str) -> Any:
    """Context in which matplotlib draws in a style."""
    from matplotlib import rc_context

    settings: Any = dict(style(name).settings)  # whose keys matplotlib types one by one
    return rc_context(settings)


def new_axes() -> Axes:
    """Axes of a new figure that a notebook shows."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, 5), dpi=150, layout="constrained")[1]


def run_name(ds: xr.Dataset) -> str:
    """Name of the folder it was opened from, else the beginning of its identity."""
    source = ds.encoding.get("source")
    if source:
        return Path(str(source).rstrip("/")).name
    runs = ds.attrs.get("runs") or [[0, ""]]
    return f"run {runs[-1][1][:8]}".strip()


def run_system(ds: xr.Dataset) -> str:
    """What was trained: text, tokens × hidden, optimizer and type, as far as the run says so."""
    config = ds.attrs.get("config") or {}
    sizes = " × ".join(f"{ds.sizes[dim]:,}" for dim in ("token", "hidden") if dim in ds.sizes)
    optimizer = str((ds.attrs.get("optimizer") or {}).get("class", "")).rpartition(".")[2]
    facts = [
        str((config.get("data") or {}).get("corpus") or ""),
        f"{sizes} W" if sizes else "",
        optimizer,
        str(ds["W"].attrs.get("native_dtype", "")) if "W" in ds else "",
    ]
    return ", ".join(fact for fact in facts if fact)


def described(ds: xr.Dataset) -> str:
    """Name and system of a run."""
    system = run_system(ds)
    return f"{run_name(ds)} · {system}" if system else run_name(ds)


def described_runs(runs: Sequence[xr.Dataset]) -> str:
    """How many runs, and the system of the first."""
    return " · ".join(filter(None, (f"{len(runs)} runs", run_system(runs[0]))))
