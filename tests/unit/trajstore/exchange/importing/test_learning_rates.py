from __future__ import annotations

import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.exchange.importing.learning_rates import completed_rule, scheduled_rates


def test_schedules() -> None:
    steps = np.array([0, 1, 2, 10, 11])
    constant = scheduled_rates("constant", 0.25, steps)
    assert np.array_equal(constant, [np.nan, 0.25, 0.25, 0.25, 0.25], equal_nan=True)
    linear = scheduled_rates("linear:10", 1.0, steps)
    assert np.allclose(linear, [np.nan, 1.0, 0.9, 0.1, 0.0], equal_nan=True)
    for text in ("linear", "linear:0", "linear:-3", "cosine", ""):
        with pytest.raises(InvalidArgument, match="got schedule"):
            scheduled_rates(text, 1.0, steps)


def test_the_rule_is_completed_with_a_note() -> None:
    given = {"hyperparameters": {"betas": [0.9, 0.99], "weight_decay": 0.0}}
    rule, note, added = completed_rule(given, has_moments=True)
    assert added == {"eps": 1e-8}
    assert rule["class"] == "torch.optim.adamw.AdamW"
    assert rule["hyperparameters"] == {"betas": [0.9, 0.99], "weight_decay": 0.0, "eps": 1e-8}
    assert "eps 1e-08" in note
    assert "betas" not in note
    rule, _, added = completed_rule({"hyperparameters": {"betas": [0.0, 0.0]}}, has_moments=False)
    assert (rule["class"], added) == ("torch.optim.sgd.SGD", {})
