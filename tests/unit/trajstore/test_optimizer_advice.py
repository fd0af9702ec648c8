from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trajstore.errors import ConfigError
from trajstore.optimizer_advice import advise, advise_run, require_sound
from trajstore.provenance import RunAttributes


def adam(name: str = "torch.optim.adamw.AdamW", **changed: Any) -> dict[str, Any]:
    given = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    return {"class": name, "hyperparameters": given | changed}


ROUNDED = "trajstore.trainers.rounded_optimizer.RoundedAdamW"
NEAREST = adam(ROUNDED, state_dtype="bfloat16", rounding="nearest", weight_decay=0.01)
WHOLE, HALF, BRAIN = "float32", "float16", "bfloat16"
NEVER = (
    "exp_avg_sq can never decay: 0.999·v rounds back to v for 100 % of bfloat16 values. The second "
    "moment only grows, and the effective learning rate only falls. Keep the optimizer's state in "
    "float32 (optimizer.state_dtype=float32; in your own loop RoundedAdamW(…, state_dtype="
    '"float32")), or train float32 weights under autocast (model.dtype=float32; in your own loop '
    "model.float() with torch.autocast)"
)
SOON = "exp_avg_sq soon stops decaying: 0.998·v rounds back to v for 95.3 % of bfloat16"
LARGE = "exp_avg_sq stops growing while the squared gradient is twice as large: 0.996·v"
FIRST = "exp_avg can never decay: m − 0.001·m rounds back to m for 100 %"
LOST = (
    "weight decay can never change W at learning rates up to 0.001: (1 − 0.001·0.01)·W rounds back "
    "to W for 100 % of bfloat16"
)


@pytest.mark.parametrize(
    ("optimizer", "state", "weights", "variable", "text"),
    [
        (adam(), BRAIN, BRAIN, "exp_avg_sq", NEVER),
        (adam(betas=[0.9, 0.998]), BRAIN, BRAIN, "exp_avg_sq", SOON),
        (adam(betas=[0.9, 0.996]), BRAIN, BRAIN, "exp_avg_sq", LARGE),
        (adam(betas=[0.999, 0.9]), BRAIN, BRAIN, "exp_avg", FIRST),
        (adam(betas=[0.9, 1 - 1e-9]), WHOLE, WHOLE, "exp_avg_sq", "falls. Choose a smaller beta2"),
        (adam(weight_decay=0.01), WHOLE, BRAIN, "W", LOST),
        (adam(weight_decay=0.01, lr=0.0, initial_lr=1e-3), WHOLE, BRAIN, "W", LOST),
        (adam("Adam", weight_decay=0.01, decoupled_weight_decay=True), WHOLE, BRAIN, "W", LOST),
        (adam(weight_decay=0.2, lr=0.01), WHOLE, BRAIN, "W", "does not change most of W"),
        (adam(), HALF, HALF, "eps", "eps = 1e-08 rounds to 0 in float16"),
        (NEAREST, BRAIN, BRAIN, "exp_avg_sq", "can never decay"),
    ],
)
def test_advice_depends_on_rates_types_and_roundings(
    optimizer: Any, state: str, weights: str, variable: str, text: str
) -> None:
    (advice,) = advise(optimizer, state=state, weights=weights)
    assert advice.variable == advice.facts()["variable"] == variable
    assert text in advice.sentence


UNKNOWN = [
    None, {}, "AdamW", {"class": "AdamW"}, adam("torch.optim.sgd.SGD"), adam(betas=None),
    adam(betas=[0.9]), adam(betas=["a", "b"]), adam(betas=[0.9, 2.0]), adam(eps=None),
    adam(weight_decay=float("nan")), {"class": "AdamW", "hyperparameters": [1]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "state", "weights"),
    [
        (adam(), WHOLE, BRAIN),
        (adam(betas=[0.9, 0.99]), BRAIN, BRAIN),
        (adam(weight_decay=0.01, lr=1.0), WHOLE, BRAIN),
        (adam(weight_decay=0.01, fused=True), WHOLE, BRAIN),  # a part of the update
        (adam("torch.optim.adam.Adam", weight_decay=0.01), WHOLE, BRAIN),  # of the gradient
        (adam(weight_decay=0.01, lr=0.0), WHOLE, BRAIN),
        (adam(weight_decay=0.01, lr="fast"), WHOLE, BRAIN),
        (adam(weight_decay=0.01), WHOLE, WHOLE),
        (adam(eps=1e-6), HALF, HALF),
        (adam(fused=True), HALF, HALF),
        (NEAREST, WHOLE, BRAIN),
        (adam(ROUNDED, state_dtype=BRAIN, rounding="stochastic"), BRAIN, BRAIN),
        (adam(weight_decay=0.1), "float64", "float8"),  # types that are not tried
        *((odd, BRAIN, BRAIN) for odd in UNKNOWN),
    ],
)
def test_sound_numerics_and_unknown_optimizers_get_no_advice(
    optimizer: Any, state: str, weights: str
) -> None:
    assert advise(optimizer, state=state, weights=weights) == []


def test_a_run_by_its_attributes_and_all_recorded_rates() -> None:
    attributes = {"optimizer": adam(weight_decay=0.01)}

    def variables(*rates: float, **types: str) -> list[str]:
        return [advice.variable for advice in advise_run(attributes, types, rates)]

    assert variables(W="bfloat16") == ["exp_avg_sq", "W"]
    assert variables(grad="bfloat16", logits="float32") == ["exp_avg_sq", "W"]
    assert variables(W="float32", logits="bfloat16") == variables() == []
    types = {"W": "bfloat16", "exp_avg_sq": "float32"}
    # A loop that warms up by hand: the first rate is the one in the attributes.
    assert variables(**types) == variables(0.001, 0.01, **types) == ["W"]
    assert variables(0.001, 1.0, np.nan, **types) == []
    assert advise_run({}, {"W": "bfloat16"}) == []
    (one,) = advise_run(attributes, types, [0.001, 0.01])
    assert "can never change W at learning rates up to 0.01: (1 − 0.01·0.01)" in one.sentence


def test_strict_numerics_refuse_in_one_sentence() -> None:
    require_sound([])
    advice = advise(adam(weight_decay=0.01), state="bfloat16", weights="bfloat16")
    with pytest.raises(
        ConfigError, match=r"^strict numerics refuse.*exp_avg_sq can never.*\. weight decay"
    ):
        require_sound(advice)


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
