from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from trajstore.store.storage.atomic import exchange, leftovers, link_or_copy, put, sweep


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


def test_two_folders_change_places_at_once(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    if not exchange(one, other):
        pytest.skip("this file system knows no exchange of two names (renameat2)")
    assert (one / "name").read_text() == "other"
    assert (other / "name").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "gone")


def test_only_what_the_dead_have_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    run = tmp_path / "a.h5"
    file, folder = (tmp_path / f".a.h5.{dead.pid}{end}" for end in (".partial", ".old"))
    file.write_text("x")
    folder.mkdir()
    (folder / "x").write_text("x")
    own = tmp_path / f".a.h5.{os.getpid()}.partial"
    kept = [tmp_path / name for name in (f".a.h5.{os.getppid()}.partial", ".b.h5.1.partial")]
    for path in (own, *kept):
        path.write_text("x")
    assert sorted(leftovers(run)) == sorted([file, folder])
    assert sorted(sweep(run)) == sorted([file, folder, own])
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_linked_object_is_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    link_or_copy(source, tmp_path / "plain")
    assert flushed == []
    link_or_copy(source, tmp_path / "flushed", fsync=True)
    assert flushed == [source.stat().st_ino, tmp_path.stat().st_ino]
