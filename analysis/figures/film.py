"""The film of a run: its tokens in a fixed plane, frame by frame, and the loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.cloud.shape import pca
from trajstore.analysis.figures.axes_marks import named, with_units
from trajstore.analysis.figures.figure import (
    Options,
    check_matplotlib,
    compute_together,
    in_style,
)
from trajstore.analysis.figures.style import Style, population_color, style
from trajstore.analysis.figures.titles import titled_runs
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.scan.task_progress import Report
from trajstore.analysis.scan.window import windowed_scan
from trajstore.errors import InvalidArgument, RunExists
from trajstore.populations.masks import chosen_populations
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import staged_folder

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation

__all__ = ["FILM_ENDINGS", "check_film_target", "film", "save_film"]

FILM_ENDINGS = (".gif", ".webp", ".mp4", "")

_POINTS = 1 << 23
"""Most positions in memory, tokens × steps. Of longer runs, every k-th step can be a frame."""

_TAILED = 500
"""Most tokens that draw a tail."""

_TAIL = 6
"""Frames that a tail shows."""

_RATE = 15
"""Frames per second."""

_DPI = 80
_SIZE = (7.0, 5.6)
_FROZEN = "#8A8A8A"


def film(
    ds: xr.Dataset,
    *,
    frames: int = 120,
    pace: Literal["motion", "even"] = "motion",
    basis: Literal["all", "last"] = "all",
    style: str = "light",
    size: tuple[float, float] = _SIZE,
    report: Report | None = None,
    **options: Any,
) -> FuncAnimation:
    """Animate the tokens of a run in a plane that does not move, above the loss.

    The plane is that of the first two principal components. Dead and live tokens have a color
    each; a token turns gray when it is frozen, as in `analysis.freeze`. Each token draws a tail:
    its positions in the last frames. Runs of more than 500 tokens have no tails.

    Parameters
    ----------
    ds : Dataset
        A run with ``W`` (step, token, hidden).
    frames : int
        Number of frames, at least 2. A run of fewer rows has one frame a row.
    pace : {'motion', 'even'}
        Choose frames such that the mean token moves equally far between two of them, or at equal
        numbers of steps.
    basis : {'all', 'last'}
        Rows that define the plane, as for `analysis.pca`.
    style : {'light', 'dark'}
    size : tuple of float
        Width and height in inches.
    report : callable, optional
        Called with the number of finished tasks and of all tasks.
    **options
        ``population``, ``steps``, ``within`` and ``min_unchanged``, as for every figure.

    Returns
    -------
    FuncAnimation of matplotlib
        A notebook shows it with ``.to_jshtml()``; `save_film` writes it.

    Raises
    ------
    VariableNotRecorded
        If the run lacks ``W``.
    InvalidArgument
        For fewer than 2 frames or rows, or an unknown option.
    MissingExtra
        Without matplotlib.
    """
    check_matplotlib()
    if frames < 2:
        raise InvalidArgument(f"got frames={frames}, expected at least 2")
    data = _collected(ds, frames, pace, basis, Options(**options), report)
    return _animated(data, style, size, titled_runs([ds]))


def _collected(
    ds: xr.Dataset, frames: int, pace: str, basis: str, options: Options, report: Report | None
) -> xr.Dataset:
    """Positions at each frame, with the groups of tokens, and the loss of every step."""
    scan = windowed_scan(ds, options.steps, within=options.within)
    if scan.window.size < 2:
        raise InvalidArgument(f"a film needs at least 2 rows, got {scan.window.size}")
    shown = options.populations(scan, ("dead", "live"))
    _, members = chosen_populations(scan.ds, shown)
    found = pca(scan, components=2, basis=basis)
    position = found["scores"].sel(step=scan.window)
    every = -(-position.sizes["step"] * position.sizes["token"] // _POINTS)
    variance = found["spectrum"]
    lazy = xr.Dataset(
        {
            "position": position.isel(step=slice(None, None, every)).astype(np.float32),
            "share": variance[:2].rename(principal="component") / variance.sum(),
            "frozen_since": freeze(scan, min_unchanged=options.min_unchanged)["frozen_since"],
        }
    )
    if "loss" in ds:
        loss = scan.ds["loss"].sel(step=scan.window).rename(step="loss_step")
        lazy = lazy.assign(loss=loss.chunk())
    (data,) = compute_together([lazy], report)
    units = position.attrs.get("units")
    rows = _chosen_rows(data["position"].values, frames, pace)
    return (
        data.isel(step=rows)
        .assign(member=(("population", "token"), members))
        .assign_coords(population=shown)
        .assign_attrs(units=units)
    )


def _chosen_rows(
    position: npt.NDArray[np.float32], frames: int, pace: str
) -> npt.NDArray[np.int64]:
    """Rows of the frames, the first and the last among them, each once."""
    rows = len(position)
    if rows <= frames:
        return np.arange(rows)
    travelled = np.arange(rows, dtype=np.float64)
    if pace == "motion":
        hops = np.linalg.norm(np.diff(position, axis=0).astype(np.float64), axis=-1)
        travelled[1:] = np.nancumsum(np.nan_to_num(hops).mean(-1))
        travelled[0] = 0
    marks = np.linspace(travelled[0], travelled[-1], frames)
    return np.unique(np.append(np.searchsorted(travelled, marks[:-1]), rows - 1))


def _animated(data: xr.Dataset, look: str, size: tuple[float, float], title: str) -> FuncAnimation:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    with in_style(look):
        canvas = Figure(figsize=size, dpi=_DPI, layout="constrained")
        update = _drawn(canvas, data, style(look), title)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # the layout of every frame would take most of the time
    return FuncAnimation(
        canvas, update, frames=data.sizes["step"], interval=1000 / _RATE, repeat=True
    )


def _drawn(canvas: Any, data: xr.Dataset, look: Style, title: str) -> Callable[[int], list[Any]]:
    """Draw what does not move; return the function that draws a frame."""
    from matplotlib.collections import LineCollection

    has_loss = "loss" in data
    parts = canvas.subplots(1 + has_loss, height_ratios=[5, 1][: 1 + has_loss], squeeze=False)
    plane = parts[0, 0]
    steps = data["step"].values
    position = data["position"].transpose("step", "token", "component").values
    member, populations = data["member"].values, data["population"].values.tolist()
    since = data["frozen_since"].values
    tails = position.shape[1] <= _TAILED
    size = 4 if tails else 1.5
    plane.set_title(title, loc="left", fontsize="small")
    for axis, number, share in zip("xy", (1, 2), data["share"].values, strict=True):
        label = f"principal component {number} ({share:.0%} of the variance)"
        getattr(plane, f"set_{axis}label")(with_units(label, data.attrs["units"]))
    _fit(plane, position)
    corner = plane.text(
        0.99, 0.98, "", transform=plane.transAxes, ha="right", va="top", family="monospace"
    )
    frozen = plane.plot([], [], "o", ms=size, color=_FROZEN, zorder=2)[0]
    marks, lines = [], []
    for number, population in enumerate(populations):
        color = population_color(population)
        # Dead tokens, the first population, are in front: most of them share one place.
        marks += plane.plot([], [], "o", ms=size, color=color, zorder=9 - number)
        lines.append(LineCollection([], colors=color, linewidths=0.8, alpha=0.5, zorder=1))
        plane.add_collection(lines[-1], autolim=False)
    labels = [
        f"{named(name)} ({own.sum():,})" for name, own in zip(populations, member, strict=True)
    ]
    legend = canvas.legend(
        [*marks, frozen],
        [*labels, "frozen (00,000)"],  # the layout makes room for the count
        loc="outside lower center",
        ncols=len(labels) + 1,
        fontsize="small",
    )
    count = legend.get_texts()[-1]
    cursor = None
    if has_loss:
        below = parts[1, 0]
        below.plot(data["loss_step"].values, data["loss"].values, color=look.second, lw=1)
        below.set_xlabel("optimizer step")
        below.set_ylabel("loss / nat")
        cursor = below.axvline(steps[0], color=look.ink, lw=1)

    def update(frame: int) -> list[Any]:
        step, place = steps[frame], position[frame]
        still = (since >= 0) & (since <= step)
        shown = still & member.any(0)
        frozen.set_data(*place[shown].T)
        for own, mark, line in zip(member, marks, lines, strict=True):
            moving = own & ~still
            mark.set_data(*place[moving].T)
            if tails:
                path = position[max(0, frame - _TAIL) : frame + 1, moving]
                line.set_segments(list(path.transpose(1, 0, 2)))
        corner.set_text(f"step {step:,}")
        count.set_text(f"frozen ({shown.sum():,})")
        if cursor is not None:
            cursor.set_xdata([step, step])
        return [frozen, *marks, *lines, corner, count]

    return update


def _fit(plane: Any, position: npt.NDArray[np.float32]) -> None:
    """Fit the axes to all positions."""
    if not np.isfinite(position).any():
        raise InvalidArgument("a film needs finite positions, got none; W is NaN at every step")
    for axis, values in zip("xy", np.moveaxis(position, -1, 0), strict=True):
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = 0.05 * (high - low or 1.0)
        getattr(plane, f"set_{axis}lim")(low - margin, high + margin)


def save_film(
    animation: FuncAnimation,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    report: Report | None = None,
) -> Path:
    """Write a film as .gif, .webp or .mp4, or as a folder of PNG files.

    Parameters
    ----------
    animation : FuncAnimation
        Made by `film`.
    path : path-like
        A name without extension is that of a folder, whose files are ``0000.png``, ``0001.png``, …
    overwrite : bool
        Replace an existing file. A folder is never replaced.
    report : callable, optional
        Called with the number of written frames and of all frames.

    Raises
    ------
    InvalidArgument
        For another extension, or .mp4 without the program ffmpeg.
    RunExists
        If the target exists.
    """
    target = local_path(path)
    check_film_target(target, overwrite=overwrite)
    with staged_folder(target) as folder:
        new = folder / target.name  # writers choose the format by the extension
        animation.save(new, _writer(target.suffix.lower()), progress_callback=report)
        check_film_target(target, overwrite=overwrite)
        new.replace(target)
    return target


def check_film_target(path: Path, *, overwrite: bool) -> None:
    """Check the path of a film before any computation.

    Raises
    ------
    InvalidArgument, RunExists
        As `save_film`.
    """
    from matplotlib.animation import FFMpegWriter

    if path.suffix.lower() not in FILM_ENDINGS:
        raise InvalidArgument(
            f"got {path}, expected a file name with one of the extensions .gif, .webp and .mp4, or "
            "a folder without extension"
        )
    if path.suffix.lower() == ".mp4" and not FFMpegWriter.isAvailable():
        raise InvalidArgument(
            f"{path} needs the program ffmpeg, which is not installed; install it, or write .gif "
            "or .webp"
        )
    if path.is_dir() or (path.exists() and not overwrite):
        raise RunExists(f"{path} already exists; choose another name, or remove it")


def _writer(suffix: str) -> Any:
    from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter

    if suffix:
        return (FFMpegWriter if suffix == ".mp4" else PillowWriter)(fps=_RATE)

    class Pictures(AbstractMovieWriter):
        """Writes each frame to a file of a new folder."""

        def setup(self, fig: Any, outfile: Any, dpi: float | None = None) -> None:
            super().setup(fig, outfile, dpi)
            self.folder, self.number = Path(outfile), 0
            self.folder.mkdir()

        def grab_frame(self, **options: Any) -> None:
            self.fig.savefig(self.folder / f"{self.number:04}.png", dpi=self.dpi, **options)
            self.number += 1

        def finish(self) -> None:
            """Every file is complete."""

    return Pictures(fps=_RATE)
