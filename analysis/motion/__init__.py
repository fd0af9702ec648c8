"""How tokens move, and when they stop.

``autocorrelation``
    How long tokens remember where they were going, and where they were.
``collective``
    Populations as bodies: where their center is, how it moves, and how the tokens move about it.
``freezing``
    When tokens stop moving, bit for bit.
``level_crossings``
    When curves pass levels, for the first and for the last time.
``moving_elements``
    Elements of vectors that keep their tokens moving.
``norms``
    Lengths of vectors over the hidden dimension: gradients, and ways from where a token was.
``paths``
    Ways of tokens: how straight they are, and how much of them leads outward.
``update_heatmap``
    Tokens × steps as layers: the tokens in the order in which they came to rest.
``resume_discontinuities``
    Steps at which a history does not continue itself.
``stillness``
    How long a token is still before it counts as frozen.
``ulp_motion``
    Motion on the lattice of a type: hops, regimes, and the way into rest.
``velocity``
    Velocity, speed and acceleration, in units of W per optimizer step.
"""
