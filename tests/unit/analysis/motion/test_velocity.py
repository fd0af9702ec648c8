from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def irregular(bits):
    return np.cumsum(1 + np.arange(len(bits)) % 4)


def test_velocity(bits, chunks, irregular, make_run):
    ds = make_run(bits, steps=irregular, chunks=chunks)
    with np.errstate(all="ignore"):
        expected = np.diff(ds.W.values.astype(np.float64), axis=0)
        expected /= np.diff(irregular)[:, None, None]
        expected = expected.astype(np.float32)
    got = analysis.velocity(ds)
    np.testing.assert_array_equal(got, expected)
    assert got.attrs["units"] == "1 per step"
    assert got.step.values.tolist() == irregular[1:].tolist()


def test_speed_is_the_length_of_the_velocity(bits, chunks, irregular, make_run):
    ds = make_run(bits, steps=irregular, chunks=chunks)
    with np.errstate(all="ignore"):
        ways = np.diff(ds.W.values.astype(np.float64), axis=0) / np.diff(irregular)[:, None, None]
        expected = np.sqrt((ways**2).sum(-1))
    got = analysis.speed(ds).values
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected.astype(np.float32), rtol=3e-7)


def test_acceleration_is_the_difference_of_velocities(bits, chunks, irregular, make_run):
    ds = make_run(bits, steps=irregular, chunks=chunks)
    with np.errstate(all="ignore"):
        velocity = np.diff(ds.W.values.astype(np.float64), axis=0)
        velocity /= np.diff(irregular)[:, None, None]
        expected = np.diff(velocity, axis=0).astype(np.float32)
    got = analysis.acceleration(ds)
    np.testing.assert_array_equal(got, expected)
    assert got.step.values.tolist() == irregular[2:].tolist()


def test_no_rows_have_no_motion(make_run, walk):
    ds = make_run(walk(3, 2, 2)).isel(step=slice(0, 0))
    with pytest.raises(InvalidArgument, match="at least 1 row"):
        analysis.speed(ds)
