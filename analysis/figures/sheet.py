"""Several figures of a run in one pass, on one sheet, or one figure by itself; to a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.analysis.figures.across_runs import Group
from trajstore.analysis.figures.figure import (
    MOST_GROUPS,
    Figure,
    Options,
    check_matplotlib,
    compute_together,
    described,
    described_runs,
    in_style,
    prepared,
    run_name,
)
from trajstore.analysis.scan.task_progress import return_memory
from trajstore.errors import InvalidArgument, RunExists, VariableNotRecorded
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
        By figure, of each run.
    left_out : mapping
        By the name of each figure that cannot be drawn, why.
    runs : sequence of Dataset
    groups : sequence of Group
        Of which of them the mean and the spread are shown; without any, the runs themselves.
    """

    data: Mapping[str, tuple[xr.Dataset, ...]]
    figures: Sequence[Figure]
    runs: Sequence[xr.Dataset]
    left_out: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Group] = ()


def collect(
    runs: Sequence[xr.Dataset],
    figures: Sequence[Figure],
    options: Options,
    *,
    groups: Sequence[Group] = (),
    leave_out: bool = False,
    report: Callable[[int, int], None] | None = None,
) -> Collected:
    """Compute what figures show, each quantity once, in as few readings of a run as memory allows.

    Parameters
    ----------
    runs : sequence of Dataset
        One, or two for one axes; or with `groups` any number.
    figures : sequence of Figure
    options : Options
    groups : sequence of Group
        Which of them differ in their seeds only: their mean and spread are shown.
    leave_out : bool
        Leave out figures that the runs do not hold what is needed for; by default that is an error.
    report : callable, optional
        Told of tasks done and in all.

    Raises
    ------
    VariableNotRecorded, InvalidArgument
        As the analysis that a figure draws; with `leave_out`, if nothing is left.
    """
    scans = [prepared(run, figures, options) for run in runs]
    lazy: dict[str, tuple[xr.Dataset, ...]] = {}
    left_out: dict[str, str] = {}
    for figure in figures:
        try:
            # On a sheet of all, what is not about populations or lattices shows the run as it is.
            other = len(runs) > 1 and not groups
            figure.check(Options() if leave_out else options, other=other)
            lazy[figure.name] = tuple(figure.data(scan, options) for scan in scans)
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
    data: dict[str, tuple[xr.Dataset, ...]] = {}
    for reading in dict.fromkeys(figure.reading for figure in there):
        names = [figure.name for figure in there if figure.reading == reading]
        computed = iter(compute_together([each for name in names for each in lazy[name]], report))
        data |= {name: tuple(next(computed) for _ in runs) for name in names}
        return_memory()
    return Collected(
        data={figure.name: data[figure.name] for figure in there},
        figures=there,
        runs=runs,
        left_out=left_out,
        groups=groups,
    )


def draw_sheet(collected: Collected, *, style: str = "light", log: str | None = None) -> Canvas:
    """Figures on one sheet, two in a row; one by itself, if it is the only one.

    Parameters
    ----------
    collected : Collected
    style : {'light', 'dark'}
    log : {'none', 'x', 'y', 'xy'}, optional
        For the only one.

    Raises
    ------
    InvalidArgument
        If there are several and scales are asked for.
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
        canvas = Canvas(figsize=(8, 5) if alone else (14, 4.6 * rows), layout="constrained")
        # A part for each, so that the legend of one takes no room from the others.
        parts = canvas.subfigures(rows, 1 if alone else _COLUMNS, squeeze=False).ravel()
        several = bool(collected.groups)
        title = (
            described_runs(collected.runs)
            if several
            else "  |  ".join(map(described, collected.runs))
        )
        for (name, draw), part in zip(panels, parts, strict=False):
            ax = part.subplots()
            draw(ax)
            ax.set_title(f"{name}\n{title}" if alone else name)
        if not alone:
            canvas.suptitle(title)
    return canvas


def _panels(collected: Collected, style: str, log: str | None) -> list[_Panel]:
    """What is drawn, by its title: a panel a figure, or where runs do not go into one, several."""
    panels: list[_Panel] = []
    several = bool(collected.groups)
    for figure in collected.figures:
        data = collected.data[figure.name]
        figure.check(Options(), other=len(collected.runs) > 1 and not several, log=log)
        if not several:
            draw = partial(figure.draw_all, found=data, runs=collected.runs, style=style, log=log)
            panels.append((figure.title, draw))
            continue
        shown = _panel_groups(figure, collected)
        for groups in shown:
            label = f": {groups[0].label}" if len(shown) > 1 else ""
            draw = partial(figure.draw_groups, found=data, groups=groups, style=style, log=log)
            panels.append((f"{figure.title}{label}", draw))
    if len(panels) > _MOST_PANELS:
        raise InvalidArgument(
            f"these would be {len(panels)} figures on a sheet, of {len(collected.runs)} runs; at "
            f"most {_MOST_PANELS} can be read, so choose fewer runs or kinds"
        )
    return panels


def _panel_groups(figure: Figure, collected: Collected) -> list[list[Group]]:
    """Groups of each panel; of a figure that is not averaged, each run is one."""
    if not figure.averages:
        return [
            [Group(label=run_name(run).removesuffix(".zarr"), members=(number,))]
            for number, run in enumerate(collected.runs)
        ]
    if len(collected.groups) <= MOST_GROUPS:
        return [list(collected.groups)]
    return [[group] for group in collected.groups]


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
