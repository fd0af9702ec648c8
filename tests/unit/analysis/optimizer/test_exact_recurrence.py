"""The compiled loop gives the bits of NumPy, except for the sign of NaN."""

from __future__ import annotations

import numpy as np
import pytest
from bits_and_calls import nightly_but

from trajstore.analysis.optimizer import moments
from trajstore.threads import CompiledLoop
from trajstore.values.optimizer_rule import MOMENTS

pytest.importorskip("numba")


class SpiedLoop(CompiledLoop):
    """A loop that is worth it for any size, and notes if it ran."""

    def __init__(self, *, compiled):
        super().__init__(moments.__name__, "follow_rows")
        self.compiled, self.has_run = compiled, False

    def is_worth(self, count):
        return True

    def run(self, *arguments):
        self.has_run = self.compiled and super().run(*arguments)
        return self.has_run


def follow(moment, before, gradient, taken, *, compiled):
    """The moment after each step, and whether the compiled loop computed it."""
    out, loop = np.full(gradient.shape, -1.0), SpiedLoop(compiled=compiled)
    betas = np.linspace(0.9, 0.999, len(gradient))
    moments.follow(moment, betas, before, gradient, taken, out, loop)
    return out, loop.has_run


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("dtype", nightly_but(["float32", "float64"], "float32"))
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 5), (16, 300, 64)], ids=str)
def test_the_compiled_recurrence_equals_that_of_numpy(moment, dtype, shape):
    rng = np.random.default_rng(1)
    gradient = rng.standard_normal(shape).astype(dtype)
    gradient[rng.random(shape) < 0.01] = np.nan
    gradient[rng.random(shape) < 0.01] = -np.inf
    gradient[rng.random(shape) < 0.01] = np.finfo(dtype).smallest_subnormal
    before = rng.standard_normal(shape[1:])
    for taken in (np.ones(shape[0], bool), np.zeros(shape[0], bool), rng.random(shape[0]) < 0.6):
        arguments = moment, before, gradient, taken
        expected, by_loop = follow(*arguments, compiled=False)
        assert not by_loop
        got, by_loop = follow(*arguments, compiled=True)
        assert by_loop
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))


def test_where_its_arrays_lie_does_not_matter():
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
        arguments = "exp_avg_sq", before, gradient, taken
        want, _ = follow(*arguments, compiled=False)
        got, by_loop = follow(*arguments, compiled=True)
        assert by_loop == expected
        np.testing.assert_array_equal(got, want)
