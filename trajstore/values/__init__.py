"""The floating-point types of trainers: bits, rounding, spacing, norms.

``native_types`` defines the types of trainers as bits and in their stored form. ``rounding``
converts between them. ``ulp_lattice`` computes the spacing and the order of their values.
``token_norms`` defines the summaries per token. ``moving_average`` computes how rounding affects an
optimizer's state. ``hyperparameters`` names the numbers of a parameter group. ``optimizer_rule``
computes one step of an optimizer, and ``vector_rule`` that of many parameters.
"""
