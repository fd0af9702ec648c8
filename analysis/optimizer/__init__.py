"""Updates of the optimizer, and the effects of rounding.

The rule itself is in `trajstore.values.optimizer_rule`.
"""
