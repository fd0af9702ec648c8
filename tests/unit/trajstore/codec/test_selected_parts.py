"""Selections of an axis that is divided into parts, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.codec.selected_parts import outer_positions, picks, positions

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
    found = picks(wanted, part)
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
        found = picks(wanted, 4)
        assert {number: (pick.window, pick.place) for number, pick in found.items()} == {
            0: (slice(3, 4), slice(0, 1)),
            1: (slice(0, 4), slice(1, 5)),
            2: (slice(0, 1), slice(5, 6)),
        }
        assert all(pick.taken is None for pick in found.values())


SHAPE = (7, 5, 4)


def item(length: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.integers(0, length - 1), st.slices(length))


def one_array(length: int) -> st.SearchStrategy[np.ndarray]:
    positions_of = st.lists(st.integers(0, length - 1), max_size=5).map(
        lambda at: np.array(at, np.intp)
    )
    masks = st.lists(st.booleans(), min_size=length, max_size=length).map(np.array)
    return positions_of | masks


@settings(deadline=None)
@given(st.data())
def test_axes_by_themselves_are_what_numpy_selects(data: st.DataObject) -> None:
    """Integers, slices, and one array among them."""
    key = [data.draw(item(length)) for length in SHAPE]
    axis = data.draw(st.none() | st.integers(0, 2))
    if axis is not None:
        key[axis] = data.draw(one_array(SHAPE[axis]))
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    found = outer_positions(key, SHAPE)
    assert found is not None
    along, shape = found
    expected = values
    for at in reversed(range(3)):  # NumPy would put the axis of an array first, beside integers
        expected = expected[(slice(None),) * at + (key[at],)]
    assert shape == expected.shape
    mesh = np.ix_(*(np.array(axis, np.intp) for axis in along))
    assert np.array_equal(values[mesh].reshape(shape), expected)


@settings(deadline=None)
@given(st.tuples(*(st.lists(st.integers(0, n - 1), min_size=1, max_size=4) for n in SHAPE)))
def test_a_mesh_is_each_axis_by_itself(key: tuple[list[int], ...]) -> None:
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    mesh = np.ix_(*key)
    found = outer_positions(mesh, SHAPE)
    assert found is not None
    along, shape = found
    assert [list(axis) for axis in along] == list(map(list, key))
    assert shape == values[mesh].shape


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
