"""The functions of the analysis, each a method of ``ds.traj`` too.

`trajstore.analysis` has the names in ``__all__``, imported at their first use.
"""

from __future__ import annotations

from trajstore.analysis.geometry.directions import alignment, projection, sky
from trajstore.analysis.geometry.identical_vectors import clusters
from trajstore.analysis.geometry.near_vectors import adjacency, nearest_distance, nearest_tokens
from trajstore.analysis.geometry.shape import inertia, pca
from trajstore.analysis.layer_metrics import Attention, layers
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
from trajstore.analysis.predictions import explain_gradient, logit_stats, mean_logits
from trajstore.analysis.results.summary import summary
from trajstore.analysis.scan.result_variables import by_population
from trajstore.analysis.scan.rows import REGIMES
from trajstore.analysis.several_runs import as_method, compare, divergence, each_run, over_runs
from trajstore.populations import with_populations

__all__ = [
    "CAUSES", "COUNTERFACTUALS", "OUTCOMES", "REGIMES", "VECTORS", "Attention", "acceleration",
    "adam_update", "adjacency", "alignment", "autocorrelation", "bulk_thermal",
    "by_population", "centroid", "clusters", "coherence", "compare", "crossings",
    "discontinuities", "displacement", "distinct", "divergence", "each_run", "exact_moments",
    "explain_gradient", "exponent_crossings", "freeze", "freeze_attribution", "freeze_cause",
    "grad_norms", "heatmap", "inertia", "last_moving_element", "lattice_displacement",
    "layers", "lifecycle", "logit_stats", "mean_logits", "moment_error", "moment_plane",
    "moment_sizes", "moment_stuck", "nearest_distance", "nearest_tokens", "over_runs",
    "path_efficiency", "pca", "projection", "radial_tangential", "regimes", "separation",
    "sky", "speed", "summary", "ulp", "vectors", "velocity", "with_populations",
]  # fmt: skip


class Methods:
    """Functions of a Dataset as methods. Quantities are in the order of lists of names."""

    centroid = as_method(centroid)
    bulk_thermal = as_method(bulk_thermal)
    coherence = as_method(coherence)
    distinct = as_method(distinct)
    alignment = as_method(alignment)
    clusters = as_method(clusters)
    adjacency = as_method(adjacency)
    nearest_distance = as_method(nearest_distance)
    nearest_tokens = as_method(nearest_tokens)
    projection = as_method(projection)
    pca = as_method(pca)
    inertia = as_method(inertia)
    sky = as_method(sky)
    logit_stats = as_method(logit_stats)
    mean_logits = as_method(mean_logits)
    autocorrelation = as_method(autocorrelation)
    freeze = as_method(freeze)
    crossings = as_method(crossings)
    last_moving_element = as_method(last_moving_element)
    grad_norms = as_method(grad_norms)
    displacement = as_method(displacement)
    path_efficiency = as_method(path_efficiency)
    radial_tangential = as_method(radial_tangential)
    velocity = as_method(velocity)
    speed = as_method(speed)
    acceleration = as_method(acceleration)
    discontinuities = as_method(discontinuities)
    separation = as_method(separation)
    ulp = as_method(ulp)
    lattice_displacement = as_method(lattice_displacement)
    regimes = as_method(regimes)
    exponent_crossings = as_method(exponent_crossings)
    lifecycle = as_method(lifecycle)
    exact_moments = as_method(exact_moments)
    adam_update = as_method(adam_update)
    freeze_cause = as_method(freeze_cause)
    freeze_attribution = as_method(freeze_attribution)
    moment_stuck = as_method(moment_stuck)
    moment_error = as_method(moment_error)
    moment_sizes = as_method(moment_sizes)
    explain_gradient = as_method(explain_gradient)
    layers = as_method(layers)
    divergence = as_method(divergence, each=False)

    compare = as_method(compare)
    each_run = as_method(each_run, each=False)
    heatmap = as_method(heatmap)
    moment_plane = as_method(moment_plane)
    over_runs = as_method(over_runs, each=False)
    summary = as_method(summary)
    vectors = as_method(vectors)
    with_populations = as_method(with_populations, each=False)
