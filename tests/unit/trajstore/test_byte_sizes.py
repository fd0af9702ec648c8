from __future__ import annotations

from typing import Any

import pytest

from trajstore.arguments import format_bytes, parse_bytes
from trajstore.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("1.5 MiB", 3 << 19), ("8MB", 8_000_000), ("77", 77), ("1kib", 1024)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [1.5, "GiB", "-1GiB", "1 apple", "inf"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgument, match="got size"):
        parse_bytes(text)


def test_sizes_are_printed_in_the_largest_unit() -> None:
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(5 << 30) == "5 GiB"
