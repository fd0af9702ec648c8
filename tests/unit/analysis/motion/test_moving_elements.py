from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import VariableNotRecorded


def last_moves_of(W: np.ndarray, steps: np.ndarray) -> list[tuple[int, int, int, float]]:
    """Facts about each token, from loops over its rows and elements."""
    found = []
    for token in range(W.shape[1]):
        last = (-1, -1, 0, np.nan)
        for row in range(1, len(W)):
            before, after = W[row - 1, token], W[row, token]
            moved = [
                number
                for number, (old, new) in enumerate(zip(before, after, strict=True))
                if old.tobytes() != new.tobytes() and not old == new == 0
            ]
            if moved:
                size = np.abs(before.astype(np.float64))
                finite = [number for number in moved if np.isfinite(size[number])]
                element = min(finite, key=lambda number: size[number]) if finite else moved[0]
                last = (steps[row], element, len(moved), size[element])
        found.append(last)
    return found


def check(ds: xr.Dataset) -> None:
    got = analysis.last_moving_element(ds).compute()
    expected = last_moves_of(ds.W.transpose("step", "token", "hidden").values, ds.step.values)
    names = ("last_motion", "last_moving_element", "moving_elements", "last_moving_size")
    for name, values in zip(names, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(got[name], values, err_msg=name)


@pytest.mark.parametrize("spread", [1, 2], ids=["every step", "growing gaps"])
def test_against_a_walk_through_the_elements(bits, chunks, spread, make_run):
    steps = np.arange(len(bits)) ** spread
    ds = make_run(bits, steps=steps, chunks=chunks)
    check(ds)
    rest = analysis.freeze(ds).last_motion
    xr.testing.assert_identical(analysis.last_moving_element(ds).last_motion, rest)


def test_ties_go_to_the_smallest_and_then_the_first_element(make_run):
    W = np.zeros((4, 5, 3), np.float32)
    W[:, 0] = [[4, 1, 2], [4, 1, 2], [5, 1, 3], [5, 1, 3]]
    W[:, 1] = [[1, -1, 1], [2, -2, 1], [2, -2, 1], [2, -2, 1]]
    W[:, 2] = [[0, 0, 0], [-0.0, 0, 0], [0, 0, 0], [0, -0.0, 0]]  # no motion
    W[:, 3] = [[np.nan, np.inf, 1], [np.nan, 3, 1], [2, 3, 1], [2, 3, 1]]
    W[:, 4] = [[9, 8, 7], [9, 8, 7], [9, 8, 7], [9, 8, 6]]
    ds = make_run(W, native="float32")
    check(ds)
    found = analysis.last_moving_element(ds)
    assert found.last_moving_element.values.tolist() == [2, 0, -1, 0, 2]
    assert found.moving_elements.values.tolist() == [2, 2, 0, 1, 1]


def test_on_another_lattice_it_is_of_the_rounded_values(make_run, walk):
    ds = make_run(walk(12, 5, 4).astype("f4") * 1e-3, native="float32")
    rounded = ds.assign(W=ds.W.astype(np.float16).astype(np.float32))
    got = analysis.last_moving_element(ds, "float16").drop_attrs()
    xr.testing.assert_equal(got, analysis.last_moving_element(rounded).drop_attrs())
    with pytest.raises(VariableNotRecorded, match="W"):
        analysis.last_moving_element(ds.rename(W="delta"))
