"""Durations, as people read them."""

from __future__ import annotations

import pytest

from trajstore.arguments import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"), (0, "0 s"), (0.0042, "4.2 ms"), (0.5, "500 ms"), (0.9999, "1.0 s"),
        (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"), (140, "2 min 20 s"), (3599.7, "1 h"),
        (3720, "1 h 2 min"), (86_399.9, "1 d"), (360_000, "4 d 4 h"),
    ],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
