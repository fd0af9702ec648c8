from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trajstore.trainers import preset  # noqa: E402
from trajstore.trainers.rounded_optimizer import RoundedAdam, RoundedAdamW, RoundedSGD  # noqa: E402
from trajstore.trainers.runs.training_setup import (  # noqa: E402
    build_model,
    build_optimizer,
)

pytestmark = pytest.mark.torch

SMALL = ["model.context=8", "model.hidden=8", "model.layers=1", "training.seed=11"]
F32 = "model.dtype=float32"


def built(*assignments: str) -> Any:
    config = preset("gatsby").with_values([*SMALL, *assignments])
    return build_optimizer(build_model(config.model), config)


CLASSES = {"adamw": RoundedAdamW, "adam": RoundedAdam, "sgd": RoundedSGD}


@pytest.mark.parametrize("name", CLASSES)
def test_state_of_the_weights_type_is_left_to_torch(name: str) -> None:
    for same in ([], ["optimizer.state_dtype=bfloat16"], [F32, "optimizer.state_dtype=float32"]):
        optimizer = built(f"optimizer.name={name}", *same)
        assert type(optimizer) is CLASSES[name].real_class
        assert "rounding" not in optimizer.param_groups[0]


@pytest.mark.parametrize("name", CLASSES)
def test_other_state_or_rounding_is_rounded_once(name: str) -> None:
    for state, rounding, *assignments in (
        ("float32", "nearest", "optimizer.state_dtype=float32"),
        ("bfloat16", "nearest", F32, "optimizer.state_dtype=bfloat16"),
        ("bfloat16", "stochastic", "optimizer.rounding=stochastic"),
    ):
        changes = [*assignments, f"optimizer.name={name}", "optimizer.weight_decay=0.25"]
        optimizer = built(*changes, *(["optimizer.momentum=0.5"] if name == "sgd" else []))
        assert type(optimizer) is CLASSES[name]
        decayed, spared = optimizer.param_groups
        for group in (decayed, spared):
            own = (group["state_dtype"], group["rounding"], group["rounding_seed"])
            assert own == (state, rounding, 11)
            assert group["momentum" if name == "sgd" else "betas"] in (0.5, (0.9, 0.999))
        assert (decayed["weight_decay"], spared["weight_decay"]) == (0.25, 0)
