"""Objects that appear whole or not at all, leftovers of the dead, flushes, and links."""

from __future__ import annotations

import errno
import os
import posix
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from damage import contents
from disk import Disk, stand_in

from trajstore import RunWriter, open_run, repair, verify
from trajstore.errors import FormatError
from trajstore.store.storage.atomic import (
    exchange,
    flush,
    flush_tree,
    leftovers,
    make_folder,
    put,
    put_all,
    sweep,
)
from trajstore.store.writing.create import annotate_run


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
    run = tmp_path / "a[1].h5"  # a name is no pattern
    inside, mine = (run / "W" / name for name in (".c.0.0.0.7.partial", ".mine.partial"))
    inside.parent.mkdir(parents=True)
    file, folder = (tmp_path / f".{run.name}.{dead.pid}{end}" for end in (".partial", ".old"))
    file.write_text("x")
    folder.mkdir()
    (folder / "x").write_text("x")
    own = tmp_path / f".{run.name}.{os.getpid()}.partial"
    others = (f".{run.name}.{os.getppid()}", f".a1.h5.{dead.pid}", f".{run.name}.v2.{dead.pid}")
    kept = [tmp_path / f"{name}.partial" for name in others]
    for path in (own, inside, mine, *kept):
        path.write_text("x")
    assert sorted(leftovers(run)) == sorted([file, folder, inside])
    assert sorted(sweep(run)) == sorted([file, folder, own, inside])
    assert sorted(tmp_path.iterdir()) == sorted([run, *kept])
    assert list(inside.parent.iterdir()) == [mine]


def test_what_is_put_or_made_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    make_folder(tmp_path / "a" / "b")
    objects = [tmp_path / name for name in ("one", "a/b/two", "a/b/three")]
    put_all((path, [b"x"]) for path in objects)
    assert all(disk.survives(path, below=tmp_path) for path in objects)
    assert disk.flushes == 2 + 3 + 2  # folders that were made, data, and folders once each
    put(tmp_path / "one", [b"yy"], fsync=False)
    assert not disk.survives(tmp_path / "one")
    (tmp_path / "a" / "linked").hardlink_to(tmp_path / "one")
    assert not disk.survives(tmp_path / "a")
    flush_tree(tmp_path / "a")
    assert disk.survives(tmp_path / "a")
    assert [path.name for path in disk.early] == ["one"]


def test_threads_write_parts_in_order_and_a_failure_names_the_file(tmp_path: Path) -> None:
    parts = [bytes([number]) * (1 << number) for number in range(18)]

    def failing() -> Iterator[bytes]:
        yield from parts
        raise OSError(errno.ENOSPC, "No space left on device")  # which names no file

    with ThreadPoolExecutor(3) as writers:
        objects = [(tmp_path / "one", parts), (tmp_path / "none", [])]
        assert put_all(objects, writers=writers) == sum(map(len, parts))
        assert (tmp_path / "one").read_bytes() == b"".join(parts)
        assert (tmp_path / "none").read_bytes() == b""
        told = re.escape(f"No space left on device: '{tmp_path / 'two'}'")
        for among in (writers, None):  # a failure among many changes none
            objects = [(tmp_path / "one", [b"new"]), (tmp_path / "two", failing())]
            with pytest.raises(OSError, match=told):
                put_all(objects, writers=among)
        assert (tmp_path / "one").read_bytes() == b"".join(parts)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "none"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_only_folders_may_be_impossible_to_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems."""
    stand_in(monkeypatch, fsync=posix.fsync)  # other tests do not flush
    flush([Path("/proc/self")])
    with pytest.raises(OSError, match="Invalid argument: '/proc/self/status'"):
        flush([Path("/proc/self/status")])


SmallRun = tuple[Path, dict[str, Any]]


@pytest.fixture
def linked(small_run: SmallRun, tmp_path: Path) -> Path:
    """A run whose W, and a shard, lie elsewhere, with what is somebody else's beside its shards."""
    elsewhere = tmp_path / "elsewhere"
    (small_run[0] / "W").rename(elsewhere)
    (small_run[0] / "W").symlink_to(elsewhere)
    (elsewhere / "c.9.0.0").write_text("mine")
    (elsewhere / ".mine.1.partial").write_text("mine")
    shard = small_run[0] / "grad" / "c.0.0.0"
    shard.rename(tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    return small_run[0]


def test_a_link_is_read_through_and_nothing_is_written_through_it(linked: Path) -> None:
    elsewhere = linked.parent / "elsewhere"
    found = verify(linked)
    assert found.clean
    for name in ("W", "c.0.0.0"):
        assert any(note.startswith(f"{name} is a link to ") for note in found.notes)
    assert open_run(linked).W.values.size
    before, listed = contents(elsewhere), sorted(os.listdir(linked.parent))
    for write in (repair, RunWriter.resume, partial(annotate_run, token_text=["x"] * 10)):
        with pytest.raises(FormatError, match=r"W is a link to .*runs with links are not changed"):
            write(linked)
        assert (contents(elsewhere), sorted(os.listdir(linked.parent))) == (before, listed)
    RunWriter.create(
        linked, token=range(3), hidden=2, variables={"W": "float32"}, overwrite=True
    ).close()
    assert contents(elsewhere) == before
