from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from bits_and_calls import random_bits
from disk import Writes

import trajstore
from trajstore import RunWriter, verify
from trajstore.errors import InvalidArgument, RunExists, RunLocked, WriterClosed
from trajstore.schema import FORMAT
from trajstore.store.metadata.block_plan import BLOCKS
from trajstore.store.writing.blocks import BlockWriter


def create(path: Path, **options: Any) -> RunWriter:
    arguments: dict[str, Any] = {
        "token": np.arange(5),
        "hidden": 3,
        "variables": {"W": "bfloat16", "loss": "float32"},
        "block_rows": 4,
        "commit_every": None,
    }
    return RunWriter.create(path, **(arguments | options))


def row(step: int) -> dict[str, Any]:
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
    with pytest.raises(KeyError), create(tmp_path / "run.zarr") as run:  # noqa: PT012
        for step in range(6):
            run.append(**row(step))
        raise KeyError("the trainer failed")
    ds = xr.open_zarr(run.path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.loss.values.tolist() == list(range(6))


A_COMMIT = 7  # objects of a block: three shards, three metadata files, the root


def test_the_commit_is_the_last_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(tmp_path / "run.zarr")
    writes = Writes()
    monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", writes)
    for step in range(4):
        run.append(**row(step))
    run.close()
    names = [str(target.relative_to(run.path)) for target in writes.targets]
    assert set(names[:3]) == {"step/c.0", "W/c.0.0.0", "loss/c.0"}
    assert set(names[3:6]) == {"step/zarr.json", "W/zarr.json", "loss/zarr.json"}
    assert names[6:] == ["zarr.json", "zarr.json"]  # the commit, and the status


@pytest.mark.parametrize("failing", range(A_COMMIT))
def test_a_failed_write_loses_nothing_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever write of a block fails, readers see the rows of the commit before."""
    run = create(tmp_path / "run.zarr")
    monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", Writes(A_COMMIT + failing))
    with pytest.raises(OSError, match="No space"), run:  # noqa: PT012
        for step in range(40):
            run.append(**row(step))
    assert run.rows < 40, "the failure surfaced while rows were appended"
    monkeypatch.undo()
    ds = xr.open_zarr(run.path)
    assert ds.loss.values.tolist() == list(range(4))
    assert (ds.W.values[3].view("u4") == row(3)["W"].astype("u4") << 16).all()
    assert not [name for name in names_below(run.path) if "partial" in name]
    with pytest.raises(WriterClosed):
        run.append(**row(50))


def test_a_full_pipeline_makes_append_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is dropped and no buffer is reused before it is written, however slow the disk."""
    gate = threading.Semaphore(0)
    move = os.replace

    def slow(source: Any, target: Any) -> None:
        gate.acquire()
        move(source, target)

    run = create(tmp_path / "run.zarr")
    monkeypatch.setattr("trajstore.store.storage.atomic.os.replace", slow)
    done = threading.Event()

    def produce() -> None:
        for step in range(40):
            run.append(**row(step))
        done.set()

    producer = threading.Thread(target=produce)
    producer.start()
    for _ in range(10 * A_COMMIT):
        assert run.rows - run.committed_rows <= BLOCKS * 4
        gate.release()
    producer.join(timeout=30)
    assert done.is_set()
    gate.release(2)
    run.close()
    assert run.seconds_waited > 0
    ds = xr.open_zarr(run.path)
    for step in range(40):
        assert (ds.W.values[step].view("u4") == row(step)["W"].astype("u4") << 16).all()


def test_a_writer_that_is_dropped_keeps_its_lock_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = BlockWriter.write

    def held(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(timeout=60)
        return write(*arguments)

    monkeypatch.setattr(BlockWriter, "write", held)
    path = tmp_path / "run.zarr"
    run = create(path)
    for step in range(4):
        run.append(**row(step))
    assert begun.wait(timeout=60)
    written = run._blocks._last
    assert written is not None
    del run
    gc.collect()
    try:
        with pytest.raises(RunLocked, match="by this process itself"):
            RunWriter.resume(path)
    finally:
        go_on.set()
    written.result(timeout=60)
    with RunWriter.resume(path) as again:
        assert again.rows == 4
        again.append(**row(4))
    assert verify(path).clean
    assert xr.open_zarr(path).step.values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("buffers", [1, 2])
def test_next_rows_end_with_the_block(tmp_path: Path, buffers: int) -> None:
    with create(tmp_path / "run.zarr", buffers=buffers) as run:  # 4 rows a block
        assert run.layout.buffers == buffers
        got = []
        while run.rows < 11:
            places = run.next_rows(min(3, 11 - run.rows))
            count = len(places["W"])
            steps = np.arange(run.rows, run.rows + count)
            for at, step in enumerate(steps):
                places["W"][at] = row(step)["W"]
                places["loss"][at] = np.float32(step).view("u4")
            run.commit_rows(steps)
            got.append(count)
        assert got == [3, 1, 3, 1, 3]
    ds = xr.open_zarr(run.path)
    assert ds.step.values.tolist() == ds.loss.values.tolist() == list(range(11))
    for step in range(11):
        assert (ds.W.values[step].view("u4") == row(step)["W"].astype("u4") << 16).all()


def test_rows_that_cannot_be_committed_are_refused(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
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
    with create(tmp_path / "run.zarr") as run:
        run.append(**row(0))
        wrong = {k: v for k, v in (row(1) | change).items() if v is not None}
        with pytest.raises(InvalidArgument, match=message):
            run.append(**wrong)
        run.append(**row(1))
    assert xr.open_zarr(run.path).loss.values.tolist() == [0, 1]


def test_a_first_row_that_is_refused_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument), create(tmp_path / "run.zarr") as run:
        run.append(step=0)
    assert list(tmp_path.iterdir()) == []
    with create(tmp_path / "run.zarr") as run:
        run.append(**row(0))
    with pytest.raises(InvalidArgument), RunWriter.resume(run.path, rows=0) as run:
        run.append(step=1)
    assert xr.open_zarr(run.path).sizes["step"] == 0, "one that was there stays"


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    with create(tmp_path / "run.zarr") as run:
        run.append(**row(0))
    run.close("interrupted")  # a second time changes nothing
    assert xr.open_zarr(run.path).attrs["status"] == "complete"
    with pytest.raises(WriterClosed, match="is closed, with the status complete"):
        run.append(**row(1))


def test_tokens_that_occur_0_times_are_dead_unless_told_otherwise(tmp_path: Path) -> None:
    counts = [0, 7, 0, 1, 2]
    create(tmp_path / "a", token_count=counts).close()
    create(tmp_path / "b", token_count=counts, is_dead=np.zeros(5, bool)).close()
    assert trajstore.open_run(tmp_path / "a").is_dead.values.tolist() == [True, False] * 2 + [False]
    assert not trajstore.open_run(tmp_path / "b").is_dead.any()
    assert "is_dead" not in trajstore.open_run(create(tmp_path / "c").path)


def test_a_run_is_overwritten_only_if_asked(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    before = {name: (path / name).read_bytes() for name in names_below(path)}
    with pytest.raises(RunExists, match="already exists"):
        create(path)
    assert before == {name: (path / name).read_bytes() for name in names_below(path)}
    with create(path, overwrite=True) as run:
        run.append(**row(0))
    assert xr.open_zarr(path).sizes == {"step": 1, "token": 5, "hidden": 3}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_only_runs_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    zarr.create_group(tmp_path / "theirs.zarr")
    with pytest.raises(RunExists, match="not a run"):
        create(tmp_path / "theirs.zarr", overwrite=True)
    with pytest.raises(RunExists, match="not a run"):
        create(tmp_path / "thesis", overwrite=True)
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
            create(target, overwrite=True)
        assert target.is_symlink()
    for name in ("/", ""):
        with pytest.raises(InvalidArgument, match="as a run, expected a path such as"):
            create(name, overwrite=True)  # type: ignore[arg-type]
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
    ],
)
def test_an_impossible_run_is_not_made(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        create(tmp_path / "run.zarr", **options)
    assert list(tmp_path.iterdir()) == []
