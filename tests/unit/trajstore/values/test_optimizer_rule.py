"""The rule of an optimizer gives the bits of `torch.optim` on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trajstore.errors import InvalidArgument
from trajstore.trainers.rounded_optimizer import (
    RoundedAdam,
    RoundedAdamW,
    RoundedSGD,
)
from trajstore.values.norms import MovingAverage, every_normal_value, share_left
from trajstore.values.optimizer_rule import OptimizerRule, Rates, VectorRule

ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
TOKENS, HIDDEN, STEPS = 32, 16, 40  # whole vectors of every processor
SUM = torch.add(torch.full((64,), -1 - 2.0**-11), torch.full((64,), 1 + 2.0**-12), alpha=1 + 2**-12)
on_fusing_processors = pytest.mark.skipif(
    not SUM.any(), reason="torch rounds a product before it adds it on this processor"
)


def stored(tensor: Any) -> Any:
    return tensor.detach().float().numpy().copy()


def described(optimizer: Any) -> dict[str, Any]:
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    kind = type(optimizer)
    return {"class": f"{kind.__module__}.{kind.__name__}", "hyperparameters": group}


def differing(dtype: Any, kind: Any, **settings: Any) -> int:
    """Values of 40 steps that are not torch's, of gradients of ten orders of magnitude."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter((torch.randn(TOKENS, HIDDEN) / 10).to(dtype))
    optimizer = kind([parameter], lr=1e-3, **settings)
    rule = OptimizerRule.of(described(optimizer))
    assert OptimizerRule.from_facts(rule.facts()) == rule
    native = str(dtype).removeprefix("torch.")
    natives = {"W": native, "grad": native}
    natives |= dict.fromkeys(rule.state[1:], settings.get("state_dtype", native))
    row = {name: np.zeros((TOKENS, HIDDEN), np.float32) for name in rule.state}
    row["W"] = stored(parameter)
    wrong = 0
    for step in range(1, STEPS + 1):
        scale = 10.0 ** torch.randint(-8, 2, (TOKENS, 1))
        grad = (torch.randn(TOKENS, HIDDEN) * scale).to(dtype)
        clip = 0.375 if step % 3 == 0 else 1.0
        parameter.grad = grad * torch.tensor(clip, dtype=dtype) if clip != 1 else grad.clone()
        optimizer.step()
        made = rule.next_row(row, stored(grad), natives, Rates(lr=1e-3, clip=clip, step=step))
        row = {"W": stored(parameter)}
        row |= {name: stored(optimizer.state[parameter][name]) for name in rule.state[1:]}
        equal = (np.isclose(made[name], row[name], 0, 0, equal_nan=True) for name in row)
        wrong += sum(int((~each).sum()) for each in equal)
    return wrong


@on_fusing_processors
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.3, 0.99)}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.7, "dampening": 0.3, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.7, "nesterov": True}),
        (RoundedSGD, {"momentum": 0.7, "state_dtype": "bfloat16"}),
        (RoundedAdam, {"weight_decay": 0.1, "state_dtype": "bfloat16"}),
        (RoundedSGD, {"weight_decay": 0.1, "state_dtype": "bfloat16"}),
    ],
)
def test_the_rule_gives_the_bits_of_torch(dtype: Any, kind: Any, settings: dict[str, Any]) -> None:
    assert differing(dtype, kind, **settings) == 0


@on_fusing_processors
def test_float32_differs_by_the_square_root_of_torch_alone() -> None:
    """torch takes it of a library that does not always round it correctly."""
    assert differing(torch.float32, torch.optim.SGD, weight_decay=0.1) == 0
    assert differing(torch.float32, torch.optim.AdamW) < 3 * STEPS * TOKENS * HIDDEN / 200
    assert differing(torch.bfloat16, RoundedAdamW, state_dtype="float32") < STEPS


def every_bfloat16() -> Any:
    """All finite values, in another order at each call."""
    bits = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    finite = bits[bits.isfinite()]
    return finite[torch.randperm(len(finite))]


@on_fusing_processors
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
        (RoundedAdamW, {"weight_decay": 0.1, "state_dtype": "bfloat16", "amsgrad": True}),
    ],
)
def test_a_step_from_every_finite_bfloat16(kind: Any, settings: dict[str, Any]) -> None:
    """W, the gradient and the moments each take all of them."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(every_bfloat16())
    optimizer = kind([parameter], lr=1e-3, **settings)
    rule = OptimizerRule.of(described(optimizer))
    state = {name: every_bfloat16() for name in (*rule.state[1:], *rule.carried)}
    before = {"W": stored(parameter)} | {name: stored(each) for name, each in state.items()}
    parameter.grad = every_bfloat16()
    optimizer.state[parameter] = {"step": torch.tensor(6.0), **state}
    natives = dict.fromkeys((*before, "grad"), "bfloat16")
    made = rule.next_row(before, stored(parameter.grad), natives, Rates(lr=1e-3, clip=1, step=7))
    optimizer.step()
    after = {"W": parameter} | {name: optimizer.state[parameter][name] for name in state}
    for name, values in after.items():
        np.testing.assert_array_equal(made[name], stored(values), err_msg=name)


@pytest.mark.parametrize("factor", ["of the same type", "float32", "float64"])
@pytest.mark.parametrize("native", ["bfloat16", "float16", "float32", "float64"])
def test_clipping_rounds_as_torch_does(native: str, factor: str) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, native)
    grad = torch.randn(50, 60, 7).to(dtype)
    clip = torch.rand(50).to(dtype if factor == "of the same type" else getattr(torch, factor))
    wide = torch.float64 if native == "float64" else torch.float32
    rule = OptimizerRule.of({"class": "AdamW", "hyperparameters": ADAM})
    got = rule.gradient(grad.to(wide).numpy(), clip.double().numpy()[:, None, None], native)
    for row in range(50):
        expected = grad[row].clone()
        torch._foreach_mul_([expected], clip[row])  # as clip_grad_norm_
        np.testing.assert_array_equal(got[row], expected.to(wide).numpy())


def test_decay_is_added_to_the_gradient_only_where_it_is_coupled() -> None:
    """Older attributes have no entry `decoupled_weight_decay`."""
    for name, decay in (("AdamW", 0), ("RoundedAdamW", 0), ("Adam", 0.1), ("RoundedAdam", 0.1)):
        assert OptimizerRule.of({"class": name, "hyperparameters": ADAM}).coupled_decay == decay
    given = ADAM | {"decoupled_weight_decay": True}
    assert OptimizerRule.of({"class": "Adam", "hyperparameters": given}).coupled_decay == 0


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "does not name its optimizer"),
        ({"class": "torch.optim.Adagrad"}, "no rule is known for the optimizer 'torch.optim.Ada"),
        ({"class": "AdamW", "hyperparameters": {"betas": [0.9, 0.99]}}, "lack eps, weight_decay"),
        ({"class": "Adam", "hyperparameters": ADAM | {"betas": {}}}, "are not numbers: .*{}"),
    ],
)  # fmt: skip
def test_an_optimizer_without_a_rule(optimizer: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        OptimizerRule.of(optimizer)


def test_bias_corrections_are_those_of_the_exact_powers() -> None:
    """The power of a C library is not always the nearest number, and differs between machines."""
    rule = OptimizerRule.of(
        {"class": "Adam", "hyperparameters": {"betas": [0.95, 0.999], "eps": 0, "weight_decay": 0}}
    )
    for step in (*range(1, 60), 482, 554):
        powers = [float(Fraction(beta) ** step) for beta in (0.95, 0.999)]
        assert rule.corrections(step) == (1 - powers[0], math.sqrt(1 - powers[1]))
    both = [rule.corrections(step) for step in (3, 1, 3)]
    np.testing.assert_array_equal(rule.corrections([[3], [1], [3]]), np.array(both).T[..., None])
    assert rule.corrections(2**62) == (1, 1)
    wrong = replace(rule, beta1=2.0, beta2=3.0).corrections(10**7)
    assert wrong[0] == -math.inf
    assert math.isnan(wrong[1])


GROUP: dict[str, Any] = {
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
    "changed",
    [
        *({"segments": one} for one in (
            [], [[0, 1, 0], [6, 2, 3]], [[0, 1, 0], [6, 0, 5]], [[0, 1, 0], [0, 1, 1]], [[1, 1, 0]],
        )),
        {"groups": []}, {"parameters": 4.0}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_facts_of_no_rule_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no rule of vectors has"):
        VectorRule.from_facts(VectorRule.of(RUN).facts() | changed)


def test_groups_that_cannot_be_computed_are_refused() -> None:
    given = GROUP["hyperparameters"]
    for group, reason in (
        (GROUP | {"class": "SGD", "hyperparameters": {"momentum": 0, "weight_decay": 0}}, "count"),
        (GROUP | {"hyperparameters": given | {"rounding": "stochastic"}}, "rounds at random"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            VectorRule.of(RUN | {"optimizer": {"groups": [GROUP, group]}})
    with pytest.raises(InvalidArgument, match="does not name its parameters and groups"):
        VectorRule.of({"parameters": PARAMETERS})


@pytest.mark.nightly
@pytest.mark.parametrize("beta", [0.9, 0.998])
@pytest.mark.parametrize(
    ("flags", "form"), [({"foreach": False}, "product"), ({"fused": True}, "once")]
)
def test_moving_averages_are_those_of_torch(beta: float, flags: dict[str, bool], form: Any) -> None:
    """Without a gradient, and with any, from every value of bfloat16."""
    every = np.concatenate([*every_normal_value("bfloat16")])
    for grad in (np.zeros_like(every), every[::-1].copy()):
        W = torch.nn.Parameter(torch.ones(every.size, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([W], betas=(beta, beta), **flags)
        state = {name: torch.from_numpy(every).bfloat16() for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[W] = {"step": torch.tensor(5.0)} | state
        W.grad = torch.from_numpy(grad).bfloat16()
        optimizer.step()
        for name, how, power in (("exp_avg", "lerp", 1), ("exp_avg_sq", form, 2)):
            average = MovingAverage(native="bfloat16", beta=beta, form=how)
            with np.errstate(over="ignore", under="ignore"):
                target = grad**power
            after, expected = stored(optimizer.state[W][name]), average.after(every, target)
            # torch multiplies (1 − β)·g by g, which rounds differently from (1 − β)·g².
            finite = np.isfinite(target) & np.isfinite(expected) & ((target > 1e-30) | (grad == 0))
            assert (after == expected)[finite].mean() > 0.999
            assert grad.any() or share_left(average, 0) == (after == every).mean()
