from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trajstore.store.atomic import put


def test_an_object_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "object"
    assert put(target, [b"one"]) == 3
    assert put(target, [b"tw", b"o"]) == 3
    assert target.read_bytes() == b"two"
    assert [path.name for path in target.parent.iterdir()] == ["object"]


def test_a_folder_that_has_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        put(tmp_path / "gone" / "object", [b"one"])
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_object_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "object"
    put(target, [b"old"])

    def failing() -> Iterator[bytes]:
        yield b"new"
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        put(target, failing())
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["object"]
