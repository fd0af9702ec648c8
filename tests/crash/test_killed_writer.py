"""A writer that is killed loses what it had not committed, and nothing else; so does an export.

Every run here is killed several times, at every move of a commit in turn and at arbitrary moments,
and resumed after each; a reader polls it throughout. `TRAJSTORE_KILLS` sets how many runs are
killed at arbitrary moments (`make crash`); with it, each move is killed both before and after.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import xarray as xr
from crashing import (
    BLOCK,
    KillAt,
    Reader,
    check_rows,
    create,
    encoding_of,
    extend,
    killed,
    recorded,
    write_rows,
    write_rows_by_time,
)
from exchange_runs import assert_same_run

from trajstore import RunWriter, export, repair, verify

TOOL = Path(__file__).parents[2] / "tools" / "powerloss.py"
ROWS = 7 * BLOCK + 2
OBJECTS = 5  # arrays, each with a shard and a metadata file in every commit, and then the root
A_COMMIT = 2 * OBJECTS + 1
KILLS = os.environ.get("TRAJSTORE_KILLS")
# Whether a kill comes after the moves 1, 3, 5, …; it comes before the others.
ODD_AFTER = [True, False] if KILLS else [True]


def committed(path: Path) -> int:
    return int(xr.open_zarr(path).attrs["committed_rows"]) if path.exists() else 0


def check_whole(path: Path, *, by_time: bool = False) -> int:
    """Rows of a run that a dead writer has left, each of them compared."""
    if not path.exists():
        return 0
    ds = xr.open_zarr(path)
    rows = ds.sizes["step"]
    assert by_time or rows == ROWS or rows % BLOCK == 0
    check_rows(ds)
    found = verify(path)
    assert found.clean, found.problems
    assert found.rows == rows
    return rows


def finish(path: Path) -> None:
    """Resume to the end, and compare with the run that was never killed, file by file."""
    assert not killed(write_rows, path, ROWS, None)
    ds = xr.open_zarr(path)
    whole = path.with_name(f"whole-{path.name}")  # of the same identity, which blocks have
    shutil.copytree(path, whole, ignore=shutil.ignore_patterns(".*"))
    with RunWriter.resume(whole, rows=0) as run:
        extend(run, ROWS)
    assert xr.open_zarr(whole).attrs["content_digest"] == ds.attrs["content_digest"]
    for file in whole.rglob("c.*"):
        assert (path / file.relative_to(whole)).read_bytes() == file.read_bytes()
    assert {str(file.relative_to(path)) for file in path.rglob("*")} == {
        str(file.relative_to(whole)) for file in whole.rglob("*")
    }, "nothing is left of the dead writers"
    assert not [file for file in path.parent.iterdir() if file.name.startswith(".")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "by_time"), [("run.zarr", False), ("run.zarr", True), ("compact.zarr", True)]
)
@pytest.mark.parametrize("odd_after", ODD_AFTER)
def test_killed_at_every_move_of_a_commit(
    tmp_path: Path, name: str, odd_after: bool, by_time: bool
) -> None:
    """By time, of a block that is there already, with fewer rows, and is replaced."""
    path = tmp_path / name
    if by_time:
        with create(path) as run:
            extend(run, BLOCK + 1)
    else:
        for move in (1, 5, 9):  # while the run is made, it is not there, or empty
            assert killed(write_rows, path, ROWS, KillAt(move, after=True))
            assert check_whole(path) == 0
    with Reader(path) as reader:
        for move in range(1, A_COMMIT + 1):
            before, after = committed(path), (move % 2 == 1) == odd_after
            # A resumed run cuts itself to where it stands first: the metadata files and the root.
            kill = KillAt(OBJECTS + 1 + move, after)
            assert killed(write_rows_by_time if by_time else write_rows, path, ROWS, kill)
            rows = check_whole(path, by_time=by_time)
            assert rows == before + (after and move == A_COMMIT) * (1 if by_time else BLOCK)
            if by_time and move % 2 == 0:
                assert repair(path).rows == rows
                assert check_whole(path, by_time=True) == rows
        finish(path)
    assert reader.opens > A_COMMIT
    assert reader.most == ROWS


def test_a_writer_killed_before_the_end_of_a_commit_leaves_the_one_before(tmp_path: Path) -> None:
    """In a fork of this process, which need not import anything."""
    path = tmp_path / "run.zarr"
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            # 8 moves make the run; the last one of the second commit is that of the root.
            write_rows(path, ROWS, KillAt(8 + 2 * A_COMMIT, after=False), None)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert check_whole(path) == BLOCK
    write_rows(path, ROWS, None, None)
    assert check_whole(path) == ROWS
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(KILLS or 2)))
def test_a_writer_killed_at_any_moment_leaves_whole_rows(tmp_path: Path, seed: int) -> None:
    """Also more than once, until the run is through."""
    path = tmp_path / ("compact.zarr" if seed % 2 else "run.zarr")
    rng = random.Random(seed)
    first = KillAt(rng.randrange(1, 3 * A_COMMIT), after=rng.random() < 0.5)
    assert killed(write_rows, path, ROWS, first)
    with Reader(path) as reader:
        done = check_whole(path)
        while done < ROWS:
            target = rng.choice([write_rows, write_rows_by_time])
            last = rng.randrange(done, ROWS + 1)
            before = committed(path)
            if not killed(target, path, ROWS, None, after_step=last):
                break
            done = check_whole(path, by_time=True)
            assert before <= done <= ROWS
            if rng.random() < 0.5:  # it goes on from a repaired run as from any
                assert repair(path).rows == done
                assert repair(path, dry_run=True).actions == ()
                assert check_whole(path, by_time=True) == done
        finish(path)
    assert reader.most == ROWS


def exported(source: Path, out: Path, kill: KillAt | None, told: Connection | None) -> None:
    """Export a run to the encoding of its new name; in a process."""
    if kill is not None:
        kill.install()
    export(source, out, encoding=encoding_of(out), overwrite=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["run.zarr", "compact.zarr"])
def test_a_killed_export_leaves_the_whole_run_or_none_and_can_be_repeated(
    tmp_path: Path, name: str
) -> None:
    source, out = recorded(tmp_path / "compact.zarr", ROWS), tmp_path / "out" / name
    out.parent.mkdir()
    kills = 0
    for move in range(1, 26, 24 // (4 * int(KILLS or 1)) or 1):
        kills += killed(exported, source, out, KillAt(move, after=move % 4 == 1))
        if out.exists():
            assert verify(out).clean
    assert kills
    assert not killed(exported, source, out, None)
    assert list(out.parent.iterdir()) == [out]
    assert verify(out).clean
    assert_same_run(source, out)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="its shim is of Linux")
@pytest.mark.skipif(shutil.which("cc") is None, reason="its shim needs a C compiler")
def test_commands_survive_a_loss_of_power_unless_nothing_is_flushed() -> None:
    """At some moments; `make powerloss` tries all, and all commands."""
    commands = ["create", "cut", "annotate", "--no-fsync", "--states", "6"]
    done = subprocess.run([sys.executable, TOOL, *commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "create --no-fsync" in line)
    states, promised, lost, *_ = map(int, line.split()[-6:])
    assert 0 < promised < states
    assert lost > 0
