"""All public functions of the analysis."""

from __future__ import annotations

from trajstore.analysis.cloud.alignments import alignment
from trajstore.analysis.cloud.identical_vectors import clusters
from trajstore.analysis.cloud.near_cells import adjacency
from trajstore.analysis.cloud.nearest_vectors import nearest_distance
from trajstore.analysis.cloud.projections import projection
from trajstore.analysis.cloud.shape import inertia, pca
from trajstore.analysis.cloud.sky_directions import sky
from trajstore.analysis.model.attention_circuits import Attention
from trajstore.analysis.model.gradient_explanation import explain_gradient
from trajstore.analysis.model.layers import layers
from trajstore.analysis.model.logit_statistics import logit_stats
from trajstore.analysis.model.mean_state_logits import mean_logits
from trajstore.analysis.motion.autocorrelation import autocorrelation
from trajstore.analysis.motion.collective import bulk_thermal, centroid, coherence, distinct
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.level_crossings import crossings
from trajstore.analysis.motion.moving_elements import last_moving_element
from trajstore.analysis.motion.norms import displacement, grad_norms
from trajstore.analysis.motion.paths import path_efficiency, radial_tangential
from trajstore.analysis.motion.resume_discontinuities import discontinuities
from trajstore.analysis.motion.separation import separation
from trajstore.analysis.motion.ulp_motion import (
    exponent_crossings,
    lattice_displacement,
    lifecycle,
    regimes,
    ulp,
)
from trajstore.analysis.motion.update_heatmap import heatmap
from trajstore.analysis.motion.vectors import VECTORS, vectors
from trajstore.analysis.motion.velocity import acceleration, speed, velocity
from trajstore.analysis.optimizer.freeze_causes import CAUSES, adam_update, freeze_cause
from trajstore.analysis.optimizer.freeze_counterfactuals import (
    COUNTERFACTUALS,
    OUTCOMES,
    freeze_attribution,
)
from trajstore.analysis.optimizer.lost_update_line import moment_plane
from trajstore.analysis.optimizer.lost_updates import moment_stuck
from trajstore.analysis.optimizer.moment_ratios import moment_error
from trajstore.analysis.optimizer.moment_sizes import moment_sizes
from trajstore.analysis.optimizer.moments import exact_moments
from trajstore.analysis.registry import QUANTITIES, compute
from trajstore.analysis.results.run_summary import summary
from trajstore.analysis.scan.population_statistics import by_population
from trajstore.analysis.scan.rows import REGIMES
from trajstore.analysis.several.divergence import divergence
from trajstore.analysis.several.many_runs import each_run, over_runs
from trajstore.analysis.several.run_comparison import compare
from trajstore.codec.block_codec import register_accessors
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
