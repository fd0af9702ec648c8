"""The compiled loop gives the bits of NumPy, except for the sign of NaN."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore import compiled_loop
from trajstore.analysis.optimizer import moments
from trajstore.compiled_loop import CompiledLoop
from trajstore.values.optimizer_rule import MOMENTS

pytest.importorskip("numba")


def followed(moment, before, gradient, taken, monkeypatch, *, compiled):
    made = []

    class Spy(CompiledLoop):
        def run(self, *arguments):
            made.append(compiled and super().run(*arguments))
            return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(compiled_loop, "_ENOUGH", 0)
        patch.setattr(moments, "_LOOP", Spy(moments.__name__, "follow_rows"))
        out = np.full(gradient.shape, -1.0)
        betas = np.linspace(0.9, 0.999, len(gradient))
        moments.follow(moment, betas, before, gradient, taken, out)
    return out, any(made)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 5), (16, 300, 64)], ids=str)
def test_the_compiled_recurrence_equals_that_of_numpy(moment, dtype, shape, monkeypatch):
    rng = np.random.default_rng(1)
    gradient = rng.standard_normal(shape).astype(dtype)
    gradient[rng.random(shape) < 0.01] = np.nan
    gradient[rng.random(shape) < 0.01] = -np.inf
    gradient[rng.random(shape) < 0.01] = np.finfo(dtype).smallest_subnormal
    before = rng.standard_normal(shape[1:])
    for taken in (np.ones(shape[0], bool), np.zeros(shape[0], bool), rng.random(shape[0]) < 0.6):
        arguments = moment, before, gradient, taken, monkeypatch
        expected, by_loop = followed(*arguments, compiled=False)
        assert not by_loop
        got, by_loop = followed(*arguments, compiled=True)
        assert by_loop
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))


def test_where_its_arrays_lie_does_not_matter(monkeypatch):
    rng = np.random.default_rng(1)
    around = rng.standard_normal((5, 12, 6)).astype("f4")
    before = np.broadcast_to(np.zeros(()), (7, 6))  # as dask's zeros come
    taken = np.array([False, True, True, False, True])[::-1]
    read_only = around[:, 3:10].copy()
    read_only.flags.writeable = False
    for gradient, expected in (
        (around[:, 3:10], True),
        (read_only, True),
        (around[:, 3:10].astype(">f4"), False),
        (around[:, 3:10].astype("f2"), False),
        (np.asfortranarray(around)[:, 3:10], False),
        (around[::-1, 3:10], False),
    ):
        arguments = "exp_avg_sq", before, gradient, taken, monkeypatch
        want, _ = followed(*arguments, compiled=False)
        got, by_loop = followed(*arguments, compiled=True)
        assert by_loop == expected
        np.testing.assert_array_equal(got, want)
