"""All public functions of the analysis."""

from __future__ import annotations

from trajstore.analysis.cloud.directions import alignment, projection, sky
from trajstore.analysis.cloud.identical_vectors import clusters
from trajstore.analysis.cloud.near_vectors import adjacency, nearest_distance
from trajstore.analysis.cloud.shape import inertia, pca
from trajstore.analysis.model.layers import Attention, layers
from trajstore.analysis.model.predictions import explain_gradient, logit_stats, mean_logits
from trajstore.analysis.motion.collective import (
    bulk_thermal,
    centroid,
    coherence,
    distinct,
    separation,
)
from trajstore.analysis.motion.crossings import crossings, discontinuities
from trajstore.analysis.motion.freezing import freeze, last_moving_element
from trajstore.analysis.motion.paths import autocorrelation, path_efficiency, radial_tangential
from trajstore.analysis.motion.ulp_motion import (
    exponent_crossings,
    heatmap,
    lattice_displacement,
    lifecycle,
    regimes,
    ulp,
)
from trajstore.analysis.motion.vectors import (
    VECTORS,
    acceleration,
    displacement,
    grad_norms,
    speed,
    vectors,
    velocity,
)
from trajstore.analysis.optimizer.freeze_causes import CAUSES, adam_update, freeze_cause
from trajstore.analysis.optimizer.freeze_counterfactuals import (
    COUNTERFACTUALS,
    OUTCOMES,
    freeze_attribution,
)
from trajstore.analysis.optimizer.lost_updates import moment_plane, moment_stuck
from trajstore.analysis.optimizer.moment_sizes import moment_error, moment_sizes
from trajstore.analysis.optimizer.moments import exact_moments
from trajstore.analysis.registry import QUANTITIES, compute
from trajstore.analysis.results.summary import summary
from trajstore.analysis.scan.population_statistics import by_population
from trajstore.analysis.scan.rows import REGIMES
from trajstore.analysis.several_runs import compare, divergence, each_run, over_runs
from trajstore.installation import register_accessors
from trajstore.populations import with_populations

register_accessors()

__all__ = [
    "CAUSES",
    "COUNTERFACTUALS",
    "OUTCOMES",
    "QUANTITIES",
    "REGIMES",
    "VECTORS",
    "Attention",
    "acceleration",
    "adam_update",
    "adjacency",
    "alignment",
    "autocorrelation",
    "bulk_thermal",
    "by_population",
    "centroid",
    "clusters",
    "coherence",
    "compare",
    "compute",
    "crossings",
    "discontinuities",
    "displacement",
    "distinct",
    "divergence",
    "each_run",
    "exact_moments",
    "explain_gradient",
    "exponent_crossings",
    "freeze",
    "freeze_attribution",
    "freeze_cause",
    "grad_norms",
    "heatmap",
    "inertia",
    "last_moving_element",
    "lattice_displacement",
    "layers",
    "lifecycle",
    "logit_stats",
    "mean_logits",
    "moment_error",
    "moment_plane",
    "moment_sizes",
    "moment_stuck",
    "nearest_distance",
    "over_runs",
    "path_efficiency",
    "pca",
    "projection",
    "radial_tangential",
    "regimes",
    "separation",
    "sky",
    "speed",
    "summary",
    "ulp",
    "vectors",
    "velocity",
    "with_populations",
]
