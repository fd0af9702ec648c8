"""Input and recurrence of the moments, compared with torch."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore.analysis.optimizer.moment_rule import MomentRule
from trajstore.analysis.optimizer.update_rule import round_to
from trajstore.errors import InvalidArgument, VariableNotRecorded

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

GIVEN = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}


def rule_of(kind: str, **options) -> MomentRule:
    return MomentRule.of({"class": kind, "hyperparameters": {**GIVEN, **options}})


@pytest.mark.parametrize("factor", ["of the same type", "float32", "float64"])
@pytest.mark.parametrize("native", ["bfloat16", "float16", "float32", "float64"])
def test_clipping_rounds_as_torch_does(native, factor):
    torch.manual_seed(0)
    dtype = getattr(torch, native)
    grad = torch.randn(50, 60, 7).to(dtype)
    clip = torch.rand(50).to(dtype if factor == "of the same type" else getattr(torch, factor))
    stored = torch.float64 if native == "float64" else torch.float32
    got = rule_of("AdamW").gradient(
        grad.to(stored).numpy(), clip.double().numpy()[:, None, None], None, native
    )
    for row in range(50):
        expected = grad[row].clone()
        torch._foreach_mul_([expected], clip[row])  # as clip_grad_norm_
        np.testing.assert_array_equal(got[row], expected.to(stored).numpy())


def test_the_second_moment_of_bfloat16_cannot_decay():
    # All positive normal values; the presets' β₂.
    every = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(every.clone().mul_(0.999), every)
    stored = every.float().numpy()
    kept = round_to(stored * np.float32(0.999), "bfloat16")
    np.testing.assert_array_equal(kept, stored)
    # With a gradient of zero, the optimizer does not change them.
    W = torch.nn.Parameter(torch.zeros_like(every))
    for foreach in (False, True):
        optimizer = torch.optim.AdamW([W], lr=1e-3, betas=(0.9, 0.999), foreach=foreach)
        W.grad = torch.zeros_like(W)
        optimizer.step()
        optimizer.state[W]["exp_avg_sq"].copy_(every)
        optimizer.step()
        assert torch.equal(optimizer.state[W]["exp_avg_sq"], every)
    # It decays at 0.996; float32 decays at 0.999.
    assert not (every.clone().mul_(0.996) == every).any()
    assert not (every.float().mul_(0.999) == every.float()).any()


def test_decay_is_part_of_the_gradient_only_where_it_is_coupled():
    grad, W = np.full((1, 1, 2), 0.5, np.float32), np.full((1, 1, 2), 2, np.float32)
    clip = np.full((1, 1, 1), 0.5)
    assert rule_of("AdamW").coupled_decay == 0
    assert rule_of("Adam", decoupled_weight_decay=True).coupled_decay == 0
    assert rule_of("trajstore.trainers.rounded_optimizer.RoundedAdamW").coupled_decay == 0
    assert rule_of("trajstore.trainers.rounded_optimizer.RoundedAdam").coupled_decay == 0.1
    adam = rule_of("Adam", maximize=True)
    got = adam.gradient(grad, clip, W, "float32")
    assert got.dtype == np.float64
    assert (got == -0.25 + 0.1 * 2).all()
    np.testing.assert_allclose(adam.intended("exp_avg", W, got), 0.1 * (got - 2), rtol=1e-14)


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(InvalidArgument, match=r"amsgrad.*is not recorded"):
        rule_of("AdamW", amsgrad=True)
    with pytest.raises(InvalidArgument, match=r"'torch.optim.sgd.SGD'.*RoundedAdamW"):
        rule_of("torch.optim.sgd.SGD")
    with pytest.raises(VariableNotRecorded, match="attribute optimizer"):
        MomentRule.of(None)
