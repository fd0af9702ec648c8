"""What the optimizer computed, and what rounding lost.

``update_rule``
    Adam's rule as an optimizer carries it out: from the recorded moments to the change of W.
``freeze_causes``
    Why a token did not move although the optimizer intended it.
``freeze_counterfactuals``
    Whether a token that froze would have moved, had one thing been otherwise.
``lost_updates``
    What the optimizer meant to change, and rounding left as it was.
``moment_ratios``
    How far the recorded moments of Adam are from what they would be without rounding.
``moment_rule``
    The recurrence of Adam's moments in float64, without the rounding of their state.
``moments``
    Quantities: exact moments, computed from the recorded gradients.
``lost_update_line``
    The plane of √v and |m|, and the line in it below which an update is rounded away.
"""
