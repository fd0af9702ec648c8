# Made by `make names` from the decorators of functions and figures; do not edit.

from trajstore.analysis.figures.figure import Drawing
from trajstore.analysis.several_runs import as_method
from trajstore.analysis.accessor import QUANTITIES as QUANTITIES
from trajstore.analysis.accessor import compute as compute
from trajstore.analysis.cloud.directions import alignment as alignment
from trajstore.analysis.cloud.directions import projection as projection
from trajstore.analysis.cloud.directions import sky as sky
from trajstore.analysis.cloud.identical_vectors import clusters as clusters
from trajstore.analysis.cloud.near_vectors import adjacency as adjacency
from trajstore.analysis.cloud.near_vectors import nearest_distance as nearest_distance
from trajstore.analysis.cloud.near_vectors import nearest_tokens as nearest_tokens
from trajstore.analysis.cloud.shape import inertia as inertia
from trajstore.analysis.cloud.shape import pca as pca
from trajstore.analysis.layer_metrics import Attention as Attention
from trajstore.analysis.layer_metrics import layers as layers
from trajstore.analysis.motion.collective import bulk_thermal as bulk_thermal
from trajstore.analysis.motion.collective import centroid as centroid
from trajstore.analysis.motion.collective import coherence as coherence
from trajstore.analysis.motion.collective import distinct as distinct
from trajstore.analysis.motion.collective import separation as separation
from trajstore.analysis.motion.crossings import crossings as crossings
from trajstore.analysis.motion.crossings import discontinuities as discontinuities
from trajstore.analysis.motion.freezing import freeze as freeze
from trajstore.analysis.motion.freezing import last_moving_element as last_moving_element
from trajstore.analysis.motion.paths import autocorrelation as autocorrelation
from trajstore.analysis.motion.paths import path_efficiency as path_efficiency
from trajstore.analysis.motion.paths import radial_tangential as radial_tangential
from trajstore.analysis.motion.ulp_motion import exponent_crossings as exponent_crossings
from trajstore.analysis.motion.ulp_motion import heatmap as heatmap
from trajstore.analysis.motion.ulp_motion import lattice_displacement as lattice_displacement
from trajstore.analysis.motion.ulp_motion import lifecycle as lifecycle
from trajstore.analysis.motion.ulp_motion import regimes as regimes
from trajstore.analysis.motion.ulp_motion import ulp as ulp
from trajstore.analysis.motion.vectors import VECTORS as VECTORS
from trajstore.analysis.motion.vectors import acceleration as acceleration
from trajstore.analysis.motion.vectors import displacement as displacement
from trajstore.analysis.motion.vectors import grad_norms as grad_norms
from trajstore.analysis.motion.vectors import speed as speed
from trajstore.analysis.motion.vectors import vectors as vectors
from trajstore.analysis.motion.vectors import velocity as velocity
from trajstore.analysis.optimizer.freeze_causes import CAUSES as CAUSES
from trajstore.analysis.optimizer.freeze_causes import adam_update as adam_update
from trajstore.analysis.optimizer.freeze_causes import freeze_cause as freeze_cause
from trajstore.analysis.optimizer.freeze_counterfactuals import COUNTERFACTUALS as COUNTERFACTUALS
from trajstore.analysis.optimizer.freeze_counterfactuals import OUTCOMES as OUTCOMES
from trajstore.analysis.optimizer.freeze_counterfactuals import freeze_attribution as freeze_attribution
from trajstore.analysis.optimizer.lost_updates import moment_plane as moment_plane
from trajstore.analysis.optimizer.lost_updates import moment_stuck as moment_stuck
from trajstore.analysis.optimizer.moment_sizes import moment_error as moment_error
from trajstore.analysis.optimizer.moment_sizes import moment_sizes as moment_sizes
from trajstore.analysis.optimizer.moments import exact_moments as exact_moments
from trajstore.analysis.predictions import explain_gradient as explain_gradient
from trajstore.analysis.predictions import logit_stats as logit_stats
from trajstore.analysis.predictions import mean_logits as mean_logits
from trajstore.analysis.results.summary import summary as summary
from trajstore.analysis.scan.result_variables import by_population as by_population
from trajstore.analysis.scan.rows import REGIMES as REGIMES
from trajstore.analysis.several_runs import compare as compare
from trajstore.analysis.several_runs import divergence as divergence
from trajstore.analysis.several_runs import each_run as each_run
from trajstore.analysis.several_runs import over_runs as over_runs
from trajstore.populations import with_populations as with_populations

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
    "nearest_tokens",
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

class Methods:
    acceleration = as_method(acceleration)
    adam_update = as_method(adam_update)
    adjacency = as_method(adjacency)
    alignment = as_method(alignment)
    autocorrelation = as_method(autocorrelation)
    bulk_thermal = as_method(bulk_thermal)
    centroid = as_method(centroid)
    clusters = as_method(clusters)
    coherence = as_method(coherence)
    compare = as_method(compare)
    compute = as_method(compute)
    crossings = as_method(crossings)
    discontinuities = as_method(discontinuities)
    displacement = as_method(displacement)
    distinct = as_method(distinct)
    divergence = as_method(divergence, each=False)
    each_run = as_method(each_run, each=False)
    exact_moments = as_method(exact_moments)
    explain_gradient = as_method(explain_gradient)
    exponent_crossings = as_method(exponent_crossings)
    freeze = as_method(freeze)
    freeze_attribution = as_method(freeze_attribution)
    freeze_cause = as_method(freeze_cause)
    grad_norms = as_method(grad_norms)
    heatmap = as_method(heatmap)
    inertia = as_method(inertia)
    last_moving_element = as_method(last_moving_element)
    lattice_displacement = as_method(lattice_displacement)
    layers = as_method(layers)
    lifecycle = as_method(lifecycle)
    logit_stats = as_method(logit_stats)
    mean_logits = as_method(mean_logits)
    moment_error = as_method(moment_error)
    moment_plane = as_method(moment_plane)
    moment_sizes = as_method(moment_sizes)
    moment_stuck = as_method(moment_stuck)
    nearest_distance = as_method(nearest_distance)
    nearest_tokens = as_method(nearest_tokens)
    over_runs = as_method(over_runs, each=False)
    path_efficiency = as_method(path_efficiency)
    pca = as_method(pca)
    projection = as_method(projection)
    radial_tangential = as_method(radial_tangential)
    regimes = as_method(regimes)
    separation = as_method(separation)
    sky = as_method(sky)
    speed = as_method(speed)
    summary = as_method(summary)
    ulp = as_method(ulp)
    vectors = as_method(vectors)
    velocity = as_method(velocity)
    with_populations = as_method(with_populations, each=False)

class Drawings:
    autocorrelation: Drawing
    bulk_thermal: Drawing
    centroid: Drawing
    clusters: Drawing
    discontinuities: Drawing
    displacement: Drawing
    divergence: Drawing
    freeze: Drawing
    freeze_cause: Drawing
    grad_norms: Drawing
    heatmap: Drawing
    last_motion: Drawing
    lattice_displacement: Drawing
    layers: Drawing
    lifecycle: Drawing
    logit_stats: Drawing
    loss: Drawing
    moment_sizes: Drawing
    moment_tracks: Drawing
    moments: Drawing
    param_update_lost: Drawing
    regimes: Drawing
    sky: Drawing
    spectrum: Drawing
    speed: Drawing
    speed_density: Drawing
    trajectory: Drawing
