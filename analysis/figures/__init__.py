"""Figures of a run, drawn with matplotlib (the extra "plot").

Each kind is a `Figure`: a function that takes a Dataset and an Axes, and returns the Axes. What it
draws is what the functions of `analysis` compute, and nothing else; ``figure`` keeps what it
collects, lazily, apart from how that is drawn, ``across_runs`` has the curves of several
runs, their mean and spread. ``registry`` has all of them by name, ``sheet`` several in one pass,
``style`` the colors, which are the same everywhere, ``titles`` the names of runs, and
``axes_marks`` what is drawn in many places. The figures: ``training`` (loss, logits, moments,
parameters), ``motion`` (gradients, displacement,
speed, bulk-thermal, autocorrelation, seams), ``densities`` (hops, speed-density), ``freezing``
(freeze, last-motion, lifecycle, stratigraphy), ``regimes`` (regimes, causes), ``cloud`` (centroid,
trajectory, spectrum, clusters), and ``divergence``, which is between runs. A new one goes into one
of these, and into the registry.

>>> from trajstore.analysis.figures import FIGURES
>>> FIGURES["gradients"](ds).get_ylabel()
'L2 norm of the gradient / nat per unit of W'
"""

from trajstore.analysis.figures.figure import Figure, Look, Options
from trajstore.analysis.figures.registry import FIGURES, figures_named
from trajstore.analysis.figures.sheet import Collected, collect, draw_sheet, save
from trajstore.analysis.figures.style import STYLES

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
    "save",
]
