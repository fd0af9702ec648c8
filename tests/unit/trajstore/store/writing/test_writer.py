""""""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from bits_and_calls import random_bits
from crashing import BLOCK, HIDDEN, TOKENS, TYPES, create, row
from disk import Disk, Writes, held_moves, identity, moves, objects_of

import trajstore
from trajstore import RunWriter, analysis, open_run, repair, verify
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
from trajstore.store.metadata.block_plan import BLOCKS
from trajstore.store.storage import atomic


def create_small(path: Path, **options: Any) -> RunWriter:
    arguments: dict[str, Any] = {
        "token": np.arange(5),
        "hidden": 3,
        "variables": {"W": "bfloat16", "loss": "float32"},
        "block_rows": 4,
        "commit_every": None,
    }
    return RunWriter.create(path, **(arguments | options))


def small_row(step: int) -> dict[str, Any]:
    return {"step": step, "W": random_bits((5, 3), step), "loss": np.float32(step)}


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_variable_comes_back_bit_for_bit(small_run: tuple[Path, Any]) -> None:
    path, values = small_run
    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == list(range(0, 22, 2))
    assert (ds.W.values.view("u4") == values["W"].astype("u4") << 16).all()
    assert (ds.loss.values.view("u4") == values["loss"]).all()
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


def test_an_exception_leaves_the_whole_rows_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyError), create_small(tmp_path / "run.zarr") as run:  # noqa: PT012
        for step in range(6):
            run.append(**small_row(step))
        raise KeyError("the trainer failed")
    ds = xr.open_zarr(run.path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.loss.values.tolist() == list(range(6))


def check_small_rows(path: Path, count: int) -> None:
    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == ds.loss.values.tolist() == list(range(count))
    expected = np.stack([small_row(step)["W"] for step in range(count)])
    assert (ds.W.values.view("u4") == expected.astype("u4") << 16).all()


A_COMMIT = 7  # objects of a block: three shards, three metadata files, the root


@pytest.mark.parametrize("failing", [0, 3, A_COMMIT - 1])  # a shard, metadata, the root
def test_a_failed_write_loses_nothing_that_was_committed(tmp_path: Path, failing: int) -> None:
    """Whichever write of a block fails, readers see the rows of the commit before."""
    run = create_small(tmp_path / "run.zarr")
    failing_move = moves(Writes(A_COMMIT + failing))
    with failing_move, pytest.raises(OSError, match="No space"), run:  # noqa: PT012
        for step in range(40):
            run.append(**small_row(step))
    assert run.rows < 40, "the failure surfaced while rows were appended"
    check_small_rows(run.path, 4)
    assert not [name for name in names_below(run.path) if "partial" in name]
    with pytest.raises(WriterClosed):
        run.append(**small_row(50))


def test_a_full_pipeline_makes_append_wait(tmp_path: Path) -> None:
    """Nothing is dropped and no buffer is reused before it is written, however slow the disk."""
    gate = threading.Semaphore(0)
    move = os.replace

    def slow(source: Any, target: Any) -> None:
        gate.acquire()
        move(source, target)

    run = create_small(tmp_path / "run.zarr")
    done = threading.Event()

    def produce() -> None:
        for step in range(40):
            run.append(**small_row(step))
        done.set()

    producer = threading.Thread(target=produce)
    with moves(slow):
        producer.start()
        for _ in range(10 * A_COMMIT):
            assert run.rows - run.committed_rows <= BLOCKS * 4
            gate.release()
        producer.join(timeout=30)
        assert done.is_set()
        gate.release(2)
        run.close()
    assert run.seconds_waited > 0
    check_small_rows(run.path, 40)


def test_a_writer_that_is_dropped_keeps_its_lock_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    run = create_small(path)
    with held_moves() as (waits, _):
        for step in range(4):
            run.append(**small_row(step))
        assert waits.wait(timeout=60)
        written = run._blocks._last
        assert written is not None
        del run
        gc.collect()
        with pytest.raises(RunLocked):
            RunWriter.resume(path)
    written.result(timeout=60)
    with RunWriter.resume(path) as again:
        assert again.rows == 4
        again.append(**small_row(4))
    assert verify(path).clean
    check_small_rows(path, 5)


def test_next_rows_end_with_the_block(tmp_path: Path) -> None:
    with create_small(tmp_path / "run.zarr", buffers=1) as run:  # 4 rows a block
        assert run.layout.buffers == 1
        got = []
        while run.rows < 11:
            places = run.next_rows(min(3, 11 - run.rows))
            count = len(places["W"])
            steps = np.arange(run.rows, run.rows + count)
            for at, step in enumerate(steps):
                places["W"][at] = small_row(step)["W"]
                places["loss"][at] = np.float32(step).view("u4")
            run.commit_rows(steps)
            got.append(count)
        assert got == [3, 1, 3, 1, 3]
    check_small_rows(run.path, 11)


def test_rows_that_cannot_be_committed_are_refused(tmp_path: Path) -> None:
    with create_small(tmp_path / "run.zarr") as run:
        run.next_rows(4)
        with pytest.raises(InvalidArgument, match="got step 3 after step 5"):
            run.commit_rows([1, 5, 3])
        with pytest.raises(InvalidArgument, match="got 5 steps, expected at most 4"):
            run.commit_rows(range(5))
        run.next_rows(1)
        with pytest.raises(InvalidArgument, match="got 2 steps, expected at most 1"):
            run.commit_rows(range(2))
        assert run.rows == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": None}, r"append\(\) lacks W;"),
        ({"grad": 1.0}, "got the unknown grad;"),
        ({"W": np.zeros((5, 4), "u2")}, r"got shape \(5, 4\), expected \(5, 3\)"),
        ({"W": np.full((5, 3), 0.1, "f4")}, "not exactly representable in bfloat16"),
        ({"W": np.zeros((5, 3), "i8")}, "got int64"),
        ({"step": 0}, "got step 0 after step 0"),
    ],
)
def test_a_wrong_row_is_refused_and_changes_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with create_small(tmp_path / "run.zarr") as run:
        run.append(**small_row(0))
        wrong = {k: v for k, v in (small_row(1) | change).items() if v is not None}
        with pytest.raises(InvalidArgument, match=message):
            run.append(**wrong)
        run.append(**small_row(1))
    assert xr.open_zarr(run.path).loss.values.tolist() == [0, 1]


def test_a_first_row_that_is_refused_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument), create_small(tmp_path / "run.zarr") as run:
        run.append(step=0)
    assert list(tmp_path.iterdir()) == []
    with create_small(tmp_path / "run.zarr") as run:
        run.append(**small_row(0))
    with pytest.raises(InvalidArgument), RunWriter.resume(run.path, rows=0) as run:
        run.append(step=1)
    assert xr.open_zarr(run.path).sizes["step"] == 0, "one that was there stays"


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    with create_small(tmp_path / "run.zarr") as run:
        run.append(**small_row(0))
    run.close("interrupted")  # a second time changes nothing
    assert xr.open_zarr(run.path).attrs["status"] == "complete"
    with pytest.raises(WriterClosed, match="is closed, with the status complete"):
        run.append(**small_row(1))


def test_tokens_that_occur_0_times_are_dead_unless_told_otherwise(tmp_path: Path) -> None:
    counts = [0, 7, 0, 1, 2]
    create_small(tmp_path / "a", token_count=counts).close()
    create_small(tmp_path / "b", token_count=counts, is_dead=np.zeros(5, bool)).close()
    assert trajstore.open_run(tmp_path / "a").is_dead.values.tolist() == [True, False] * 2 + [False]
    assert not trajstore.open_run(tmp_path / "b").is_dead.any()
    assert "is_dead" not in trajstore.open_run(create_small(tmp_path / "c").path)


def test_a_run_is_overwritten_only_if_asked(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    before = {name: (path / name).read_bytes() for name in names_below(path)}
    with pytest.raises(RunExists, match="already exists"):
        create_small(path)
    assert before == {name: (path / name).read_bytes() for name in names_below(path)}
    with create_small(path, overwrite=True) as run:
        run.append(**small_row(0))
    assert xr.open_zarr(path).sizes == {"step": 1, "token": 5, "hidden": 3}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_only_runs_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    zarr.create_group(tmp_path / "theirs.zarr")
    with pytest.raises(RunExists, match="not a run"):
        create_small(tmp_path / "theirs.zarr", overwrite=True)
    with pytest.raises(RunExists, match="not a run"):
        create_small(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "precious"


def test_links_are_not_overwritten_nor_what_has_no_name(
    small_run: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = small_run
    link, nowhere = tmp_path / "link.zarr", tmp_path / "nowhere.zarr"
    link.symlink_to(path)
    nowhere.symlink_to(tmp_path / "gone")
    for target in (link, nowhere):
        with pytest.raises(RunExists, match="is a link to"):
            create_small(target, overwrite=True)
        assert target.is_symlink()
    for name in ("/", ""):
        with pytest.raises(InvalidArgument, match="as a run, expected a path such as"):
            create_small(name, overwrite=True)  # type: ignore[arg-type]
    assert xr.open_zarr(path).sizes["step"] == 11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variables": {"loss": "float32"}}, "expected at least one of W, delta"),
        ({"variables": {"W": "int8"}}, "int8"),
        ({"variables": {"W": "bfloat16", "bogus": "float32"}}, "no variable 'bogus'"),
        ({"token": [1, 1, 2]}, "got the id 1 2 times, expected each id once"),
        ({"token": [0.5, 1.5]}, "token: got 0.5 at position 0, expected whole numbers"),
        ({"is_dead": [True]}, "is_dead: got 1 values"),
        ({"commit_every": 0}, "commit_every: got 0, expected seconds above 0"),
        ({"memory": "1KiB", "block_rows": None}, "at least"),
        (
            {"variables": {"W": "float32", "hidden_states": "float32"}, "examples": 4},
            "hidden_states: got no length of the dimension posi",
        ),
    ],
)
def test_an_impossible_run_is_not_made(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        create_small(tmp_path / "run.zarr", **options)
    assert list(tmp_path.iterdir()) == []


ROWS, EXAMPLES, POSITIONS, WIDTH = 10, 4, 6, 3
EXAMPLE_TYPES = {
    "W": "bfloat16",
    "hidden_trace": "float32",
    "batch": "float64",
    "example_loss": "float32",
    "hidden_states": "bfloat16",
}


def rows() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made = {
        "W": rng.integers(0, 1 << 14, (ROWS, 5, WIDTH)).astype("u2"),
        "hidden_trace": rng.normal(size=ROWS).astype("f4"),
        "batch": rng.integers(0, 1 << 52, (ROWS, EXAMPLES)).astype("f8"),
        "example_loss": rng.normal(size=(ROWS, EXAMPLES)).astype("f4"),
        "hidden_states": rng.integers(0, 1 << 14, (ROWS, EXAMPLES, POSITIONS, WIDTH)).astype("u2"),
    }
    for name in ("hidden_trace", "batch", "example_loss"):
        made[name][0] = np.nan
    made["hidden_states"][0] = 0x7FC0
    return made


def write(path: Path, first: int = 0, stop: int = ROWS) -> None:
    values = rows()
    sizes = {"examples": EXAMPLES, "positions": POSITIONS, "hidden": WIDTH}
    with RunWriter.create(
        path, token=range(5), variables=EXAMPLE_TYPES, block_rows=4, **sizes
    ) as run:
        for row in range(first, stop):
            run.append(row, **{name: values[name][row] for name in EXAMPLE_TYPES})


def agree(path: Path, at: slice = slice(None)) -> xr.Dataset:
    ds = open_run(path)
    for name, kept in rows().items():
        wide = (
            kept.astype("u4") << 16 if kept.dtype == np.uint16 else kept.view(f"u{kept.itemsize}")
        )
        stored = ds[name].values
        assert np.array_equal(stored.view(f"u{stored.itemsize}"), wide[at]), name
    return ds


def test_bits_pass_through_the_store(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    write(path)
    ds = agree(path)
    assert ds.batch.dims == ("step", "example")
    assert ds.hidden_states.dims == ("step", "example", "position", "hidden")
    xr.testing.assert_identical(xr.open_zarr(path).load(), ds.load())
    assert verify(path).clean
    trajstore.export(path, tmp_path / "part.zarr", format="run", steps="2:9", block_rows=3)
    agree(tmp_path / "part.zarr", slice(2, 9))


@pytest.mark.parametrize("form", ["safetensors", "hdf5"])
def test_files_of_whole_runs_hold_them(tmp_path: Path, form: str) -> None:
    if form == "hdf5":
        pytest.importorskip("h5py")
    write(tmp_path / "run.zarr")
    file = trajstore.export(tmp_path / "run.zarr", tmp_path / "file", format=form)
    trajstore.import_file(file, tmp_path / "again.zarr")
    ds = open_run(tmp_path / "run.zarr")
    compared = analysis.compare(ds, agree(tmp_path / "again.zarr"))
    assert compared.first_difference.to_series().to_dict() == dict.fromkeys(ds, -1)


def test_a_branch_and_a_cut_run_keep_them(tmp_path: Path) -> None:
    path, branch = tmp_path / "run.zarr", tmp_path / "branch.zarr"
    write(path)
    wider = EXAMPLE_TYPES | {"W": "float32"}
    branch_run(path, branch, 7, types=wider, attributes={}, memory="1GiB")
    agree(branch, slice(0, 7))
    next((branch / "hidden_states").glob("c.1.*")).unlink()
    repair(branch)
    agree(branch, slice(0, 4))


def test_files_that_say_no_more_than_a_name_are_not_taken_for_them(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    write(tmp_path / "run.zarr")
    file = trajstore.export(tmp_path / "run.zarr", tmp_path / "run.h5", format="hdf5")
    with h5py.File(file, "a") as opened:
        del opened["trajstore_json"]  # now it is a file of any program
    done = trajstore.import_file(file, tmp_path / "again.zarr")
    assert set(done.variables) == {"W", "hidden_trace"}
    assert any("omitted: " in note and "hidden_states" in note for note in done.notes)


def test_compare_leaves_out_what_has_other_examples(tmp_path: Path) -> None:
    write(tmp_path / "run.zarr")
    ds = open_run(tmp_path / "run.zarr")
    compared = analysis.compare(ds, ds.isel(example=slice(2)))
    assert compared["variable"].values.tolist() == ["W", "hidden_trace"]
    other = ds.assign(hidden_states=ds.hidden_states.where(ds.step != 6, 0))
    assert analysis.compare(ds, other).first_difference.sel(variable="hidden_states") == 6


def recorded(path: Path, rows: int, **options: Any) -> Path:
    with create(path, **options) as run:
        for step in range(rows):
            run.append(step, **row(step))
    return path


@pytest.fixture
def one_identity() -> Iterator[None]:
    with identity():
        yield


@pytest.mark.usefixtures("one_identity")
@pytest.mark.parametrize("rows", [3, 4])
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
    types = {"W": "bfloat16"}
    for rows in (14, 13, 2):
        with pytest.raises(FormatError, match=r"differs from what was committed.*trajstore verify"):
            RunWriter.resume(path, rows=rows)
        with pytest.raises(FormatError, match=r"differs from what was committed"):
            branch_run(
                path, tmp_path / "branch.zarr", rows, types=types, attributes={}, memory="64MiB"
            )
    assert objects_of(path) == before
    assert not (tmp_path / "branch.zarr").exists()


class Death(BaseException):
    """As if the process had ended there."""


@pytest.mark.parametrize(
    ("rows", "after"), [(5, False), pytest.param(14, True, marks=pytest.mark.nightly)]
)
def test_a_resume_that_dies_leaves_the_attributes_of_before_or_the_new_ones(
    tmp_path: Path, rows: int, after: bool
) -> None:
    source = recorded(tmp_path / "source.zarr", 14, config={"steps": 14})
    all_moves = len(TYPES) + 2  # of the root, and of the metadata files of all arrays
    move = os.replace
    found = []
    for last in (1, 2, all_moves):
        path = Path(shutil.copytree(source, tmp_path / f"run-{last}.zarr"))
        left = iter(range(last, 0, -1))

        def replace(source: Any, target: Any, left: Iterator[int] = left) -> None:
            number = next(left)
            if number > 1 or after:
                move(source, target)
            if number == 1:
                raise Death

        with moves(replace), pytest.raises(Death):
            RunWriter.resume(path, rows=rows, attributes={"config": {"steps": 20}})
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
    of_the_dead = path / "W" / ".c.2.0.0.7.partial"
    of_the_dead.write_bytes(b"half")
    with RunWriter.resume(path, rows=6) as run:
        run.append(6, **row(6))
    assert zarr.open_array(path / "mask")[...].tolist() == [7, 8, 9]
    assert zarr.open_group(path)["mask"].shape == (3,)
    assert (path / "W" / "c.copy").exists()
    assert (path / "W" / "c.9.bak").exists()
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

    with moves(replace):
        for step in range(BLOCK):
            run.append(step, **row(step))
        run.close()
        arrays = ["flush metadata files", "move metadata files", "flush arrays"]
        root = ["flush root", "move root", "flush run"]
        shards = ["flush shards", "move shards", "flush arrays"]
        assert _once(calls) == [*shards, *arrays, *root, *root]
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
