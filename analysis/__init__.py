"""Questions about a recorded run, answered lazily.

Each function takes a Dataset with the variables of a run and returns a lazy DataArray or Dataset;
results do not depend on how the data is chunked. `compute` answers several in one pass.

In the examples ``ds`` is a small run of 20 steps over the 128 ASCII tokens, in bfloat16, of which
ten occur in the text; their W started at 1.5, that of the dead tokens at 0.75.
"""

from analysis.alignments import alignment
from analysis.cloud_shape import inertia, pca
from analysis.collective_motion import bulk_thermal, centroid, coherence, distinct
from analysis.consecutive_rows import REGIMES
from analysis.divergence import divergence
from analysis.freeze_causes import CAUSES, adam_update, freeze_cause
from analysis.freeze_counterfactuals import COUNTERFACTUALS, OUTCOMES, freeze_blame
from analysis.freezing import freeze
from analysis.gradient_explanation import explain_gradient
from analysis.identical_vectors import clusters
from analysis.logit_statistics import logit_stats
from analysis.lost_updates import moment_stuck
from analysis.many_runs import each_run, over_runs
from analysis.moment_ratios import moment_error
from analysis.moments import exact_moments
from analysis.motion import acceleration, speed, velocity
from analysis.motion_memory import autocorrelation
from analysis.named_populations import with_populations
from analysis.near_cells import adjacency
from analysis.nearest_vectors import nearest_distance
from analysis.norms import displacement, grad_norms
from analysis.paths import path_efficiency, radial_tangential
from analysis.projections import projection
from analysis.registry import QUANTITIES, answer, compute, crossings
from analysis.rest_layers import stratigraphy
from analysis.resume_seams import seams
from analysis.run_comparison import compare
from analysis.summary_tables import summary
from analysis.token_populations import by_population
from analysis.ulp_motion import lattice_displacement, lifecycle, regimes, ulp
from analysis.underflow_line import moment_plane

__all__ = [
    "CAUSES",
    "COUNTERFACTUALS",
    "OUTCOMES",
    "QUANTITIES",
    "REGIMES",
    "acceleration",
    "adam_update",
    "adjacency",
    "alignment",
    "answer",
    "autocorrelation",
    "bulk_thermal",
    "by_population",
    "centroid",
    "clusters",
    "coherence",
    "compare",
    "compute",
    "crossings",
    "displacement",
    "distinct",
    "divergence",
    "each_run",
    "exact_moments",
    "explain_gradient",
    "freeze",
    "freeze_blame",
    "freeze_cause",
    "grad_norms",
    "inertia",
    "lattice_displacement",
    "lifecycle",
    "logit_stats",
    "moment_error",
    "moment_plane",
    "moment_stuck",
    "nearest_distance",
    "over_runs",
    "path_efficiency",
    "pca",
    "projection",
    "radial_tangential",
    "regimes",
    "seams",
    "speed",
    "stratigraphy",
    "summary",
    "ulp",
    "velocity",
    "with_populations",
]
