from __future__ import annotations

from typing import Any

import pytest

from trajstore.store.metadata.zarr_json import steps_of_another_optimizer

OTHER = {"class": "torch.optim.adam.Adam"}


@pytest.mark.parametrize(
    ("fork", "last"),
    [
        (None, 0),
        ({"step": 4}, 0),
        ({"step": 4, "optimizer": OTHER}, 4),
        ({"step": 8, "forked_before": {"step": 4, "optimizer": OTHER}}, 4),
        ({"step": 8, "optimizer": OTHER, "forked_before": {"step": 4}}, 8),
        ({"step": 2, "forked_before": {"step": 4, "optimizer": OTHER}}, 2),
        ({"step": "4", "optimizer": OTHER}, 0),
        ("nonsense", 0),
    ],
)
def test_the_last_step_of_another_optimizer(fork: Any, last: int) -> None:
    assert steps_of_another_optimizer({"provenance": {"fork": fork}}) == last
    assert steps_of_another_optimizer({}) == 0
