"""Positions of tokens relative to each other.

``alignments``
    Angles between the vectors of tokens and other vectors, and their statistics.
``identical_vectors``
    Tokens that have become one: groups with bit-identical vectors, and what becomes of them.
``near_cells``
    Which tokens are in near cells of the lattice: a graph of distinct vectors.
``nearest_vectors``
    The nearest other vector of each token, and what the distances say of the density.
``projections``
    Shadows of the cloud of tokens on any axes, and what lies across them.
``shape``
    Shape of the cloud of tokens: its principal axes, and its inertia at each step.
"""
