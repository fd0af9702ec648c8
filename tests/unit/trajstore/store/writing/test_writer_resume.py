"""A run that is opened for more rows."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
import zarr
from bits_and_calls import random_bits
from crashing import BLOCK, HIDDEN, TOKENS, TYPES, create, row
from disk import Disk, objects_of

from trajstore import RunWriter, open_run, repair, verify
from trajstore.errors import FormatError, InvalidArgument, RunLocked, RunNotFound
from trajstore.exchange.export_run import branch_run
from trajstore.store.storage import atomic


def recorded(path: Path, rows: int, **options: Any) -> Path:
    with create(path, **options) as run:
        for step in range(rows):
            run.append(step, **row(step))
    return path


@pytest.fixture
def one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs have the same, so that their objects can be compared."""
    monkeypatch.setattr("trajstore.store.writing.new_run.new_identity", lambda: "5a" * 16)


@pytest.mark.usefixtures("one_identity")
@pytest.mark.parametrize("rows", [0, 3, 4, 11])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path: Path, rows: int) -> None:
    whole = recorded(tmp_path / "whole.zarr", 14)
    path = recorded(tmp_path / "cut.zarr", 11)
    with RunWriter.resume(path, rows=rows) as run:
        assert (run.rows, run.committed_rows) == (rows, rows)
        assert xr.open_zarr(path).attrs["status"] == "recording"
        for step in range(rows, 14):
            run.append(step, **row(step))
        assert run.bytes_recorded == 14 * (2 * TOKENS * HIDDEN * 2 + TOKENS * 4 + 4)
    assert objects_of(path) == objects_of(whole)
    ds, expected = xr.open_zarr(path), xr.open_zarr(whole)
    assert ds.attrs["status"] == "complete"
    assert ds.attrs["content_digest"] == expected.attrs["content_digest"]
    assert ds.attrs["created"] == json.loads((path / "step/zarr.json").read_bytes())["attributes"][
        "root_attributes"
    ].partition('"created": "')[2][:25]  # fmt: skip
    for name in expected.variables:
        assert ds[name].dtype == expected[name].dtype
        assert ds[name].values.tobytes() == expected[name].values.tobytes()


@pytest.mark.usefixtures("one_identity")
def test_a_cut_run_that_ends_early_keeps_nothing_of_what_was_cut(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", 14)
    with RunWriter.resume(path, rows=5) as run:
        run.append(5, **row(5))
    assert objects_of(path) == objects_of(recorded(tmp_path / "six.zarr", 6))
    assert sorted(file.name for file in (path / "W").glob("c.*")) == ["c.0.0.0", "c.1.0.0"]
    assert xr.open_zarr(path).sizes["step"] == 6


def test_attributes_can_take_the_place_of_those_it_has(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", 3, config={"steps": 3}, attributes={"optimizer": "x"})
    RunWriter.resume(path, attributes={"config": {"steps": 9}}).close()
    ds = xr.open_zarr(path)
    assert ds.attrs["config"] == {"steps": 9}
    assert ds.attrs["optimizer"] == "x"
    assert json.loads(ds.step.attrs["root_attributes"])["config"] == {"steps": 9}


@pytest.mark.parametrize("block", [1, 3])  # a whole one, and the unfinished one
def test_what_was_not_committed_is_not_resumed(tmp_path: Path, block: int) -> None:
    """Else the new digests would hide what `verify` finds."""
    path = recorded(tmp_path / "run.zarr", 14)
    older = Path(shutil.copytree(path, tmp_path / "older"))
    with RunWriter.resume(path, rows=4, commit_every=None) as run:
        for step in range(4, 14):
            run.append(step, **row(step) | {"W": random_bits((TOKENS, HIDDEN), 500 + step)})
    name = f"c.{block}.0.0"
    shutil.copy(older / "W" / name, path / "W" / name)  # of the same run, and of as many rows
    assert not verify(path).clean
    before = objects_of(path)
    for rows in (14, 13, 2):
        with pytest.raises(FormatError, match=r"differs from what was committed.*trajstore verify"):
            RunWriter.resume(path, rows=rows)
        with pytest.raises(FormatError, match=r"differs from what was committed.*trajstore verify"):
            branch_run(
                path, tmp_path / "branch.zarr", rows, types={"W": "bfloat16"}, attributes={},
                memory="64MiB",
            )  # fmt: skip
    assert objects_of(path) == before
    assert not (tmp_path / "branch.zarr").exists()


class Death(BaseException):
    """As if the process had ended there."""


@pytest.mark.parametrize(
    ("rows", "after"),
    [
        (5, False),
        pytest.param(14, True, marks=pytest.mark.nightly),
        pytest.param(14, False, marks=pytest.mark.nightly),
        pytest.param(5, True, marks=pytest.mark.nightly),
    ],
)
def test_a_resume_that_dies_leaves_the_attributes_of_before_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, after: bool
) -> None:
    source = recorded(tmp_path / "source.zarr", 14, config={"steps": 14})
    moves = len(TYPES) + 2  # of the root, and of the metadata files of all arrays
    move = os.replace
    found = []
    for last in range(1, moves + 1):
        path = Path(shutil.copytree(source, tmp_path / f"run-{last}.zarr"))
        left = iter(range(last, 0, -1))

        def replace(source: Any, target: Any, left: Iterator[int] = left) -> None:
            number = next(left)
            if number > 1 or after:
                move(source, target)
            if number == 1:
                raise Death

        monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", replace)
        with pytest.raises(Death):
            RunWriter.resume(path, rows=rows, attributes={"config": {"steps": 20}})
        monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", move)
        checked = verify(path)
        assert checked.clean, checked.problems
        found.append(xr.open_zarr(path).attrs["config"]["steps"])
        before = xr.open_zarr(path).attrs
        repair(path)
        assert not any("being changed" in note for note in verify(path).notes)
        repaired = xr.open_zarr(path).attrs
        assert repaired["fingerprint"] == before["fingerprint"]
        with RunWriter.resume(path, rows=5, attributes={"config": {"steps": 30}}) as run:
            run.append(5, **row(5))
        assert verify(path).clean
        assert open_run(path).attrs["config"] == {"steps": 30}
    assert found == sorted(found)
    assert set(found) == ({20} if after else {14, 20})  # the root is the first


def test_a_second_writer_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with create(path) as run:
        run.append(0, **row(0))
        with pytest.raises(RunLocked, match=str(os.getpid())):
            RunWriter.resume(path)
        with pytest.raises(RunLocked):
            create(path, overwrite=True)
        run.append(1, **row(1))
    assert open_run(path).sizes["step"] == 2
    for rows in (-1, 3):
        with pytest.raises(InvalidArgument, match=f"after {rows} rows, expected 0 to 2"):
            RunWriter.resume(path, rows=rows)
    RunWriter.resume(path).close()  # a refused call has not kept the lock


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        RunWriter.resume(tmp_path / "nothing.zarr")
    with pytest.raises(InvalidArgument, match="read-only"):
        RunWriter.resume("https://host/run.zarr")
    path = recorded(tmp_path / "run.zarr", 2)
    with pytest.raises(InvalidArgument, match=r"budget of 64 B .* at least"):
        RunWriter.resume(path, memory=64)
    with pytest.raises(InvalidArgument, match="commit_every"):
        RunWriter.resume(path, commit_every=0)
    zarr.open_group(path, mode="a", use_consolidated=False).attrs["note"] = "mine"
    with pytest.raises(FormatError, match=f"trajstore repair {path}"):
        RunWriter.resume(path)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_what_somebody_else_keeps_in_a_run_stays_as_it_is(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", 11)
    group = zarr.open_group(path, mode="a", use_consolidated=False)
    mask = group.create_array("mask", shape=(3,), dtype="int64", dimension_names=["place"])
    mask[...] = [7, 8, 9]
    zarr.consolidate_metadata(path)
    (path / "W" / "c.copy").write_bytes(b"mine")
    (path / "W" / "c.9.bak").write_bytes(b"mine")
    with RunWriter.resume(path, rows=6) as run:
        run.append(6, **row(6))
    assert zarr.open_array(path / "mask")[...].tolist() == [7, 8, 9]
    assert zarr.open_group(path)["mask"].shape == (3,)
    assert (path / "W" / "c.copy").exists()
    assert (path / "W" / "c.9.bak").exists()
    assert not (path / "W" / "c.2.0.0").exists()


def test_committed_rows_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a run that goes on, which were written without."""
    disk = Disk(monkeypatch)
    path = tmp_path / "new" / "folder" / "run.zarr"
    run = create(path)
    assert disk.survives(path, below=tmp_path)
    for step in range(2 * BLOCK):
        run.append(step, **row(step))
    run.close()
    assert disk.survives(path, below=tmp_path)
    flushes = disk.flushes
    run = create(path, overwrite=True, fsync=False)
    for step in range(BLOCK + 1):
        run.append(step, **row(step))
    run.close()
    assert disk.flushes == flushes
    assert not disk.survives(path)
    disk.early.clear()
    RunWriter.resume(path).close()
    assert disk.survives(path)
    assert disk.early == []


def test_each_step_of_a_commit_is_flushed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, then the metadata files of the arrays, then the root; of a cut, the root first."""
    run = create(tmp_path / "run.zarr")
    calls: list[str] = []
    monkeypatch.setattr(atomic, "flush", lambda paths: calls.append(f"flush {_place(paths)}"))
    move = os.replace

    def replace(source: Any, target: Any) -> None:
        calls.append(f"move {_place([target])}")
        move(source, target)

    monkeypatch.setattr(os, "replace", replace)
    for step in range(BLOCK):
        run.append(step, **row(step))
    run.close()
    commit = ["flush shards", "move shards", "flush arrays"]
    commit += [
        "flush metadata files",
        "move metadata files",
        "flush arrays",
        "flush root",
        "move root",
    ]
    assert _once(calls) == [*commit, "flush run", "flush root", "move root", "flush run"]
    calls.clear()
    RunWriter.resume(tmp_path / "run.zarr", rows=0, fsync=False).close()
    assert _once(calls) == ["move root", "move metadata files", "move root"]


def _place(paths: Any) -> str:
    """What paths are of, which are all of one kind."""
    found = set()
    for path in map(Path, paths):
        name = path.name.lstrip(".")
        in_run = path.parent.name == "run.zarr"
        if name.startswith("zarr.json"):
            found.add("root" if in_run else "metadata files")
        elif path.is_dir():
            found.add("arrays" if in_run else "run")
        else:
            found.add("shards")
    (kind,) = found
    return kind


def _once(calls: list[str]) -> list[str]:
    return [call for call, _ in itertools.groupby(calls)]
