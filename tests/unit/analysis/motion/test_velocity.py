from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument

pytestmark = pytest.mark.filterwarnings("error")


def test_motion_at_irregular_steps(bits, chunks, make_run):
    steps = np.cumsum(1 + np.arange(len(bits)) % 4)
    ds = make_run(bits, steps=steps, chunks=chunks)
    with np.errstate(all="ignore"):
        expected = np.diff(ds.W.values.astype(np.float64), axis=0) / np.diff(steps)[:, None, None]
        lengths = np.sqrt((expected**2).sum(-1)).astype(np.float32)
        changes = np.diff(expected, axis=0).astype(np.float32)
        velocity = analysis.velocity(ds)
        np.testing.assert_array_equal(velocity, expected.astype(np.float32))
    assert velocity.attrs["units"] == "1 per step"
    assert velocity.step.values.tolist() == steps[1:].tolist()
    speed = analysis.speed(ds).values
    assert speed.dtype == np.float32
    np.testing.assert_allclose(speed, lengths, rtol=3e-7)
    acceleration = analysis.acceleration(ds)
    np.testing.assert_array_equal(acceleration, changes)
    assert acceleration.step.values.tolist() == steps[2:].tolist()


def test_no_rows_have_no_motion(make_run, walk):
    ds = make_run(walk(3, 2, 2)).isel(step=slice(0, 0))
    with pytest.raises(InvalidArgument, match="at least 1 row"):
        analysis.speed(ds)
