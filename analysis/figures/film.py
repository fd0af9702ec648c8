"""The film of a run: its tokens in a fixed plane, frame by frame, above the loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import named, set_title
from trajstore.analysis.figures.cloud import LINES, fit_axes, label_plane, trajectory
from trajstore.analysis.figures.figure import (
    ALONE,
    Computation,
    Options,
    asked_for,
    check_matplotlib,
    compute_together,
    in_style,
    prepared,
    worded,
)
from trajstore.analysis.figures.sheet import ENDINGS
from trajstore.analysis.figures.style import Style, population_color, style, titled_runs
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Report
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import check_dataset
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import check_file_target, staged_folder

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation

FILM_ENDINGS = (".gif", ".webp", ".mp4", "", *ENDINGS)

_FRAMES = 120
_MOST_FRAMES = 1000
_RATE = 15  # frames per second
_HOLD = 30  # frames for which the last picture stays
_TAIL = 6  # frames that a tail shows
_SHADES = 16
_DPI = 110
_SIZE = (7.0, 5.6)
_FROZEN = "#9A9A9A"


def film(
    ds: xr.Dataset,
    *,
    frames: int | str = _FRAMES,
    style: str = "light",
    title: str | None = None,
    size: tuple[float, float] = _SIZE,
    report: Report | None = None,
    **options: Any,
) -> FuncAnimation:
    """Animate the tokens of a run in a plane that does not move, above the loss.

    The plane is that of `trajectory`. Dead and live tokens have a color each. A frozen token,
    as in `analysis.freeze`, is a larger gray disk with a rim of this color. Each token draws a
    tail: its positions in the last frames. More than 500 tokens have no rims and tails.

    Parameters
    ----------
    ds : Dataset
        A run with ``W`` (step, token, hidden).
    frames : int or str
        Number of frames, 2 to 1,000, chosen by motion: the mean token moves equally far between two
        of them. A run with fewer rows, or with a few long moves, has fewer frames. ``"even:120"``
        chooses frames at equal numbers of steps.
    style : {'light', 'dark'}
    title : str, optional
        By default the run.
    size : tuple of float
        Width and height in inches.
    report : callable, optional
        Called with the numbers of finished and of all tasks.
    **options
        Of `Options`: ``population``, ``plane``, ``steps``, ``within``, ``min_unchanged``.

    Returns
    -------
    FuncAnimation of matplotlib
        A notebook shows it with a player. `save_film` writes it to a file.

    Raises
    ------
    VariableNotRecorded
        If the run lacks ``W``.
    InvalidArgument
        For several runs, fewer than 2 rows, a wrong number of frames, or an unknown option.
    MissingExtra
        Without matplotlib.
    """
    check_matplotlib()
    check_dataset(ds)
    if "run" in ds.dims:
        raise InvalidArgument(
            f"film shows one run, got {ds.sizes['run']}; choose one: ds.isel(run=0)"
        )
    number, evenly = _frames(frames)
    chosen = asked_for(options)
    FILM.check(chosen)
    input_checks.require_variables(ds, "W")
    (data,) = compute_together(FILM.data([prepared(ds, [FILM], chosen)], chosen), report)
    position = data["position"].transpose("step", "token", "component").values
    data = data.isel(step=_chosen_rows(position, number, evenly))
    about = " · ".join(filter(None, (titled_runs([ds]), data.attrs.get(ALONE))))
    return _animated(data, style, size, title or about)


def _frames(given: int | str) -> tuple[int, bool]:
    """Number of frames, and whether they are at equal numbers of steps."""
    number = str(given).removeprefix("even:")
    if not number.isdecimal() or not 2 <= int(number) <= _MOST_FRAMES:
        raise InvalidArgument(
            f"got frames={given!r}, expected a number from 2 to {_MOST_FRAMES:,}, or even:NUMBER "
            "for equal numbers of steps"
        )
    return int(number), number != str(given)


def _collect(scan: Scan, options: Options) -> xr.Dataset:
    """Positions, groups and freeze of the tokens, and the loss of every step."""
    data = trajectory.computation.collect(scan, options).assign(
        frozen_since=freeze(scan, min_unchanged=options.min_unchanged)["frozen_since"]
    )
    if "loss" in scan.ds:
        data["loss"] = scan.ds["loss"].sel(step=scan.window).rename(step="loss_step")
    return data


FILM = replace(
    trajectory,
    name="film",
    computation=Computation(collect=_collect, measures=("moved",), reading="plane"),
)
"""Options, checks and data of the film."""


def _chosen_rows(
    position: npt.NDArray[np.floating[Any]], frames: int, evenly: bool
) -> npt.NDArray[np.int64]:
    """Rows of the frames, each once; the first and the last are among them."""
    rows = len(position)
    if rows <= frames:
        return np.arange(rows)
    traveled = np.arange(rows, dtype=np.float64)
    if not evenly:
        # Row by row: the differences of all rows at once would copy the positions.
        hops = (np.linalg.norm(now - then, axis=-1) for then, now in pairwise(position))
        traveled[1:] = np.cumsum([np.nan_to_num(hop).mean() for hop in hops])
    marks = np.linspace(0, traveled[-1], frames)
    return np.unique(np.append(np.searchsorted(traveled, marks[:-1]), rows - 1))


def _animated(data: xr.Dataset, look: str, size: tuple[float, float], title: str) -> FuncAnimation:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    with in_style(look):
        # Not a figure of pyplot, which a notebook would show as well.
        canvas = Figure(figsize=size, dpi=_DPI, layout="constrained")
        update = _drawn(canvas, data, style(look), title)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # the layout of every frame would take most of the time
    animation = FuncAnimation(canvas, update, frames=data.sizes["step"], interval=1000 / _RATE)
    animation._repr_html_ = animation.to_jshtml  # type: ignore[method-assign]
    return animation


def _drawn(canvas: Any, data: xr.Dataset, look: Style, title: str) -> Callable[[int], list[Any]]:
    """Draw what does not move; return the function that draws a frame."""
    from matplotlib.collections import LineCollection

    has_loss = "loss" in data
    plane, *below = canvas.subplots(
        1 + has_loss, height_ratios=[5, 1][: 1 + has_loss], squeeze=False
    )[:, 0]
    position = data["position"].transpose("step", "token", "component").values
    steps, since, member = (data[name].values for name in ("step", "frozen_since", "member"))
    few = position.shape[1] <= LINES
    populations = data["population"].values.tolist()
    set_title(plane, title)
    label_plane(plane, data)
    fit_axes(plane, position.transpose(2, 0, 1))
    corner = plane.text(
        0.99, 0.98, "", transform=plane.transAxes, ha="right", va="top", family="monospace"
    )
    dots: dict[str, Any] = {"marker": "o", "ls": "", "ms": 5 if few else 1.5, "mew": 0}
    moving, frozen, tails = [], [], []
    for number, population in enumerate(populations):
        color = population_color(population)
        # Dead tokens, the first population, are in front: most of them share one place. Frozen ones
        # are behind all moving ones, and larger, as a ring about those.
        front = 2 + len(populations) - number
        label = f"{worded(named(population), data)} ({member[number].sum():,})"
        moving += plane.plot([], [], **dots, color=color, zorder=front + 10, label=label)
        wide = {"mec": color, "mew": 0.8 if few else 0, "ms": 1.5 * dots["ms"]}
        frozen += plane.plot([], [], **{**dots, **wide}, mfc=_FROZEN, zorder=front)
        tails.append(LineCollection([], colors=color, linewidths=0.8, alpha=0.5, zorder=1))
        plane.add_collection(tails[-1], autolim=False)
    stopped = plane.plot([], [], **dots, color=_FROZEN, label=_counted(populations, member))
    legend = canvas.legend(
        handles=[*moving, *stopped],
        loc="outside lower center",
        ncols=4,
        markerscale=5 / dots["ms"],
    )
    (count,) = legend.get_texts()[-1:]
    cursors = []
    for ax in below:
        ax.plot(data["loss_step"].values, data["loss"].values, color=look.second, lw=1)
        ax.set_xlabel("optimizer step")
        ax.set_ylabel("loss / nat")
        cursors.append(ax.axvline(steps[0], color=look.ink, lw=1))

    def update(frame: int) -> list[Any]:
        step, place = steps[frame], position[frame]
        still = (since >= 0) & (since <= step)
        for own, movers, others, lines in zip(member, moving, frozen, tails, strict=True):
            movers.set_data(*place[own & ~still].T)
            others.set_data(*place[own & still].T)
            if few:
                path = position[max(0, frame - _TAIL) : frame + 1, own & ~still]
                lines.set_segments([*path.transpose(1, 0, 2)])
        corner.set_text(f"step {step:,}")
        count.set_text(_counted(populations, member & still))
        for cursor in cursors:
            cursor.set_xdata([step, step])
        return [*moving, *frozen, *tails, corner, count, *cursors]

    return update


def _counted(populations: list[str], still: npt.NDArray[np.bool_]) -> str:
    """Label of the frozen tokens, with the number of each population."""
    counts = zip(still.sum(1), populations, strict=True)
    names = (f"{count:,} {name}" if len(still) > 1 else f"{count:,}" for count, name in counts)
    return f"frozen ({', '.join(names)})"


def save_film(
    animation: FuncAnimation,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    report: Report | None = None,
) -> Path:
    """Write a film as .gif, .webp or .mp4, its frames to a folder, or its last frame to a picture.

    Parameters
    ----------
    animation : FuncAnimation
        Made by `film`.
    path : path-like
        A name with .png, .svg or .pdf gets the last frame. A name without extension is that of a
        folder, with ``0000.png``, ``0001.png``, …
    overwrite : bool
        Replace an existing file. A folder is never replaced.
    report : callable, optional
        Called with the numbers of written and of all frames.

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

    suffix = path.suffix.lower()
    if suffix not in FILM_ENDINGS:
        raise InvalidArgument(
            f"got {path}, expected a file name with one of the extensions "
            f"{', '.join(filter(None, FILM_ENDINGS))}, or a folder without extension"
        )
    if suffix == ".mp4" and not FFMpegWriter.isAvailable():
        raise InvalidArgument(
            f"{path} needs the program ffmpeg, which is not installed; install it (apt install "
            "ffmpeg, brew install ffmpeg), or write .gif or .webp"
        )
    check_file_target(path, overwrite=overwrite)


def _palette(canvas: Any) -> Any:
    """Image whose palette has the shades from the ground to the color of each line.

    With one palette, a film is a third as large and written several times as fast.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D
    from PIL import Image

    lines = [line for line in canvas.findobj(Line2D) if line.get_visible()]
    inks = {to_rgb(line.get_color()) for line in lines}
    inks |= {to_rgb(line.get_markerfacecolor()) for line in lines}
    ground = np.array(to_rgb(canvas.get_facecolor()))
    # With more shades, Pillow would take the palest one for the ground.
    shares = np.linspace(0, 1, min(_SHADES, 256 // len(inks)))[:, None]
    shades = np.concatenate([ground + shares * (ink - ground) for ink in sorted(inks)])
    image = Image.new("P", (1, 1))
    image.putpalette(np.round(255 * shades).astype(np.uint8).tobytes())
    return image


def _writer(suffix: str) -> Any:
    from matplotlib.animation import AbstractMovieWriter, FFMpegWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    class Images(AbstractMovieWriter):
        """Keeps a byte per pixel of each frame, and holds the last frame."""

        def setup(self, fig: Any, outfile: Any, dpi: float | None = None) -> None:
            super().setup(fig, outfile, dpi)
            own = fig.canvas
            self.canvas: Any = FigureCanvasAgg(fig)
            self.palette, self.frames = _palette(fig), list[Any]()
            fig.set_canvas(own)

        def grab_frame(self, **options: Any) -> None:
            self.canvas.draw()  # savefig draws twice
            picture = Image.fromarray(np.asarray(self.canvas.buffer_rgba())).convert("RGB")
            self.frames.append(picture.quantize(palette=self.palette, dither=Image.Dither.NONE))

        def finish(self) -> None:
            first, *others = [*self.frames, *self.frames[-1:] * _HOLD]
            duration = round(1000 / self.fps)
            first.save(self.outfile, save_all=True, append_images=others, duration=duration, loop=0)

    class Pictures(AbstractMovieWriter):
        """Writes each frame to a file of a new folder, or the last one to a file."""

        def setup(self, fig: Any, outfile: Any, dpi: float | None = None) -> None:
            super().setup(fig, outfile, dpi)
            self.number = 0
            if not suffix:
                Path(outfile).mkdir()

        def grab_frame(self, **options: Any) -> None:
            if not suffix:
                self.fig.savefig(Path(self.outfile, f"{self.number:04}.png"), dpi=self.dpi)
            self.number += 1

        def finish(self) -> None:
            if suffix:
                self.fig.savefig(self.outfile, dpi=self.dpi)

    if suffix in (".gif", ".webp"):
        return Images(fps=_RATE)
    return (FFMpegWriter if suffix == ".mp4" else Pictures)(fps=_RATE)
