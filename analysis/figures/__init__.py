"""Figures of a run, drawn with matplotlib (the extra "plot").

Each `Figure` takes a Dataset and an Axes, and returns the Axes. The functions of `analysis` compute
all that it draws. ``figure`` separates lazy data from drawing. ``across_runs`` groups several runs.
``registry`` holds all figures by name. ``sheet`` draws several figures in one pass. ``style`` holds
the colors, ``titles`` the names, and ``axes_marks`` the parts that figures share.

Modules group the figures by subject: ``training``, ``variables``, ``motion``, ``densities``,
``freezing``, ``regimes``, ``cloud``, ``trajectory``, ``layers``, ``divergence``. A new
figure goes into one of them and into the registry. It has the name of the quantity that it draws.
``film`` animates a run; the film is no `Figure`, since it draws several pictures.

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
from trajstore.analysis.figures.style import STYLES, Look
from trajstore.installation import register_accessors

__all__ = [
    "FIGURES",
    "STYLES",
    "Collected",
    "Figure",
    "Look",
    "Options",
    "collect",
    "draw_sheet",
    "figures_named",
    "figures_of",
    "save",
    "save_film",
]

register_accessors()
