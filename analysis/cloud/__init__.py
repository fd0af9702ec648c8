"""Positions of tokens relative to each other.

``alignments``
    Angles between the vectors of tokens and other vectors, and their statistics.
``identical_vectors``
    Groups of tokens with bit-identical vectors, and how the groups change.
``near_cells``
    Graph of distinct vectors in nearby cells of the lattice.
``nearest_vectors``
    Distance to the nearest other vector of each token, and the entropy of the cloud.
``projections``
    Projections of tokens on given axes, and their orthogonal parts.
``shape``
    Shape of the cloud of tokens: principal axes, and inertia at each step.
``sky_directions``
    Directions of tokens on the sky about an axis.
"""
