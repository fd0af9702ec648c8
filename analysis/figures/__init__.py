"""Figures of a run, drawn with matplotlib (the extra "plot").

A `Figure` has the name of the quantity that it draws. It takes a Dataset and an Axes, and returns
the Axes. The functions of `analysis` compute all that it draws.

>>> from trajstore.analysis.figures import FIGURES
>>> FIGURES["grad_norms"](ds).get_ylabel()
'L2 norm of the gradient / nat per unit of W'
"""

from trajstore.analysis.figures.figure import Figure, Options
from trajstore.analysis.figures.film import save_film
from trajstore.analysis.figures.sheet import (
    FIGURES,
    Collected,
    collect,
    draw_sheet,
    figures_named,
    figures_of,
    save,
)
from trajstore.analysis.figures.style import STYLES, RunStyle
from trajstore.installation import register_accessors

__all__ = [
    "FIGURES",
    "STYLES",
    "Collected",
    "Figure",
    "Options",
    "RunStyle",
    "collect",
    "draw_sheet",
    "figures_named",
    "figures_of",
    "save",
    "save_film",
]

register_accessors()
