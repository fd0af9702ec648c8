"""The compiled loops give the bits of the prediction in NumPy, also of extreme values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

numba = pytest.importorskip("numba")

from trajstore.codec import predicted_rows  # noqa: E402
from trajstore.codec.predicted_rows import coefficients_and_differences, decode_rows  # noqa: E402
from trajstore.threads import CompiledLoop  # noqa: E402
from trajstore.values.native_types import (  # noqa: E402
    NATIVE_TYPES,
    NativeType,
    cast,
    narrow,
)

Array = npt.NDArray[np.unsignedinteger]


def gradients(native: NativeType, tokens: int, hidden: int) -> Array:
    """Rows of low rank with noise; and of zeros, extreme numbers, and any bits."""
    rng = np.random.default_rng(1)
    rows = []
    for rank in (1, 3, 6, 2, 2, 2):
        directions = rng.standard_normal((rank, hidden))
        directions *= 4.0 ** -np.arange(rank)[:, None]
        noise = 1e-3 * rng.standard_normal((tokens, hidden))
        rows.append(rng.standard_normal((tokens, rank)) @ directions + noise)
    rows[3] *= 1e-38
    rows[4] *= np.where(np.arange(tokens) == tokens // 2, 1e38, 1)[:, None]
    rows[5] *= 1e37
    rows.append(np.zeros((tokens, hidden)))
    bits = narrow(cast(np.clip(rows, -3e38, 3e38), native.name), native)
    some = rng.integers(0, 2 ** (8 * native.itemsize), (1, tokens, hidden)).astype(native.bits)
    return np.concatenate([bits, some])


LOOPS = {"_ENCODING": "terms_and_differences", "_DECODING": "decoded_rows"}


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "compiled_loops"),
    [
        ("bfloat16", 130, 3, {"_DECODING"}),
        # That of the encoder is compiled for many seconds.
        pytest.param("bfloat16", 250, 64, {*LOOPS}, marks=pytest.mark.nightly),
        pytest.param("float32", 7, 5, {*LOOPS}, marks=pytest.mark.nightly),
    ],
)
def test_the_loops_give_the_bits_of_numpy(
    name: str,
    tokens: int,
    hidden: int,
    compiled_loops: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = NATIVE_TYPES[name]
    bits = gradients(native, tokens, hidden)
    made = []
    for compiled in (set(), compiled_loops):
        loops = {}
        for loop, function in LOOPS.items():
            fresh = CompiledLoop("trajstore.codec.prediction_loop", function)
            is_compiled = loop in compiled
            monkeypatch.setattr(fresh, "is_worth", lambda count, found=is_compiled: found)
            monkeypatch.setattr(predicted_rows, loop, fresh)
            loops[loop] = fresh
        found = coefficients_and_differences(bits, native)
        assert found is not None
        made.append([each.copy() for each in found])
        decoded = np.empty_like(bits)
        decode_rows(*made[-1], native, decoded)
        np.testing.assert_array_equal(decoded, bits)
        assert all(loops[loop]._ready for loop in compiled)
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)
