from __future__ import annotations

import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import as_bits, native_type

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
