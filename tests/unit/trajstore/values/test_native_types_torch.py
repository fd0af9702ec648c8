""""""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import as_bits, native_type
from trajstore.values.norms import MovingAverage, every_normal_value, share_left

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_a_tensor_gives_its_bits(name: str) -> None:
    tensor = torch.tensor([[0.5, -0.0], [float("nan"), float("inf")]], dtype=getattr(torch, name))
    native = native_type(name)
    bits = as_bits(tensor.T, native, "W")
    assert bits.dtype == native.bits
    signed = getattr(torch, f"int{8 * native.itemsize}")
    assert (bits == tensor.view(signed).numpy().view(native.bits).T).all()


def test_a_tensor_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="got int64"):
        as_bits(torch.tensor([1]), native_type("bfloat16"), "W")
    with pytest.raises(InvalidArgument, match="got float16"):
        as_bits(torch.tensor([1.0]).half(), native_type("bfloat16"), "W")


def test_an_exact_float32_tensor_is_taken_as_bfloat16() -> None:
    bits = as_bits(torch.tensor([1.5]), native_type("bfloat16"), "W")
    assert bits.view(np.uint16).tolist() == [0x3FC0]


BETAS = (0.6, 0.9, 0.998)


def stepped(native: str, beta: float, gradient: Any, **flags: bool) -> dict[str, Any]:
    """State of torch's AdamW after one step from every value of the type."""
    every = np.concatenate([*every_normal_value(native)])
    values = torch.from_numpy(every).to(getattr(torch, native))
    W = torch.nn.Parameter(torch.ones_like(values))
    optimizer = torch.optim.AdamW([W], betas=(beta, beta), **flags)
    optimizer.state[W] = {
        "step": torch.tensor(5.0), "exp_avg": values.clone(), "exp_avg_sq": values.clone(),
    }  # fmt: skip
    W.grad = torch.zeros_like(W) if gradient is None else gradient(values)
    optimizer.step()
    state = optimizer.state[W]
    return {name: state[name].float().numpy() for name in ("exp_avg", "exp_avg_sq")} | {
        "before": every, "W.grad": W.grad.float().numpy(),
    }  # fmt: skip


@pytest.mark.parametrize("native", ["bfloat16", "float16"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("flags", [{"foreach": False}, {"fused": True}], ids=str)
def test_without_a_gradient(native: str, beta: float, flags: dict[str, bool]) -> None:
    after = stepped(native, beta, None, **flags)
    forms = {"exp_avg": "lerp", "exp_avg_sq": "once" if "fused" in flags else "product"}
    for name, form in forms.items():
        left = (after[name] == after["before"]).mean()
        assert left == share_left(MovingAverage(native=native, beta=beta, form=form), 0)


@pytest.mark.parametrize("native", ["bfloat16", "float16"])
@pytest.mark.parametrize("beta", BETAS)
def test_with_any_gradient(native: str, beta: float) -> None:
    after = stepped(native, beta, lambda values: values.flip(0), foreach=False)
    for name, form, power in (("exp_avg", "lerp", 1), ("exp_avg_sq", "product", 2)):
        average = MovingAverage(native=native, beta=beta, form=form)
        with np.errstate(over="ignore", under="ignore"):
            target = after["W.grad"] ** power
        expected = average.after(after["before"], target)
        # torch multiplies (1 − β)·g by g, which rounds differently from (1 − β)·g².
        finite = np.isfinite(target) & (target > 1e-30) & np.isfinite(expected)
        assert (after[name] == expected)[finite].mean() > 0.999
