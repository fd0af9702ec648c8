"""The floating-point types of trainers: bits, rounding, spacing, norms.

``native_types`` has the types a trainer can hold, as bits and as what the store keeps; ``rounding``
goes from one to another, ``ulp_lattice`` knows the spacing and the order of their values, and
``token_norms`` defines what is summed up of a token's vectors. ``moving_average`` tries what
rounding leaves of an optimizer's state, and ``optimizer_rule`` has one step of an optimizer.
"""
