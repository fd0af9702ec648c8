from __future__ import annotations

import os
from pathlib import Path

import pytest

from trajstore.strict_json import changes, metadata_bytes, parse, same


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "a name occurs twice"),
        ("[NaN]", "NaN is not a JSON value"),
        ('{"a": -Infinity}', "-Infinity is not a JSON value"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_what_json_does_not_allow_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_values_are_the_same_only_with_their_types() -> None:
    assert same({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    assert not same(1, 1.0)
    assert not same(1, True)


def test_differences_are_named_by_their_place() -> None:
    one = {"a": 1, "codecs": [{"name": "x"}, {"name": "y"}], "gone": 0}
    other = {"a": 1, "codecs": [{"name": "z"}, {"name": "y"}], "new": 0}
    assert [place for place, *_ in changes(one, other)] == ["codecs.0.name", "gone", "new"]
    assert changes(one, one) == []
    assert changes({"a": [1, 2]}, {"a": [1]}) == [("a", [1, 2], [1])]


def test_metadata_have_a_largest_size(tmp_path: Path) -> None:
    metadata = tmp_path / "zarr.json"
    metadata.write_text("{}")
    assert metadata_bytes(metadata) == b"{}"
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse("[" * 101 + "]" * 101)
    assert parse("[" * 100 + "]" * 100)
    os.truncate(metadata, 1 << 40)  # a sparse file
    with pytest.raises(ValueError, match="at most 16,777,216"):
        metadata_bytes(metadata)
    metadata.unlink()
    os.mkfifo(metadata)
    with pytest.raises(ValueError, match="not a regular file"):
        metadata_bytes(metadata)
