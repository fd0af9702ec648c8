"""Selections of an axis that is divided into parts, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.codec.array_selection import divide_axis, outer_positions, positions

LENGTH = 23


def ranges() -> st.SearchStrategy[range]:
    return st.slices(LENGTH).map(lambda item: range(*item.indices(LENGTH))).filter(len)


def arrays() -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=9).map(np.array)


@settings(deadline=None)
@given(ranges() | arrays(), st.integers(1, LENGTH + 3))
def test_picks_bring_each_position_to_its_place(wanted: Any, part: int) -> None:
    axis = np.arange(100, 100 + LENGTH)
    out = np.zeros(len(wanted), int)
    found = divide_axis(wanted, part)
    assert sorted(found) == sorted({int(position) // part for position in wanted})
    for number, pick in found.items():
        held = axis[number * part : (number + 1) * part][pick.window]
        assert len(held) == pick.window.stop - pick.window.start > 0
        out[pick.place] = held if pick.taken is None else held[pick.taken]
        # The window is no larger than it must be.
        taken = np.arange(len(held)) if pick.taken is None else pick.taken
        assert taken.min() == 0
        assert taken.max() == len(held) - 1
        assert len(positions(pick.place)) == len(taken)
    assert (out == axis[np.asarray(wanted)]).all()


def test_consecutive_rows_are_taken_by_slices() -> None:
    for wanted in (range(3, 9), np.arange(3, 9)):
        found = divide_axis(wanted, 4)
        assert {number: (pick.window, pick.place) for number, pick in found.items()} == {
            0: (slice(3, 4), slice(0, 1)),
            1: (slice(0, 4), slice(1, 5)),
            2: (slice(0, 1), slice(5, 6)),
        }
        assert all(pick.taken is None for pick in found.values())


SHAPE = (7, 5, 4)


@pytest.mark.parametrize(
    "key",
    [
        (np.array([0, 3]), np.array([1, 2]), slice(None)),
        (np.array([0, 3]), np.array([1, 2]), np.array([0, 0])),
        (np.array([[0], [3]]), np.array([[1, 2]]), slice(None)),
        (np.array([[0, 3]]), slice(None), 1),
        (np.array(2), slice(None), 1),
        (np.array([True] * 7), np.array([False] * 5), slice(None)),
    ],
)
def test_points_are_left_to_numpy(key: tuple[Any, ...]) -> None:
    assert outer_positions(key, SHAPE) is None
