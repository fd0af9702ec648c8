"""What is drawn: the axes of a figure, and what its legend says."""

from __future__ import annotations

from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trajstore.analysis.figures import FIGURES


def drawn(name: str, ds: xr.Dataset, **options: Any) -> Axes:
    """Axes that a figure was drawn into."""
    ax = Figure().add_subplot(projection=FIGURES[name].projection)
    assert FIGURES[name](ds, ax, **options) is ax
    return ax


def notes(ax: Axes) -> str:
    return ax.get_legend().get_title().get_text().replace("\n", " ")


def labels_of(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]
