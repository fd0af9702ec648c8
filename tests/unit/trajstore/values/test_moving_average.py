from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.norms import MovingAverage, every_normal_value, share_left


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)]
)
def test_every_value_is_every_positive_normal_finite_one(name: str, dtype: type) -> None:
    with np.errstate(all="ignore"):
        all_bits = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    expected = all_bits[np.isfinite(all_bits) & (all_bits >= least)]
    np.testing.assert_array_equal(np.concatenate([*every_normal_value(name)]), np.sort(expected))


def test_float32_is_covered_by_one_power_of_two() -> None:
    parts = [*every_normal_value("float32")]
    assert sum(part.size for part in parts) == 1 << 23
    assert parts[0][0] == 1
    assert parts[-1][-1] == np.nextafter(np.float32(2), np.float32(1))
    with pytest.raises(InvalidArgument, match="float64 has too many"):
        next(every_normal_value("float64"))


@pytest.mark.parametrize(
    ("beta", "share"), [(0.999, 1.0), (0.998, 0.9532), (0.997, 0.2969), (0.996, 0.0)]
)
def test_the_share_of_bfloat16_values_that_cannot_decay(beta: float, share: float) -> None:
    average = MovingAverage(native="bfloat16", beta=beta, form="product")
    assert share_left(average, 0) == pytest.approx(share, abs=1e-4)


def test_finer_types_and_smaller_betas_decay() -> None:
    for native, beta, form in (
        ("bfloat16", 0.9, "lerp"), ("bfloat16", 0.0, "lerp"), ("bfloat16", 0.99, "once"),
        ("float16", 0.999, "product"), ("float32", 0.999, "product"), ("float32", 0.999999, "once"),
    ):  # fmt: skip
        average = MovingAverage(native=native, beta=beta, form=form)
        assert share_left(average, 0) == share_left(average, 2) == 0


def test_float32_also_stops_changing_and_the_shortcut_is_right() -> None:
    assert share_left(MovingAverage(native="float32", beta=1 - 1e-8, form="product"), 0) == 1
    # Some values remain unchanged only for a step below four spacings.
    values = np.concatenate([*every_normal_value("float32")][:8])
    for form in ("lerp", "product", "once"):
        average = MovingAverage(native="float32", beta=1 - 2.0**-20, form=form)
        for target in (np.zeros_like(values), 2 * values):
            assert (average.after(values, target) != values).all()


def test_growth_is_measured_where_the_double_is_finite() -> None:
    average = MovingAverage(native="bfloat16", beta=0.999, form="once")
    assert share_left(average, 2) == 1
    average = MovingAverage(native="bfloat16", beta=0.999, form="product")
    assert 0.95 < share_left(average, 2) < 0.97
