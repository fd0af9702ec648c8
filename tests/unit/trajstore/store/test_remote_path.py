"""Addresses: what is like a path, and the requests that are conditional."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from object_stores import faulty, s3_server, to_s3

from trajstore.store.object_file import opened
from trajstore.store.remote_path import RemotePath, local_file, location

pytest.importorskip("obstore")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> RemotePath:
    found = location(f"memory://paths/{request.node.name}/run.zarr/")
    assert isinstance(found, RemotePath)
    return found


def test_parts_of_an_address() -> None:
    path = location("s3://bucket/a/b.zarr")
    assert str(path) == "s3://bucket/a/b.zarr"
    assert (path.name, str(path.parent), str(path.with_name(".b"))) == (
        "b.zarr",
        "s3://bucket/a",
        "s3://bucket/a/.b",
    )
    assert str(path / "W/c.0" / "x") == "s3://bucket/a/b.zarr/W/c.0/x"
    assert location(path) is path
    assert location("a/b") == Path("a/b")


def test_an_address_is_no_path() -> None:
    """A `Path` of one would be a folder ``s3:``."""
    with pytest.raises(TypeError):
        Path(location("s3://bucket/run.zarr"))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        os.fspath(location("s3://bucket/run.zarr"))  # type: ignore[arg-type]


def test_objects(place: RemotePath) -> None:
    assert not place.exists()
    assert place.stat() is None
    (place / "zarr.json").write_bytes(b"root")
    (place / "W/c.0").write_bytes(b"0123456789")
    place.with_name("run.zarr2").write_bytes(b"another")
    assert place.exists()
    assert place.is_dir()
    assert [path.name for path in place.iterdir()] == ["W", "zarr.json"]
    assert place.below() == {place / "W/c.0": 10, place / "zarr.json": 4}
    chunk = place / "W/c.0"
    assert chunk.read_end(3) == b"789"
    assert chunk.read_end(99) == b"0123456789"
    with opened(chunk) as file:
        assert (file.end(2), file.read(3, 4), file.read(8, 9)) == (b"89", b"3456", b"89")
    with local_file(chunk) as local:
        assert local.read_bytes() == b"0123456789"
    assert not local.exists()
    chunk.unlink()
    chunk.unlink()
    with pytest.raises(FileNotFoundError):
        chunk.read_bytes()
    place.remove_below()
    assert not place.exists()
    assert place.with_name("run.zarr2").exists()


def test_conditions(place: RemotePath) -> None:
    first = place.write_bytes(b"one", new=True)
    with pytest.raises(FileExistsError):
        place.write_bytes(b"two", new=True)
    second = place.write_bytes(b"two", instead_of=first)
    with pytest.raises(FileExistsError):
        place.write_bytes(b"three", instead_of=first)
    place.write_bytes(b"three", instead_of=second)
    assert place.read_bytes() == b"three"


def test_a_condition_whose_answer_was_lost_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is carried out, and refused when it is tried again."""
    lost = iter(["lose"])

    def fault(method: str, path: str, number: int) -> str | None:
        return next(lost, None) if method == "PUT" else None

    with s3_server() as s3, faulty(s3, fault) as (address, seen), to_s3(address, monkeypatch):
        place = location("s3://bucket/object")
        assert isinstance(place, RemotePath)
        tag = place.write_bytes(b"one", new=True)
        assert place.write_bytes(b"two", instead_of=tag) != tag
    assert sum(request.startswith("PUT") for request in seen) == 3
