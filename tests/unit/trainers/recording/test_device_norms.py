from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from trajstore.trainers.recording import device_summaries  # noqa: E402
from trajstore.trainers.recording.device_summaries import pairwise_sum, token_norm, ulp, ulp_l1  # noqa: E402
from trajstore.values import native_types, norms  # noqa: E402
from trajstore.values.native_types import NATIVE_TYPES, NativeType, widen  # noqa: E402

pytestmark = pytest.mark.torch

# What is added up at once changes at 8 and 128, and with the halves of longer vectors.
LENGTHS = [*range(1, 18), 63, 64, 65, 127, 128, 129, 136, 255, 256, 257, 264, 511, 768, 1000, 1024]
LENGTHS += [1025, 4096, 5000, 8193, 10_000]
DEVICES = ["host", "like a device", pytest.param("device", marks=pytest.mark.device)]


def special_bits(native: NativeType) -> list[int]:
    """Zero, subnormals, powers of two, the largest, infinity and NaN; of both signs."""
    one, least = native.bias << native.mantissa_bits, 1 << native.mantissa_bits
    infinity, quiet = native.infinity_bits, native.nan_bits
    positive = [0, 1, 2, least - 1, least, least + 1, one - 1, one, one + 1, one + least]
    positive += [infinity - 1, infinity, infinity + 1, quiet, native.sign_mask - 1]
    return [bits | sign for sign in (0, native.sign_mask) for bits in positive]


def random_bits(
    rng: np.random.Generator, shape: tuple[int, ...], native: NativeType
) -> np.ndarray[Any, Any]:
    """Rows of neighbouring magnitudes, of any pattern, of huge and tiny values, of special ones."""
    bits = rng.integers(0, 2 * native.sign_mask, shape, native.bits, endpoint=False)
    exponent = rng.integers(native.bias - 3, native.bias + 3, shape).astype(native.bits)
    kept = native.sign_mask | ((1 << native.mantissa_bits) - 1)
    bits[0::4] = (bits & kept)[0::4] | (exponent << native.mantissa_bits)[0::4]
    bits[1::4] &= ~native.bits.type(1 << (8 * native.itemsize - 2))  # below 2: none is inf or NaN
    few = rng.random(shape) < 3 / shape[-1]
    special = np.array(special_bits(native), native.bits)
    return np.where(
        few & (np.arange(len(bits)) % 4 == 3)[:, None], rng.choice(special, shape), bits
    )


def tensor_of(bits: np.ndarray[Any, Any], native: NativeType) -> Any:
    return torch.from_numpy(bits.view(f"i{native.itemsize}")).view(getattr(torch, native.name))


def assert_summaries_agree(
    before: np.ndarray[Any, Any],
    now: np.ndarray[Any, Any],
    native: NativeType,
    place: Callable[[Any], Any],
) -> None:
    """The recorder's summaries are those of `norms`, bit for bit, kept as float32."""
    x, y = widen(before, native), widen(now, native)
    old, new = place(tensor_of(before, native)), place(tensor_of(now, native))
    for got, expected in (
        (token_norm(new), norms.token_norm(y)),
        (token_norm(new, old), norms.step_norm(x, y)),
        (ulp_l1(new, old), norms.ulp_l1(x, y, native.name)),
    ):
        with np.errstate(over="ignore"):
            kept = expected.astype(np.float32)
        np.testing.assert_array_equal(
            got.cpu().numpy().view(np.uint32), kept.view(np.uint32), f"hidden {x.shape[-1]}"
        )


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Where the weights are: on the host, on the host but summed as on a device, or on one."""
    if request.param == "like a device":
        monkeypatch.setattr(
            device_summaries, "_hidden_sum", lambda values: pairwise_sum(values.movedim(-1, 0))
        )
    device = "cpu" if request.param != "device" else request.getfixturevalue("accelerator")
    return lambda tensor: tensor.to(device)


@pytest.mark.parametrize("native", NATIVE_TYPES.values(), ids=list(NATIVE_TYPES))
def test_summaries_are_those_of_the_analysis_bit_for_bit(
    native: NativeType, place: Callable[[Any], Any]
) -> None:
    rng = np.random.default_rng(0)
    for hidden in LENGTHS:
        before, other = (random_bits(rng, (16, hidden), native) for _ in range(2))
        near = before + rng.integers(0, 3, before.shape, native.bits) - native.bits.type(1)
        some = np.where(rng.random(before.shape) < 0.2, other, before)
        for now in (near, some, before):
            assert_summaries_agree(before, now, native, place)
    special = np.array(special_bits(native), native.bits)
    before, now = (ends.reshape(-1, 1) for ends in np.meshgrid(special, special))
    assert_summaries_agree(before, now, native, place)


def test_devices_add_up_in_the_order_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    for length in [*range(1, 300), *LENGTHS, 50_257]:
        values = rng.normal(size=(3, length)) * 2.0 ** rng.integers(-40, 40, (3, length))
        got = pairwise_sum(torch.from_numpy(values).movedim(-1, 0))
        np.testing.assert_array_equal(got.numpy(), norms.hidden_sum(values), f"hidden {length}")


@pytest.mark.parametrize("native", NATIVE_TYPES.values(), ids=list(NATIVE_TYPES))
def test_ulp_is_the_spacing_of_the_lattice(native: NativeType) -> None:
    if native.itemsize == 2:
        bits = np.arange(1 << 16, dtype=np.uint16)
    else:
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 2 * native.sign_mask, 100_000, native.bits, endpoint=False)
        bits = np.append(bits, np.array(special_bits(native), native.bits))
    expected = native_types.spacing(widen(bits, native), native.name)
    np.testing.assert_array_equal(ulp(tensor_of(bits, native)).numpy(), expected)
