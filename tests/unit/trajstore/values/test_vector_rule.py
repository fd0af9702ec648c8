"""The rule of vectors: parts of a range of elements, steps of a parameter, unusable metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.optimizer_rule import Rates, VectorRule

GROUP = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
PARAMETERS = [
    {"name": "a", "variable": "params", "shape": [2, 3], "offset": 0, "group": 1},
    {"name": "W", "variable": "W", "shape": [4, 2], "group": 0},
    {"name": "empty", "variable": "params", "shape": [0], "offset": 6, "group": 0},
    {"name": "fixed", "variable": "params", "shape": [], "offset": 6, "group": None},
    {"name": "b", "variable": "params", "shape": [5], "offset": 7, "group": 0},
]
RUN = {"optimizer": {"groups": [GROUP, GROUP]}, "parameters": PARAMETERS}


def test_a_range_of_elements_has_a_part_of_each_parameter() -> None:
    rule = VectorRule.of(RUN)
    assert VectorRule.from_facts(rule.facts()) == rule
    assert list(rule.parts(4, 5)) == [
        (slice(0, 2), 1, 0), (slice(2, 3), 0, 3), (slice(3, 5), 0, 4),
    ]  # fmt: skip
    assert list(rule.parts(9, 3)) == [(slice(0, 3), 0, 4)]


def test_a_parameter_takes_a_step_where_its_count_grows() -> None:
    lr = np.array([[np.nan, np.nan], [0.1, 0.2], [0.1, 0.2], [0.1, np.nan], [0.1, 0.3]])
    rates = {
        "params_count": np.array([[0, 0], [1, 0], [2, 1], [2, 2], [3, 3]], float),
        "params_lr": lr,
        "clip_coef": np.array([np.nan, 0.5, 1, 1, 1]),
    }
    first, rule = Rates(step=1, lr=0.1, clip=0.5), VectorRule.of(RUN)
    assert rule.rates(rates, 0, 0) == [
        None, first, Rates(step=2, lr=0.1, clip=1), None, Rates(step=3, lr=0.1, clip=1),
    ]  # fmt: skip
    del rates["clip_coef"]
    assert rule.rates(rates, 1, 1) == [
        None, None, Rates(step=1, lr=0.2, clip=1), None, Rates(step=3, lr=0.3, clip=1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("groups", []),
        ("segments", []),
        ("segments", [[0, 1, 0], [6, 2, 3]]),
        ("segments", [[0, 1, 0], [6, 0, 5]]),
        ("segments", [[0, 1, 0], [0, 1, 1]]),
        ("segments", [[1, 1, 0]]),
        ("parameters", 4.0),
        ("more", 1),
    ],
)
def test_facts_of_no_rule_are_refused(member: str, value: Any) -> None:
    facts = VectorRule.of(RUN).facts() | {member: value}
    with pytest.raises(ValueError, match="no rule of vectors has"):
        VectorRule.from_facts(facts)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ({"class": "SGD", "hyperparameters": {"momentum": 0, "weight_decay": 0}}, "count steps"),
        (
            {**GROUP, "hyperparameters": {**GROUP["hyperparameters"], "rounding": "stochastic"}},
            "rounds at random",
        ),
    ],
)
def test_groups_that_cannot_be_computed_are_refused(group: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        VectorRule.of({**RUN, "optimizer": {"groups": [GROUP, group]}})
    with pytest.raises(InvalidArgument, match="does not name its parameters and groups"):
        VectorRule.of({"parameters": PARAMETERS})
