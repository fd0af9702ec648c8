"""All figures by name, and several figures on one sheet: computed in one pass, drawn, written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.figures import cloud, motion, regimes, training
from trajstore.analysis.figures.axes_marks import set_title
from trajstore.analysis.figures.figure import (
    SIZE,
    Figure,
    Options,
    check_matplotlib,
    compute_together,
    in_style,
    prepared,
    worded,
)
from trajstore.analysis.figures.style import Group, run_groups, run_name, titled_runs
from trajstore.analysis.scan.block_tasks import return_memory
from trajstore.errors import InvalidArgument, VariableNotRecorded, did_you_mean
from trajstore.schema import EVALUATION, variables_of
from trajstore.store.reading.run_attributes import run_labels
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import check_file_target, staged_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


ENDINGS = (".png", ".svg", ".pdf")

_COLUMNS = 2
_MOST_PANELS = 40

_Panel = tuple[str, "Callable[[Axes], None]", str]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Computed data of several figures.

    Attributes
    ----------
    data : mapping
        By figure, for each run, or for each run but the first how it differs from the first.
    left_out : mapping
        Reason by the name of each figure that cannot be drawn.
    runs : sequence of Dataset
    labels : sequence of str
        Labels of the runs, for figures with a panel per run.
    groups : sequence of Group
        Groups of runs, for figures with several runs in one axes.
    title : str
        Title of all runs.
    """

    data: Mapping[str, Sequence[xr.Dataset]]
    figures: Sequence[Figure]
    runs: Sequence[xr.Dataset]
    labels: Sequence[str]
    groups: Sequence[Group]
    title: str
    left_out: Mapping[str, str] = field(default_factory=dict)


def collect(
    runs: Sequence[xr.Dataset],
    figures: Sequence[Figure],
    options: Options,
    *,
    labels: Sequence[str] | None = None,
    leave_out: bool = False,
    report: Callable[[int, int], None] | None = None,
) -> Collected:
    """Compute the data of figures: each quantity once, in as few passes as memory allows.

    Parameters
    ----------
    runs : sequence of Dataset
    figures : sequence of Figure
    options : Options
    labels : sequence of str, optional
        One per run; by default the settings that differ. Runs of one label share a curve: their
        mean and spread.
    leave_out : bool
        Leave out figures whose variables the runs do not hold, instead of raising an error.
    report : callable, optional
        Called with the number of finished tasks and of all tasks.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        As the analysis of each figure; with `leave_out`, if no figure remains.
    """
    groups = run_groups(runs, labels)
    scans = [prepared(run, figures, options) for run in runs]
    lazy: dict[str, list[xr.Dataset]] = {}
    left_out: dict[str, str] = {}
    for figure in figures:
        try:
            # On a sheet of all figures, those without populations or lattices ignore these options.
            figure.check(Options() if leave_out else options)
            lazy[figure.name] = figure.data(scans, options)
        except (VariableNotRecorded, InvalidArgument) as error:
            if not leave_out:
                raise
            left_out[figure.name] = str(error)
    if not lazy:
        message = "none of these figures can be drawn: "
        for number, (name, why) in enumerate(left_out.items()):
            message += f"{'; ' * (number > 0)}{name}: " + why
        raise InvalidArgument(message)
    drawable = [figure for figure in figures if figure.name in lazy]
    data: dict[str, list[xr.Dataset]] = {}
    for reading in dict.fromkeys(figure.computation.reading for figure in drawable):
        names = [figure.name for figure in drawable if figure.computation.reading == reading]
        computed = iter(compute_together([each for name in names for each in lazy[name]], report))
        data |= {name: [next(computed) for _ in lazy[name]] for name in names}
        return_memory()
    names = [run_name(run).removesuffix(".zarr") for run in runs]
    return Collected(
        data={figure.name: data[figure.name] for figure in drawable},
        figures=drawable,
        runs=runs,
        labels=_distinct(labels or run_labels([run.attrs for run in runs], names), names),
        groups=groups,
        title=titled_runs(runs, labels),
        left_out=left_out,
    )


def _distinct(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Labels of panels: with the name of the run where several runs have one label."""
    return [
        label if list(labels).count(label) == 1 else f"{label} ({name})"
        for label, name in zip(labels, names, strict=True)
    ]


def draw_sheet(
    collected: Collected,
    *,
    style: str = "light",
    log: str | None = None,
    title: str | None = None,
    size: tuple[float, float] | None = None,
) -> Canvas:
    """Draw figures on one sheet, two per row, or a single figure.

    Parameters
    ----------
    collected : Collected
    style : {'light', 'dark'}
    log : {'none', 'x', 'y', 'xy'}, optional
        Logarithmic axes of a single figure.
    title : str, optional
        By default the figure's title and the runs.
    size : tuple of float, optional
        Width and height of the whole sheet, in inches.

    Raises
    ------
    InvalidArgument
        For `log` with several figures, or more panels than a sheet holds.
    MissingExtra
        Without matplotlib.
    """
    check_matplotlib()
    from matplotlib.figure import Figure as Canvas

    if log is not None and len(collected.figures) > 1:
        raise InvalidArgument(f"got log={log!r} for several figures; draw a single figure with log")
    panels = _panels(collected, style, log)
    alone = len(panels) == 1
    rows = -(-len(panels) // _COLUMNS)
    with in_style(style):
        usual = SIZE if alone else (14, 4.6 * rows)
        canvas = Canvas(figsize=size or usual, layout="constrained")
        # One subfigure per panel, so that its legend takes no room from others.
        parts = canvas.subfigures(rows, 1 if alone else _COLUMNS, squeeze=False).ravel()
        for (name, draw, projection), part in zip(panels, parts, strict=False):
            ax = part.subplots(subplot_kw={"projection": projection})
            draw(ax)
            set_title(ax, (title or f"{name}\n{collected.title}") if alone else name)
        if not alone:
            canvas.suptitle(title or collected.title)
    return canvas


def _panels(collected: Collected, style: str, log: str | None) -> list[_Panel]:
    """Title, drawing function and projection of each panel: one per figure, or one per run."""
    panels: list[_Panel] = []
    for figure in collected.figures:
        data = collected.data[figure.name]
        figure.check(Options(), log=log)
        shown = _panel_groups(figure, collected)
        for groups in shown:
            label = f"\n{groups[0].label}" if len(shown) > 1 else ""
            curves = [replace(groups[0], label="")] if len(shown) > 1 else groups
            draw = partial(
                figure.draw_groups, data_of_runs=data, groups=curves, style=style, log=log
            )
            panels.append((f"{worded(figure.title, data[0])}{label}", draw, figure.projection))
    if len(panels) > _MOST_PANELS:
        raise InvalidArgument(
            f"got {len(panels)} panels for {len(collected.runs)} runs, expected at most "
            f"{_MOST_PANELS}; choose fewer runs or figures"
        )
    return panels


def _panel_groups(figure: Figure, collected: Collected) -> list[Sequence[Group]]:
    """Groups of each panel: all groups, one group, or one run for a figure without a mean."""
    if figure.in_one_axes(collected.groups):
        return [collected.groups]
    if figure.runs.averages:
        first = (0,) if figure.runs.between else ()
        return [[group] for group in collected.groups if group.members != first]
    return [
        [Group(label=label, members=(number,))] for number, label in enumerate(collected.labels)
    ]


def save(
    canvas: Canvas, path: str | os.PathLike[str], *, dpi: int = 150, overwrite: bool = False
) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix of the name.

    Raises
    ------
    InvalidArgument
        For another suffix, or a resolution outside 10 to 1,200 dpi.
    RunExists
        If the file exists and `overwrite` is not set.
    """
    target = local_path(path)
    check_target(target, dpi=dpi, overwrite=overwrite)
    with staged_file(target, overwrite=overwrite) as new:
        canvas.savefig(new, dpi=dpi, format=target.suffix[1:].lower())
    return target


def check_target(path: Path, *, dpi: int = 150, overwrite: bool) -> None:
    """Check the file before any computation.

    Raises
    ------
    InvalidArgument, RunExists
        As `save`.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InvalidArgument(
            f"got {path}, expected a file name with one of the extensions {', '.join(ENDINGS)}"
        )
    if not 10 <= dpi <= 1200:
        raise InvalidArgument(f"got {dpi} dpi, expected 10 to 1,200")
    check_file_target(path, overwrite=overwrite)


class Figures(dict[str, Figure]):
    """Figures by name. A hyphen finds the same figure as an underscore."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        super().__init__((figure.name, figure) for figure in figures)

    def __missing__(self, name: str) -> Figure:
        for figure in self.values():
            if _spelled(figure.name) == _spelled(name):
                return figure
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _spelled(name) in map(_spelled, self)


def _spelled(name: str) -> str:
    return name.replace("-", "_")


FIGURES = Figures([
    training.loss, motion.grad_norms, motion.displacement, motion.speed, regimes.freeze,
    regimes.last_motion, regimes.lifecycle, regimes.regimes, regimes.freeze_cause,
    motion.lattice_displacement, regimes.heatmap, motion.bulk_thermal,
    motion.speed_density, cloud.centroid, cloud.trajectory, cloud.sky, cloud.spectrum,
    motion.autocorrelation, training.moments, training.moment_sizes, cloud.moment_tracks,
    cloud.clusters, training.logit_stats, training.param_update_lost, training.layers,
    motion.discontinuities, motion.divergence,
])  # fmt: skip
"""Figures of ``trajstore plot`` and ``ds.traj.plot``, in the order of a sheet."""


def figures_of(ds: xr.Dataset) -> Figures:
    """Figures of a Dataset by name: those of a run, and a figure of each variable of no run.

    The results of `trajstore evaluate` have only the latter.
    """
    known = Figures(() if EVALUATION in ds.attrs else FIGURES.values())
    recorded = {*known, *variables_of(ds.attrs)}
    others = [str(name) for name in ds.data_vars if name not in recorded]
    return Figures([*known.values(), *(training.variable(name, ds) for name in others)])


def figures_named(names: Sequence[str], runs: int = 1, known: Figures = FIGURES) -> list[Figure]:
    """Figures of these names, each once; ``all`` means every known figure of so many runs.

    Raises
    ------
    InvalidArgument
        For an unknown name, or without any.
    """
    unknown = [name for name in names if name not in known and name != "all"]
    film = ["film"] if "trajectory" in known else []  # a figure of a run, drawn by another function
    choices = ["all", *known, *film]
    unknown_names = [f"{name!r}{did_you_mean(name, choices)}" for name in unknown]
    if unknown or not names:
        raise InvalidArgument(
            f"got {', '.join(unknown_names) or 'no figure'}, "
            f"expected one or more of {', '.join(choices)}"
        )
    every = [name for name, figure in known.items() if runs > 1 or not figure.runs.between]
    wanted = (known[name] for name in (every if "all" in names else names))
    return list({figure.name: figure for figure in wanted}.values())
