"""Tokens × steps as layers, in the order in which the tokens came to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.axes_marks import named, note, with_legend
from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.style import REGIME_COLOURS, REGIME_MEANINGS, population_colour
from trajstore.analysis.motion.rest_layers import build_stratigraphy
from trajstore.analysis.scan.consecutive_rows import REGIMES
from trajstore.analysis.scan.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

__all__ = ["stratigraphy"]


def _collect(history: Scan, options: Options) -> xr.Dataset:
    of = "hop" if options.colour == "hop" else "regime"
    return build_stratigraphy(history, of, options.lattice)  # type: ignore[arg-type]


def _draw(ax: Axes, data: xr.Dataset, look: Look) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
    from matplotlib.patches import Patch

    stratum = data["stratum"].transpose("layer", "step")
    steps = stratum["step"].values.astype(np.float64)
    sizes = data["tokens"].values
    spacing = steps[-1] - steps[-2] if steps.size > 1 else 1.0
    edges = np.append(steps, steps[-1] + spacing)
    depths = np.append(0, sizes.cumsum())
    if stratum.dtype == np.int8:
        colours = ListedColormap(list(REGIME_COLOURS.values()))
        norm = BoundaryNorm(np.arange(len(REGIMES) + 1) - 0.5, len(REGIMES))
        ax.pcolormesh(edges, depths, stratum.values, cmap=colours, norm=norm, rasterized=True)
        patches = [
            Patch(color=REGIME_COLOURS[name], label=f"{name}: {REGIME_MEANINGS[name]}")
            for name in REGIMES
        ]
        pooled = "the most common regime"
    else:
        values = np.ma.masked_where(~(stratum.values > 0), stratum.values)
        if values.count():
            scale = LogNorm(values.min(), max(values.max(), values.min() * 2))
            mesh = ax.pcolormesh(
                edges, depths, values, norm=scale, cmap=look.style.density, rasterized=True
            )
            ax.figure.colorbar(mesh, ax=ax).set_label(
                f"mean hop (L1) / {data['stratum'].attrs['units']}"
            )
        patches = []
        pooled = "blank: did not move; the mean hop"
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("tokens, sorted by their last motion")
    tokens, rows = int(sizes.max()), int(data["steps"].max())
    cell = f"{pooled} of {_up_to(tokens, 'token')} × {_up_to(rows, 'step')} to a cell"
    mixed = tokens > 1 and "dead_share" in data
    note(ax, cell + ("; strip: mixed colours where both kinds are pooled" if mixed else ""))
    if "dead_share" in data:
        patches += _draw_populations(ax, data["dead_share"].values, depths)
    with_legend(ax, handles=patches)


def _up_to(number: int, noun: str) -> str:
    return f"up to {number:,} {noun}s" if number > 1 else f"1 {noun}"


def _draw_populations(ax: Axes, dead: npt.NDArray[Any], depths: npt.NDArray[Any]) -> list[Patch]:
    """Strip beside the layers that says which tokens are dead: of many, what share."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch

    colours = {name: population_colour(name) for name in ("live", "dead")}
    strip = ax.inset_axes((1.005, 0, 0.02, 1), sharey=ax)
    strip.set_axis_off()
    shares = LinearSegmentedColormap.from_list("shares", list(colours.values()))
    strip.pcolormesh([0, 1], depths, dead[:, None], cmap=shares, vmin=0, vmax=1, rasterized=True)
    return [Patch(color=colour, label=f"strip: {named(name)}") for name, colour in colours.items()]


stratigraphy = Figure(
    name="stratigraphy",
    title="Tokens in the order in which they came to rest",
    collect=_collect,
    draw=_draw,
    measures=("regime", "moved"),
    on_lattice=True,
    scales=False,
    of_populations=False,
)
