from __future__ import annotations

import pytest

from trajstore.watching.measures import RecordingPace


def test_rows_and_steps_are_counted_apart_and_the_time_since_the_commit_has_passed() -> None:
    pace = RecordingPace()
    pace.see(100, 5, 40)
    assert pace.rows_per_second is None
    assert pace.remaining(10, 100) is None
    pace.see(110, 10, 90)
    assert pace.rows_per_second == 0.5
    assert pace.remaining(190, 110) == 20
    assert pace.remaining(190, 115) == 15
    assert pace.remaining(190, 1000) == 0
    assert pace.remaining(None, 110) is None


def test_the_creation_counts_until_there_are_two_commits() -> None:
    pace = RecordingPace()
    pace.start(0)
    pace.see(100, 10, 9)
    assert pace.rows_per_second == 0.1
    pace.see(101, 20, 19)
    assert pace.rows_per_second == 10


def test_pace_is_that_of_the_last_commits_with_rows() -> None:
    pace = RecordingPace()
    for second in range(0, 1000, 10):
        pace.see(second, second, second)
    pace.see(1000, 2000, 2000)
    pace.see(1005, 2000, 2000)
    assert pace.rows_per_second == pytest.approx((2000 - 870) / 130)


def test_a_run_that_was_cut_begins_anew() -> None:
    pace = RecordingPace()
    pace.see(0, 100, 100)
    pace.see(10, 200, 200)
    pace.see(20, 150, 150)
    assert pace.rows_per_second is None
    pace.see(30, 160, 160)
    assert pace.rows_per_second == 1
