"""What the optimizer computed, and what rounding lost.

``adam_rule``
    Adam's rule as an optimizer carries it out: from the recorded moments to the change of W.
``freeze_causes``
    What the optimizer intended, and why a token nevertheless did not move.
``freeze_counterfactuals``
    Whether a token that froze would have moved, had one thing been otherwise.
``lost_updates``
    What the optimizer meant to change, and rounding left as it was.
``moment_ratios``
    How far the recorded moments of Adam are from what they would be without rounding.
``moment_rule``
    Adam's moments without the rounding of their state: the recurrence itself, in float64.
``moments``
    Adam's moments without rounding, recomputed from the recorded gradients.
``underflow_line``
    The plane of √v and |m|, and the line in it below which an update is rounded away.
"""
