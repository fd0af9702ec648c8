"""Motion of tokens, and the steps at which it stops.

``autocorrelation``
    Autocorrelation of velocity and position.
``collective``
    Centroids of populations, their motion, and the motion of tokens about them.
``freezing``
    Steps at which tokens stop moving, bit for bit.
``level_crossings``
    First and last steps at which curves cross levels.
``moving_elements``
    Last element of each vector that moves.
``norms``
    Norms over the hidden dimension: gradients and displacements.
``paths``
    Paths of tokens: straightness, and radial and tangential motion.
``update_heatmap``
    Update-size heatmap: tokens × steps, with tokens in the order of their last motion.
``resume_discontinuities``
    Steps at which the pace of motion changes abruptly.
``separation``
    Distances and angles between populations.
``unchanged``
    Default number of unchanged steps of a frozen token.
``ulp_motion``
    Motion on the lattice of a type: hops, regimes, and the last step of each token in each.
``vectors``
    Other vectors in place of W: a gradient of each token, or one vector per step.
``velocity``
    Velocity, speed and acceleration, in units of W per optimizer step.
"""
