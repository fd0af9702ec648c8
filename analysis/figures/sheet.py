"""Several figures of a run in one pass, on one sheet, or one figure by itself; to a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.figures.across_runs import Group, run_groups
from trajstore.analysis.figures.figure import (
    SIZE,
    Figure,
    Options,
    check_matplotlib,
    compute_together,
    in_style,
    prepared,
)
from trajstore.analysis.figures.titles import run_name, titled_runs
from trajstore.analysis.scan.task_progress import return_memory
from trajstore.errors import InvalidArgument, RunExists, VariableNotRecorded
from trajstore.store.reading.run_settings import run_labels
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import staged_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["ENDINGS", "Collected", "check_target", "collect", "draw_sheet", "save"]

ENDINGS = (".png", ".svg", ".pdf")

_COLUMNS = 2
_MOST_PANELS = 40

_Panel = tuple[str, "Callable[[Axes], None]"]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What several figures show, computed.

    Attributes
    ----------
    data : mapping
        By figure, of each run; or of each but the first, how it differs from that.
    left_out : mapping
        By the name of each figure that cannot be drawn, why.
    runs : sequence of Dataset
    labels : sequence of str
        Of the runs, where each is shown by itself.
    groups : sequence of Group
        Curves of figures that have several runs in one axes.
    title : str
        Of the runs together.
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
    """Compute what figures show, each quantity once, in as few readings of a run as memory allows.

    Parameters
    ----------
    runs : sequence of Dataset
    figures : sequence of Figure
    options : Options
    labels : sequence of str, optional
        One for each run; by default the settings in which they differ. Runs of one label are shown
        as their mean and spread.
    leave_out : bool
        Leave out figures that the runs do not hold what is needed for; by default that is an error.
    report : callable, optional
        Told of tasks done and in all.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        As the analysis that a figure draws; with `leave_out`, if nothing is left.
    """
    groups = run_groups(runs, labels)
    scans = [prepared(run, figures, options) for run in runs]
    lazy: dict[str, list[xr.Dataset]] = {}
    left_out: dict[str, str] = {}
    for figure in figures:
        try:
            # On a sheet of all, what is not about populations or lattices shows the run as it is.
            figure.check(Options() if leave_out else options)
            lazy[figure.name] = figure.data(scans, options)
        except (VariableNotRecorded, InvalidArgument) as error:
            if not leave_out:
                raise
            left_out[figure.name] = str(error)
    if not lazy:
        raise InvalidArgument(
            "none of these figures can be drawn: "
            + "; ".join(f"{name}: {why}" for name, why in left_out.items())
        )
    there = [figure for figure in figures if figure.name in lazy]
    data: dict[str, list[xr.Dataset]] = {}
    for reading in dict.fromkeys(figure.reading for figure in there):
        names = [figure.name for figure in there if figure.reading == reading]
        computed = iter(compute_together([each for name in names for each in lazy[name]], report))
        data |= {name: [next(computed) for _ in lazy[name]] for name in names}
        return_memory()
    names = [run_name(run).removesuffix(".zarr") for run in runs]
    return Collected(
        data={figure.name: data[figure.name] for figure in there},
        figures=there,
        runs=runs,
        labels=labels or run_labels([run.attrs for run in runs], names),
        groups=groups,
        title=titled_runs(runs, labels),
        left_out=left_out,
    )


def draw_sheet(
    collected: Collected,
    *,
    style: str = "light",
    log: str | None = None,
    title: str | None = None,
    size: tuple[float, float] | None = None,
) -> Canvas:
    """Figures on one sheet, two in a row; one by itself, if it is the only one.

    Parameters
    ----------
    collected : Collected
    style : {'light', 'dark'}
    log : {'none', 'x', 'y', 'xy'}, optional
        For the only one.
    title : str, optional
        By default what is shown, and of which runs.
    size : tuple of float, optional
        Width and height of the whole sheet, in inches.

    Raises
    ------
    InvalidArgument
        If there are several and scales are asked for; for a size that no sheet has.
    MissingExtra
        Without matplotlib.
    """
    check_matplotlib()
    from matplotlib.figure import Figure as Canvas

    if log is not None and len(collected.figures) > 1:
        raise InvalidArgument("log goes with a single kind of figure; draw the others apart")
    panels = _panels(collected, style, log)
    alone = len(panels) == 1
    rows = -(-len(panels) // _COLUMNS)
    with in_style(style):
        usual = SIZE if alone else (14, 4.6 * rows)
        canvas = Canvas(figsize=size or usual, layout="constrained")
        # A part for each, so that the legend of one takes no room from the others.
        parts = canvas.subfigures(rows, 1 if alone else _COLUMNS, squeeze=False).ravel()
        for (name, draw), part in zip(panels, parts, strict=False):
            ax = part.subplots()
            draw(ax)
            ax.set_title((title or f"{name}\n{collected.title}") if alone else name)
        if not alone:
            canvas.suptitle(title or collected.title)
    return canvas


def _panels(collected: Collected, style: str, log: str | None) -> list[_Panel]:
    """What is drawn, by its title: a panel a figure, or where runs do not go into one, several."""
    panels: list[_Panel] = []
    for figure in collected.figures:
        data = collected.data[figure.name]
        figure.check(Options(), log=log)
        shown = _panel_groups(figure, collected)
        for groups in shown:
            label = f"\n{groups[0].label}" if len(shown) > 1 else ""
            curves = [replace(groups[0], label="")] if len(shown) > 1 else groups
            draw = partial(figure.draw_groups, found=data, groups=curves, style=style, log=log)
            panels.append((f"{figure.title}{label}", draw))
    if len(panels) > _MOST_PANELS:
        raise InvalidArgument(
            f"these would be {len(panels)} figures on a sheet, of {len(collected.runs)} runs; at "
            f"most {_MOST_PANELS} can be read, so choose fewer runs or kinds"
        )
    return panels


def _panel_groups(figure: Figure, collected: Collected) -> list[Sequence[Group]]:
    """Groups of each panel: all, or one in each; of a figure without a mean, each run."""
    if figure.in_one_axes(collected.groups):
        return [collected.groups]
    if figure.averages:
        first = (0,) if figure.between else ()
        return [[group] for group in collected.groups if group.members != first]
    return [
        [Group(label=label, members=(number,))] for number, label in enumerate(collected.labels)
    ]


def save(
    canvas: Canvas, path: str | os.PathLike[str], *, dpi: int = 150, overwrite: bool = False
) -> Path:
    """Write a figure: PNG, SVG or PDF, by the ending of the name.

    Raises
    ------
    InvalidArgument
        For another ending, or an impossible number of dots per inch.
    RunExists
        If the file is there, and `overwrite` is not set.
    """
    target = local_path(path)
    check_target(target, dpi=dpi, overwrite=overwrite)
    with staged_file(target, overwrite=overwrite) as new:
        canvas.savefig(new, dpi=dpi, format=target.suffix[1:].lower())
    return target


def check_target(path: Path, *, dpi: int, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Raises
    ------
    InvalidArgument, RunExists
        As `save`.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InvalidArgument(
            f"cannot tell the format of {path} by its ending; expected {', '.join(ENDINGS)}"
        )
    if not 10 <= dpi <= 1200:
        raise InvalidArgument(f"got {dpi} dots per inch, expected 10 to 1,200")
    if path.exists() and not overwrite:
        raise RunExists(
            f"{path} is already there; choose another name, or overwrite it (--overwrite)"
        )
