"""Sizes and durations, as people read and type them."""

from __future__ import annotations

from typing import Any

import pytest

from trajstore.errors import InvalidArgument
from trajstore.units import format_bytes, format_duration, parse_bytes


def test_sizes_are_read_and_printed() -> None:
    sizes = {"1GiB": 1 << 30, "1.5 MiB": 3 << 19, "8MB": 8_000_000, "77": 77, "1kib": 1024}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    assert [format_bytes(size) for size in (1536, 0, 5 << 30)] == ["1.5 KiB", "0 B", "5 GiB"]


@pytest.mark.parametrize("text", [1.5, "GiB", "-1GiB", "1 apple", "inf"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgument, match="got size"):
        parse_bytes(text)


def test_a_duration_has_its_two_largest_units() -> None:
    texts = {
        -3: "0 s", 0: "0 s", 0.0042: "4.2 ms", 0.5: "500 ms", 0.9999: "1.0 s", 9.96: "10 s",
        59.4: "59 s", 59.6: "1 min", 140: "2 min 20 s", 3599.7: "1 h", 3720: "1 h 2 min",
        86_399.9: "1 d", 360_000: "4 d 4 h",
    }  # fmt: skip
    assert {seconds: format_duration(seconds) for seconds in texts} == texts
