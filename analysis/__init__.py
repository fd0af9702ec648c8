"""Questions about a recorded run, answered lazily.

Each function takes a Dataset with the variables of a run and returns a lazy DataArray or Dataset;
results do not depend on how the data is chunked. `compute` answers several in one pass.
"""

from analysis.causes import CAUSES, adam_update, freeze_cause
from analysis.comparison import compare
from analysis.ensemble import bulk_thermal, centroid, coherence, distinct
from analysis.freezing import freeze
from analysis.motion import acceleration, speed, velocity
from analysis.norms import displacement, grad_norms
from analysis.pairs import REGIMES
from analysis.population import by_population
from analysis.predictions import logit_stats
from analysis.quantities import QUANTITIES, answer, compute
from analysis.regimes import lattice_displacement, lifecycle, regimes, ulp
from analysis.seams import seams
from analysis.summary import summary

__all__ = [
    "CAUSES",
    "QUANTITIES",
    "REGIMES",
    "acceleration",
    "adam_update",
    "answer",
    "bulk_thermal",
    "by_population",
    "centroid",
    "coherence",
    "compare",
    "compute",
    "displacement",
    "distinct",
    "freeze",
    "freeze_cause",
    "grad_norms",
    "lattice_displacement",
    "lifecycle",
    "logit_stats",
    "regimes",
    "seams",
    "speed",
    "summary",
    "ulp",
    "velocity",
]
