"""Updates of the optimizer, and the effects of rounding.

The rule itself is in `trajstore.values.optimizer_rule`.

``freeze_causes``
    Intended updates, and the causes of tokens that do not move.
``freeze_counterfactuals``
    Effect of single changes of the optimizer on frozen tokens.
``lost_by_parameter``
    Fraction of the updates of each parameter of the model that a step lost.
``lost_updates``
    Fraction of intended changes that rounding discarded.
``moment_ratios``
    Ratios of the recorded moments to the exact ones.
``exact_recurrence``
    The recurrence of Adam's moments in float64, without the rounding of their state.
``moment_sizes``
    Sizes of the moments of each token, with bias correction.
``moments``
    Exact moments, computed from the recorded gradients.
``lost_update_line``
    The plane of √v and |m|, and the line below which updates are lost.
"""
