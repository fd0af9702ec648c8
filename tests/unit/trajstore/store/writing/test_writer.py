"""A writer: its rows, what it refuses, resumed runs, and what survives a loss of power."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import os
import shutil
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from bits_and_calls import nightly_but, random_bits
from crashing import BLOCK, HIDDEN, TOKENS, TYPES, check, create, extend, recorded, row
from damage import contents
from disk import Disk, failing_moves, held_moves, objects_of

import trajstore
from trajstore import RunWriter, analysis, open_run, repair, strict_json, verify
from trajstore.errors import (
    FormatError,
    InvalidArgument,
    RunExists,
    RunLocked,
    RunNotFound,
    WriterClosed,
)
from trajstore.exchange.export_run import branch_run
from trajstore.schema import FORMAT
from trajstore.store.storage.remote_path import location


def test_a_run_says_what_it_holds(small_run: tuple[Path, Any]) -> None:
    ds = xr.open_zarr(small_run[0])
    assert ds.step.values.tolist() == list(range(0, 22, 2))
    for name, native in {"W": "bfloat16", "grad": "float16", "loss": "float32"}.items():
        assert ds[name].dtype == "float32"
        assert ds[name].attrs["native_dtype"] == native
        assert ds[name].attrs["long_name"]
    assert set(ds.coords) == {"step", "token", "is_dead", "token_count", "token_text"}
    assert ds.token.values.tolist() == list(range(0, 70, 7))
    assert ds.token_text.values[-1] == "é\n"
    assert ds.attrs["config"] == {"why": "a test"}
    assert ds.attrs["trajstore_format"] == FORMAT
    assert ds.attrs["trajstore_version"] == trajstore.__version__
    assert (ds.attrs["committed_rows"], ds.attrs["status"]) == (11, "complete")
    assert ds.attrs["created"] <= ds.attrs["updated"]


EXAMPLES = {
    "W": ("bfloat16", ("token", "hidden")),
    "hidden_trace": ("float32", ()),
    "batch": ("float64", ("example",)),
    "example_loss": ("float32", ("example",)),
    "hidden_states": ("bfloat16", ("example", "position", "hidden")),
}
SIZES = {"token": 5, "hidden": 3, "example": 4, "position": 6}
Stored = tuple[Path, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def of_examples(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A run of 10 rows with variables along examples, which tests only read, and its bits."""
    path, values = tmp_path_factory.mktemp("examples") / "run.zarr", {}
    for name, (native, dims) in EXAMPLES.items():
        shape = (10, *(SIZES[dim] for dim in dims))
        values[name] = random_bits(shape, 5, 16 if native == "bfloat16" else int(native[5:]))
    values["hidden_trace"][0] = 0x7FC00000  # there is none before the first step
    with RunWriter.create(
        path,
        token=range(5),
        hidden=3,
        examples=4,
        positions=6,
        variables={name: native for name, (native, _) in EXAMPLES.items()},
        block_rows=4,
    ) as run:
        for at in range(10):
            for name, place in run.next_row().items():
                place[...] = values[name][at]
            run.commit_row(at)
    return path, values


def agree(stored: Stored, path: Path, at: slice = slice(None)) -> None:
    """Fail unless a run holds these rows of another, bit for bit."""
    ds = open_run(path)
    for name, bits in stored[1].items():
        wide = bits.astype("u4") << 16 if bits.dtype == "u2" else bits
        assert np.array_equal(ds[name].values.view(wide.dtype), wide[at]), name
        assert ds[name].dims == ("step", *EXAMPLES[name][1])


def test_values_along_examples_come_back_bit_for_bit(of_examples: Stored, tmp_path: Path) -> None:
    path, branch = of_examples[0], tmp_path / "branch.zarr"
    agree(of_examples, path)
    xr.testing.assert_identical(xr.open_zarr(path).load(), open_run(path).load())
    assert verify(path).clean
    trajstore.export(path, tmp_path / "part.zarr", format="run", steps="2:9", block_rows=3)
    agree(of_examples, tmp_path / "part.zarr", slice(2, 9))
    file = trajstore.export(path, tmp_path / "run.safetensors")
    trajstore.import_file(file, tmp_path / "again.zarr")
    agree(of_examples, tmp_path / "again.zarr")
    types = {name: native for name, (native, _) in EXAMPLES.items()} | {"W": "float32"}
    branch_run(path, branch, 7, types=types, attributes={}, memory="1GiB")
    agree(of_examples, branch, slice(0, 7))
    next((branch / "hidden_states").glob("c.1.*")).unlink()
    repair(branch)
    agree(of_examples, branch, slice(0, 4))


def test_a_file_that_says_no_more_than_a_name_is_not_taken_for_them(
    of_examples: Stored, tmp_path: Path
) -> None:
    import h5py

    file = trajstore.export(of_examples[0], tmp_path / "run.h5", format="hdf5")
    trajstore.import_file(file, tmp_path / "whole.zarr")
    agree(of_examples, tmp_path / "whole.zarr")
    with h5py.File(file, "a") as opened:
        del opened["trajstore_json"]  # now it is a file of any program
    done = trajstore.import_file(file, tmp_path / "again.zarr")
    assert set(done.variables) == {"W", "hidden_trace"}
    assert any("omitted: " in note and "hidden_states" in note for note in done.notes)


def test_compare_leaves_out_what_has_other_examples(of_examples: Stored) -> None:
    ds = open_run(of_examples[0])
    compared = analysis.compare(ds, ds.isel(example=slice(2)))
    assert compared["variable"].values.tolist() == ["W", "hidden_trace"]
    other = ds.assign(hidden_states=ds.hidden_states.where(ds.step != 6, 0))
    assert analysis.compare(ds, other).first_difference.sel(variable="hidden_states") == 6


def test_an_exception_leaves_the_whole_rows_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyError), create(tmp_path / "run.zarr") as run:  # noqa: PT012
        extend(run, 6)
        raise KeyError("the trainer failed")
    check(run.path, 6)
    run.close()  # a second time changes nothing
    assert xr.open_zarr(run.path).attrs["status"] == "interrupted"
    with pytest.raises(WriterClosed, match="is closed, with the status interrupted"):
        run.append(6, **row(6))


def test_a_writer_that_is_dropped_keeps_its_lock_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    run = create(path)
    with held_moves() as (waits, _):
        extend(run, BLOCK)
        assert waits.wait(timeout=60)
        written = run._blocks._last
        assert written is not None
        del run
        gc.collect()
        with pytest.raises(RunLocked):
            RunWriter.resume(path)
    written.result(timeout=60)
    with RunWriter.resume(path) as again:
        assert again.rows == BLOCK
        extend(again, BLOCK + 1)
    assert verify(path).clean
    check(path, BLOCK + 1)


def test_rows_that_cannot_be_committed_are_refused(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        for places, steps, message in (
            (4, [1, 5, 3], "got step 3 after step 5"),
            (4, range(5), "got 5 steps, expected at most 4"),
            (1, range(2), "got 2 steps, expected at most 1"),
        ):
            run.next_rows(places)
            with pytest.raises(InvalidArgument, match=message):
                run.commit_rows(steps)
        assert run.rows == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": None}, r"append\(\) lacks W;"),
        ({"exp_avg": 1.0}, "got the unknown exp_avg;"),
        ({"W": np.zeros((5, 4), "u2")}, r"got shape \(5, 4\), expected \(40, 6\)"),
        ({"W": np.full((TOKENS, HIDDEN), 0.1, "f4")}, "W: .*not exactly representable"),
    ],
)
def test_a_wrong_row_is_refused_and_changes_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with create(tmp_path / "run.zarr") as run:
        extend(run, 1)
        wrong = {name: value for name, value in (row(1) | change).items() if value is not None}
        with pytest.raises(InvalidArgument, match=message):
            run.append(1, **wrong)
        extend(run, 2)
    check(run.path, 2)


def test_a_first_row_that_is_refused_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument), create(tmp_path / "run.zarr") as run:
        run.append(0)
    assert list(tmp_path.iterdir()) == []
    recorded(run.path, 1)
    with pytest.raises(InvalidArgument), RunWriter.resume(run.path, rows=0) as run:
        run.append(1)
    check(run.path, 0)  # one that was there stays


def test_tokens_that_occur_0_times_are_dead_unless_told_otherwise(tmp_path: Path) -> None:
    counts = np.arange(TOKENS) % 3
    create(tmp_path / "a", token_count=counts).close()
    create(tmp_path / "b", token_count=counts, is_dead=counts > 2).close()
    create(tmp_path / "c", commit_every=1e300).close()
    assert open_run(tmp_path / "a").is_dead.values.tolist() == (counts == 0).tolist()
    assert not open_run(tmp_path / "b").is_dead.any()
    assert "is_dead" not in open_run(tmp_path / "c")


OVER: dict[str, Any] = {"overwrite": True}


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("small.zarr", {}, RunExists, "already exists"),
        ("theirs.zarr", OVER, RunExists, "not a run"),
        ("thesis", OVER, RunExists, "not a run"),
        ("link.zarr", OVER, RunExists, "is a link to"),
        ("nowhere.zarr", OVER, RunExists, "is a link to"),
        ("/", OVER, InvalidArgument, "as a run, expected a path such as"),
        ("new", {"variables": {"loss": "float32"}}, InvalidArgument, "at least one of W, delta"),
        ("new", {"variables": {"W": "int8"}}, InvalidArgument, "int8"),
        ("new", {"variables": TYPES | {"x": "float32"}}, InvalidArgument, "no variable 'x'"),
        ("new", {"token": [1, 1, 2]}, InvalidArgument, "got the id 1 2 times"),
        ("new", {"token": [0.5, 1.5]}, InvalidArgument, "got 0.5 at position 0"),
        ("new", {"is_dead": [True]}, InvalidArgument, "is_dead: got 1 values"),
        ("new", {"commit_every": 0}, InvalidArgument, "commit_every: got 0"),
        ("new", {"commit_every": math.nan}, InvalidArgument, "commit_every: got nan"),
        ("new", {"commit_every": math.inf}, InvalidArgument, "commit_every: got inf"),
    ],
)
def test_what_cannot_be_created_is_refused_and_nothing_changes(
    small_run: tuple[Path, Any],
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    (tmp_path / "link.zarr").symlink_to(small_run[0])
    (tmp_path / "nowhere.zarr").symlink_to(tmp_path / "gone")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    zarr.create_group(tmp_path / "theirs.zarr")
    before = contents(tmp_path), sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        create(tmp_path / name, **options)
    assert (contents(tmp_path), sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize(("rows", "stop"), [(3, 14), (4, 14), (5, 6)])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    tmp_path: Path, rows: int, stop: int
) -> None:
    """Also one that is cut and ends early."""
    path, whole = tmp_path / "run.zarr", tmp_path / "whole.zarr"
    create(path, config={"steps": 3}).close()
    shutil.copytree(path, whole)  # of the same identity
    for each, length in ((whole, stop), (path, 11)):
        with RunWriter.resume(each) as run:
            extend(run, length)
    with RunWriter.resume(path, rows=rows, attributes={"config": {"steps": 9}}) as run:
        assert (run.rows, run.committed_rows) == (rows, rows)
        assert xr.open_zarr(path).attrs["status"] == "recording"
        extend(run, stop)
        assert run.bytes_recorded == stop * (2 * TOKENS * HIDDEN * 2 + TOKENS * 4 + 4)
    assert objects_of(path) == objects_of(whole)
    check(path, stop)
    attributes, expected = xr.open_zarr(path).attrs, xr.open_zarr(whole).attrs
    assert (attributes["status"], attributes["config"]) == ("complete", {"steps": 9})
    for name in ("content_digest", "created", "optimizer"):
        assert attributes[name] == expected[name]
    metadata = json.loads((path / "step/zarr.json").read_bytes())
    assert '"steps": 9' in metadata["attributes"]["root_attributes"]


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
    before, options = objects_of(path), {"types": TYPES, "attributes": {}, "memory": "64MiB"}
    for rows in (14, 13, 2):
        with pytest.raises(FormatError, match=r"differs from what was committed.*trajstore verify"):
            RunWriter.resume(path, rows=rows)
        with pytest.raises(FormatError, match="differs from what was committed"):
            branch_run(path, tmp_path / "branch.zarr", rows, **options)  # type: ignore[arg-type]
    assert objects_of(path) == before
    assert not (tmp_path / "branch.zarr").exists()


class Death(BaseException):
    """As if the process had ended there."""


MOVES = len(TYPES) + 1  # of the metadata files of all arrays, after that of the root


@pytest.mark.parametrize("rows", nightly_but((5, 6), 5))
@pytest.mark.parametrize("moved", nightly_but((0, 1, 2, MOVES, MOVES + 1), 0, 1, MOVES))
def test_a_resume_that_dies_leaves_the_attributes_of_before_or_the_new_ones(
    tmp_path: Path, rows: int, moved: int
) -> None:
    path = recorded(tmp_path / "run.zarr", 6, config={"steps": 14})
    with failing_moves(moved, Death()), contextlib.suppress(Death):
        RunWriter.resume(path, rows=rows, attributes={"config": {"steps": 20}})
    checked = verify(path)
    assert checked.clean, checked.problems
    before = open_run(path).attrs
    assert before["config"]["steps"] == (20 if moved else 14)  # the root is the first
    repair(path)
    assert not any("being changed" in note for note in verify(path).notes)
    assert open_run(path).attrs["fingerprint"] == before["fingerprint"]
    with RunWriter.resume(path, rows=5, attributes={"config": {"steps": 30}}) as run:
        extend(run, 6)
    assert verify(path).clean
    assert open_run(path).attrs["config"] == {"steps": 30}


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    path, changed = recorded(tmp_path / "run.zarr", 2), tmp_path / "changed.zarr"
    shutil.copytree(path, changed)
    zarr.open_group(changed, mode="a", use_consolidated=False).attrs["note"] = "mine"
    held = create(tmp_path / "held.zarr")
    with pytest.raises(RunLocked):
        create(held.path, overwrite=True)
    for place, options, error, message in (
        (held.path, {}, RunLocked, str(os.getpid())),
        (tmp_path / "nothing.zarr", {}, RunNotFound, "nothing"),
        ("https://host/run.zarr", {}, InvalidArgument, "read-only"),
        (changed, {}, FormatError, f"trajstore repair {changed}"),
        (path, {"rows": -1}, InvalidArgument, "after -1 rows, expected 0 to 2"),
        (path, {"rows": 3}, InvalidArgument, "after 3 rows, expected 0 to 2"),
        (path, {"memory": 64}, InvalidArgument, r"budget of 64 B .* at least"),
        (path, {"commit_every": 0}, InvalidArgument, "commit_every"),
    ):
        with pytest.raises(error, match=message):
            RunWriter.resume(place, **options)
    RunWriter.resume(path).close()  # a refused call has not kept the lock
    extend(held, 2)  # the first writer continues
    held.close()
    check(held.path, 2)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_what_somebody_else_keeps_in_a_run_stays_as_it_is(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", 11)
    group = zarr.open_group(path, mode="a", use_consolidated=False)
    group.create_array("mask", data=np.array([7, 8, 9]), dimension_names=["place"])
    zarr.consolidate_metadata(path)
    theirs = [path / "W" / "c.copy", path / "W" / "c.9.bak"]
    of_the_dead = path / "W" / ".c.2.0.0.7.partial"
    for file in (*theirs, of_the_dead):
        file.write_bytes(b"mine")
    with RunWriter.resume(path, rows=6) as run:
        extend(run, 7)
    assert zarr.open_group(path)["mask"][...].tolist() == [7, 8, 9]
    assert all(file.exists() for file in theirs)
    assert not (path / "W" / "c.2.0.0").exists()
    assert not of_the_dead.exists()


def test_committed_rows_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a run that goes on, which were written without."""
    disk = Disk(monkeypatch)
    path = tmp_path / "new" / "folder" / "run.zarr"
    run = create(path)
    assert disk.survives(path, below=tmp_path)
    extend(run, 2 * BLOCK)
    run.close()
    assert disk.survives(path, below=tmp_path)
    flushes = disk.flushes
    recorded(path, BLOCK + 1, overwrite=True, fsync=False)
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
    run, disk = create(tmp_path / "run.zarr"), Disk(monkeypatch)
    extend(run, BLOCK)
    run.close()
    shards = ["flush shards", "move shards", "flush arrays"]
    arrays = ["flush metadata files", "move metadata files", "flush arrays"]
    root = ["flush root", "move root", "flush run"]
    assert calls(disk) == [*shards, *arrays, *root, *root]
    disk.calls.clear()
    RunWriter.resume(run.path, rows=0, fsync=False).close()
    assert calls(disk) == ["move root", "move metadata files", "move root"]


def calls(disk: Disk) -> list[str]:
    """What was called of which kind of path, without repetitions."""
    return [
        call for call, _ in itertools.groupby(f"{did} {_kind(path)}" for did, path in disk.calls)
    ]


def _kind(path: Path) -> str:
    in_run = path.parent.name == "run.zarr"
    if "zarr.json" in path.name:
        return "root" if in_run else "metadata files"
    if path.is_dir():
        return "arrays" if in_run else "run"
    return "shards"


# A folder that goes away while it is written to or read; and a clock that goes back.


def test_a_recording_whose_folder_goes_fails_and_does_not_make_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    run = create(folder / "run.zarr")
    extend(run, 5)
    folder.rename(tmp_path / "elsewhere")  # deleting it would race with the writer's files
    with pytest.raises(OSError, match="was moved, removed or replaced") as failure:  # noqa: PT012
        extend(run, 45)
        run.close()
    assert str(folder) in str(failure.value)
    assert not folder.exists()


def test_a_writer_leaves_another_run_at_its_path_alone(tmp_path: Path) -> None:
    path = tmp_path / "experiment" / "run.zarr"
    run = create(path)
    extend(run, 3)
    path.parent.rename(tmp_path / "experiment-1")
    recorded(path, 2)
    with pytest.raises(RunNotFound, match="was moved, removed or replaced"):
        run.close()
    assert verify(path).clean
    assert open_run(path).sizes["step"] == 2


# Removed; or replaced by one with fewer blocks, in smaller shards, or alike.
@pytest.mark.parametrize("rows", [None, 0, 2, 10])
@pytest.mark.parametrize("remote", [False, True])
def test_what_is_read_of_a_run_that_has_gone_or_was_replaced_says_so(
    rows: int | None, remote: bool, tmp_path: Path
) -> None:
    """Of arrays without and with zarr."""
    path: Any = location(f"memory://vanished/{rows}/run.zarr") if remote else tmp_path / "run.zarr"
    recorded(path, 10)
    opens = [open_run, partial(open_run, chunks=None), *([] if remote else [xr.open_zarr])]
    before = [opened(path) for opened in opens]
    if rows is not None:
        recorded(path, rows, overwrite=True, block_rows=2 if rows == 2 else 4)
    elif remote:
        path.remove_below()
    else:
        shutil.rmtree(path)
    for ds, name in itertools.product(before, ("W", "loss")):
        with pytest.raises(RunNotFound, match=r"run\.zarr was moved, removed or replaced since"):
            ds[name].compute()
    if rows is not None:
        assert {opened(path).loss.compute().size for opened in opens} == {rows}


@pytest.mark.parametrize("look", [verify, repair])
def test_a_vanished_run_is_not_reported_as_damaged(look: Any, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", 10)

    def go(*progress: int) -> None:
        shutil.rmtree(path, ignore_errors=True)

    with pytest.raises(RunNotFound, match="disappeared during the check"):
        look(path, threads=1, on_progress=go)
    assert not path.exists()


def test_a_clock_that_goes_back_hours_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        hour = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            cls.hour += 1
            return datetime(2030, 1, 1, tzinfo=UTC) - timedelta(hours=5 * cls.hour)

    monkeypatch.setattr(strict_json, "datetime", Clock)
    path = recorded(tmp_path / "run.zarr", 6, commit_every=0.001)
    with RunWriter.resume(path, rows=6) as run:
        extend(run, 10)
    assert Clock.hour > 2
    assert open_run(path).sizes["step"] == 10
    assert verify(path).clean
    assert repair(path, dry_run=True).actions == ()
