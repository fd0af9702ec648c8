from __future__ import annotations

from typing import Any

import pytest

from trajstore.provenance import RunAttributes

OTHER = {"class": "torch.optim.adam.Adam"}
MEMBERS = ("fork", "resumed", "what_if", "threads", "modes", "class", "groups", "every")
ODD = (None, True, 0.5, [3], {"step": "4"}, {"class": {}, "resumed": [{}]})


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("name", ["provenance", "optimizer", "recording"])
def test_an_odd_value_counts_as_missing(name: str, odd: Any) -> None:
    for value in (odd, dict.fromkeys(MEMBERS, odd)):
        found = RunAttributes.of({name: value})
        assert (found.resumed_after, found.optimizer.groups, found.optimizer.name) == ([], [], "")
        assert (found.every, found.threads_after(3), found.other_optimizer_until) == (1, None, 0)


@pytest.mark.parametrize(
    ("fork", "last"),
    [
        ({"step": 4}, 0),
        ({"step": 4, "optimizer": OTHER}, 4),
        ({"step": 8, "forked_before": {"step": 4, "optimizer": OTHER}}, 4),
        ({"step": 8, "optimizer": OTHER, "forked_before": {"step": 4}}, 8),
        ({"step": 2, "forked_before": {"step": 4, "optimizer": OTHER}}, 2),
    ],
)
def test_the_last_step_of_another_optimizer(fork: Any, last: int) -> None:
    assert RunAttributes.of({"provenance": {"fork": fork}}).other_optimizer_until == last
