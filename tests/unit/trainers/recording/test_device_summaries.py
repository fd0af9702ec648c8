"""Summaries that the recorder computes are those of the analysis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from trainings import (
    TinyModel,
    batches,
    steps,
    tiny_run,
)

from trajstore import open_run
from trajstore.schema import MODEL
from trajstore.trainers import capture
from trajstore.trainers.recording.device_summaries import (
    pairwise_sum,
    token_norm,
    ulp_l1,
)
from trajstore.values import norms
from trajstore.values.native_types import NATIVE_TYPES, NativeType, widen

# What is added up at once changes at 8 and 128, and with the halves of longer vectors.
LENGTHS = [1, 2, 7, 8, 9, 16, 17, 64, 127, 128, 129, 136, 257, 1000, 4096]


def special_bits(native: NativeType) -> list[int]:
    """Zero, subnormals, powers of two, the largest, infinity and NaN; of both signs."""
    unit, least = native.bias << native.mantissa_bits, 1 << native.mantissa_bits
    infinity, quiet = native.infinity_bits, native.nan_bits
    positive = [0, 1, 2, least - 1, least, least + 1, unit - 1, unit, unit + 1, unit + least]
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


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.device)])
def place(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Where the weights are."""
    device = "cpu" if request.param == "host" else request.getfixturevalue("accelerator")
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


class Elsewhere(torch.Tensor):  # type: ignore[misc]
    """Says that it is on another device, whose tensors NumPy cannot read."""

    device = torch.device("cuda")

    def to(self, *place: Any, **options: Any) -> Any:
        return self if place == (self.device,) else super().to(*place, **options)

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor)

    def numpy(self) -> Any:
        raise TypeError("the tensor is on another device")


def test_summaries_of_another_device_have_the_same_bits() -> None:
    rng, native = np.random.default_rng(0), NATIVE_TYPES["bfloat16"]
    for hidden in (7, 129, 1000):
        before, now = (random_bits(rng, (16, hidden), native) for _ in range(2))
        assert_summaries_agree(before, now, native, lambda tensor: tensor.as_subclass(Elsewhere))


def test_devices_add_up_in_the_order_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    for length in [*range(1, 300), 511, 768, 1000, 1025, 5000, 8193, 50_257]:
        values = rng.normal(size=(3, length)) * 2.0 ** rng.integers(-40, 40, (3, length))
        got = pairwise_sum(torch.from_numpy(values).movedim(-1, 0))
        np.testing.assert_array_equal(got.numpy(), norms.hidden_sum(values), f"hidden {length}")


NAMES = ["embedding.weight", "mix.weight", "mix.bias"]  # the head is tied
STEPS = 6

Row = dict[str, np.ndarray[Any, Any]]


def wide(tensor: Any) -> np.ndarray[Any, Any]:
    copied: np.ndarray[Any, Any] = tensor.detach().double().numpy().copy()
    return copied


def expected(before: list[Any], now: list[Any], raw: list[Any], used: list[Any]) -> list[Row]:
    """One mapping for each parameter, in the same float64 arithmetic whatever its type."""
    rows = []
    for old, new, gradient, consumed in zip(before, now, raw, used, strict=True):
        row: dict[str, Any] = dict.fromkeys(MODEL, np.nan)
        row["param_norm"] = np.linalg.norm(new)
        if gradient is not None:
            asked = consumed != 0
            row["param_grad_norm"] = np.linalg.norm(gradient)
            row["param_update_norm"] = np.linalg.norm(new - old)
            if asked.any():
                row["param_update_lost"] = (asked & (new == old)).sum() / asked.sum()
        rows.append(row)
    return rows


ADAMW = partial(torch.optim.AdamW, lr=0.003)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [(ADAMW, torch.bfloat16), (SGD, torch.float32), (ADAMW, torch.float64)]
)
def test_every_value_of_every_parameter_is_recorded(
    optimizer: Any, dtype: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = TinyModel(dtype)
    model.frozen = torch.nn.Parameter(torch.full((3,), 2.0, dtype=dtype), requires_grad=False)
    model.unused = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))  # never gets a gradient
    model.zeros = torch.nn.Parameter(torch.zeros(2, dtype=dtype))  # gets one of zeros
    parameters = list(model.parameters())
    assert [name for name, _ in model.named_parameters()] == ["frozen", "unused", "zeros", *NAMES]
    made = optimizer([p for p in parameters if p.requires_grad])
    rows = [expected([wide(p) for p in parameters], [wide(p) for p in parameters],
                     [None] * 6, [None] * 6)]  # fmt: skip
    with capture(model, made, tmp_path / "run.zarr", variables="norms", max_grad_norm=0.5) as run:
        for batch in batches(STEPS):
            made.zero_grad()
            before = [wide(p) for p in parameters]
            loss = model(**batch)["loss"] + (0 * model.zeros).sum()
            loss.backward()
            run.observe(loss=loss)
            raw = [None if p.grad is None else wide(p.grad) for p in parameters]
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            used = [None if p.grad is None else wide(p.grad) for p in parameters]
            made.step()
            rows.append(expected(before, [wide(p) for p in parameters], raw, used))
    ds = xr.open_zarr(tmp_path / "run.zarr", chunks=None)
    assert ds.parameter.values.tolist() == ["frozen", "unused", "zeros", *NAMES]
    # The change is formed in the parameters' own type.
    close = {"param_update_norm": 1e-3 if dtype == torch.bfloat16 else 1e-6}
    for name in MODEL:
        wanted = np.array([[of[name] for of in row] for row in rows])
        np.testing.assert_allclose(ds[name], wanted, rtol=close.get(name, 1e-6), atol=0)
        assert ds[name].dims == ("step", "parameter")
        assert ds[name].dtype == np.float32
    lost = ds.param_update_lost.sel(parameter=NAMES).values[1:]
    assert (lost > 0).any() == (dtype == torch.bfloat16)


run_of = partial(tiny_run, dtype=torch.bfloat16, count=STEPS, clip=0)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_without_a_learning_rate_no_update_was_meant(kind: Any, tiny: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=kind(0.0))
    with capture(tiny, optimizer, tmp_path / "run.zarr", variables="norms"):
        for number, _ in enumerate(steps(tiny, optimizer, 2)):  # as warming up begins
            optimizer.param_groups[0]["lr"] = kind(float(number))
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    assert np.isnan(ds.param_update_lost[1]).all()
    np.testing.assert_array_equal(ds.param_update_norm[1], 0)
    np.testing.assert_array_equal(ds.param_update_lost[-1], 0)


def test_norms_are_recorded_if_named(tmp_path: Path) -> None:
    ds = open_run(run_of(tmp_path / "some.zarr", variables="W,param_norm,param_grad_norm"))
    assert [name for name in MODEL if name in ds] == ["param_grad_norm", "param_norm"]
    assert "parameter" not in open_run(run_of(tmp_path / "none.zarr", variables="W,loss"))
