"""Tokens × steps as layers, in the order in which the tokens came to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from analysis.consecutive_rows import REGIMES
from analysis.figures.axes_marks import note
from analysis.figures.figure import Figure, Look, Options
from analysis.figures.style import REGIME_COLOURS
from analysis.rest_layers import build_stratigraphy
from analysis.streaming_scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        patches = [Patch(color=REGIME_COLOURS[name], label=name) for name in REGIMES]
        ax.legend(handles=patches[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
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
        pooled = "the mean hop"
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("tokens, sorted by their last motion")
    tokens, rows = int(sizes.max()), int(data["steps"].max())
    if tokens > 1 or rows > 1:
        told = f"{pooled} of up to {tokens:,} tokens × {rows:,} steps to a cell"
    else:
        told = "one token and one step to a cell"
    note(ax, told)


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
