"""Labels of rows: steps, and counts of callbacks."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore.errors import FormatError
from trajstore.exchange.file_rows import checked_labels, true_steps


def callback_labels(steps: int, epoch: int) -> np.ndarray:
    """Labels of a counter that also counts the end of each epoch."""
    labels, counter = [0], 1
    for step in range(1, steps + 1):
        labels.append(counter)
        counter += 1
        if step % epoch == 0:
            counter += 1
    return np.array(labels)


@pytest.mark.parametrize("epoch", [1, 3, 4, 7, 10, 8306])
@pytest.mark.parametrize("steps", [11, 12, 10_000])
def test_callback_counts_become_steps(steps: int, epoch: int) -> None:
    labels = callback_labels(steps, epoch)
    found, note = true_steps(labels)
    assert found.tolist() == list(range(steps + 1))
    assert (note is None) == (epoch >= steps)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 2, 3],
        [0, 10, 20],
        [0, 2, 4, 6],
        [5, 6, 8],
        [0, 1, 2, 5],
        [0, 1, 2, 4, 5, 7, 8, 9, 10],
    ],
)
def test_other_labels_are_taken_as_they_are(labels: list[int]) -> None:
    found, note = true_steps(np.array(labels))
    assert found.tolist() == labels
    assert note is None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0, 1], "f: at holds 0 after 0 in row 1"),
        ([2, 1], "f: at holds 1 after 2 in row 1"),
        ([-1, 0], "f: at holds -1 in row 0"),
        ([0, 1 << 62], "f: at holds 4611686018427387904 after 0 in row 1"),
    ],
)
def test_impossible_labels_are_refused(labels: list[int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        checked_labels("f", "at", np.array(labels))


def test_the_largest_labels_of_64_bits_do_not_overflow() -> None:
    with pytest.raises(FormatError, match="18446744073709551615 after 0 in row 1"):
        checked_labels("f", "at", np.array([0, (1 << 64) - 1], np.uint64))
