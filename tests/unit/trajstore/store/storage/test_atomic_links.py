from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trajstore import RunWriter, open_run, repair, verify
from trajstore.errors import FormatError
from trajstore.store.writing.create import annotate_run

SmallRun = tuple[Path, dict[str, Any]]


@pytest.fixture
def linked(small_run: SmallRun, tmp_path: Path) -> Path:
    """A run whose W lies elsewhere, with what is somebody else's beside its shards."""
    elsewhere = tmp_path / "elsewhere"
    (small_run[0] / "W").rename(elsewhere)
    (small_run[0] / "W").symlink_to(elsewhere)
    (elsewhere / "c.9.0.0").write_text("mine")
    (elsewhere / ".mine.1.partial").write_text("mine")
    return small_run[0]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_link_is_read_through_and_named(linked: Path) -> None:
    found = verify(linked)
    assert found.clean
    assert any(note.startswith("W is a link to ") for note in found.notes)
    assert open_run(linked).W.values.size


@pytest.mark.parametrize(
    "write",
    [
        repair,
        lambda run: RunWriter.resume(run).close(),
        lambda run: annotate_run(run, token_text=["x"] * 10),
    ],
    ids=["repair", "resume", "annotate"],
)
def test_nothing_is_written_or_removed_through_a_link(
    linked: Path, write: Callable[[Path], Any]
) -> None:
    elsewhere = linked.parent / "elsewhere"
    before, listed = _files(elsewhere), sorted(os.listdir(linked.parent))
    with pytest.raises(FormatError, match=r"W is a link to .*runs with links are not changed"):
        write(linked)
    assert _files(elsewhere) == before
    assert sorted(os.listdir(linked.parent)) == listed


def test_a_run_that_is_replaced_takes_only_its_link_away(linked: Path) -> None:
    before = _files(linked.parent / "elsewhere")
    RunWriter.create(
        linked, token=range(3), hidden=2, variables={"W": "float32"}, overwrite=True
    ).close()
    assert _files(linked.parent / "elsewhere") == before


def test_a_shard_that_is_a_link_is_named(small_run: SmallRun, tmp_path: Path) -> None:
    shard = next(path for path in sorted((small_run[0] / "W").iterdir()) if path.name[0] == "c")
    shard.rename(tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    assert any(note.startswith(f"{shard.name} is a link to") for note in verify(small_run[0]).notes)
