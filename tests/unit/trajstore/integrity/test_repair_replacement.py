"""`repair` with NaN in the place of what is damaged, and without damaged arrays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import contents, flip, shard_index
from disk import Disk

from trajstore import InvalidArgument, RunWriter, open_run, repair, verify

SERIES = ("step", "W", "grad", "exp_avg", "loss")


def break_chunk(run: Path, name: str, block: int, chunk: int = 0) -> None:
    path, index = shard_index(run, name, block)
    flip(path, 8 * index[chunk][0] + 300)


def assert_sound(run: Path) -> tuple[str, ...]:
    found = verify(run)
    assert found.clean, [str(problem) for problem in found.problems]
    before = contents(run)
    assert repair(run, yes=True).actions == ()
    assert contents(run) == before
    return found.notes


def repairs(run: Path) -> list[dict[str, Any]]:
    root = json.loads((run / "zarr.json").read_bytes())
    listed: list[dict[str, Any]] = root["attributes"]["provenance"]["repaired"]
    return listed


def test_the_damage_and_what_is_whole_are_named(run: Path) -> None:
    break_chunk(run, "grad", 1)
    (run / "loss" / "c.2").unlink()
    found = repair(run)
    assert found.damaged == {"grad": "steps 4 to 7", "loss": "steps 8 to 10"}
    assert found.whole == ("step", "W", "exp_avg")
    assert found.rows == 4
    assert found.alternatives == ("--fill-damaged", "--drop-array grad --drop-array loss")


def test_one_broken_chunk_becomes_nan_and_every_other_value_stays(run: Path, whole: Path) -> None:
    break_chunk(run, "grad", 1, chunk=1)
    planned = repair(run, fill_damaged=True)
    assert planned.rows == 11
    assert planned.actions[0].startswith("grad becomes NaN in steps 4 to 7: grad, block 1")
    done = repair(run, fill_damaged=True, yes=True)
    assert done.actions == planned.actions
    assert assert_sound(run) == ("grad has NaN in steps 4 to 7: a repair filled what was damaged",)
    got, expected = open_run(run), open_run(whole)
    for name in set(SERIES) - {"grad"}:
        assert got[name].values.tobytes() == expected[name].values.tobytes()
    lost = np.isnan(got.grad.values) & ~np.isnan(expected.grad.values)
    assert set(np.flatnonzero(lost.any((1, 2)))) == {4, 5, 6, 7}
    tokens = np.flatnonzero(lost.any((0, 2)))
    assert 0 < tokens.size < 300  # the other chunks of the shard stay
    assert np.array_equal(tokens, np.arange(tokens[0], tokens[-1] + 1))
    assert lost[4:8, tokens].all()
    np.testing.assert_array_equal(got.grad.values[~lost], expected.grad.values[~lost])
    root = json.loads((run / "zarr.json").read_bytes())["attributes"]
    assert root["status"] == "complete"
    (entry,) = repairs(run)
    assert {**entry, "time": ""} == {
        "time": "", "array": "grad", "block": 1, "part": 0, "chunks": [1], "rows": [4, 8]
    }  # fmt: skip


@pytest.mark.parametrize("name", ["W", "loss"])
def test_a_lost_array_becomes_nan(run: Path, whole: Path, name: str) -> None:
    shutil.rmtree(run / name)
    repair(run, fill_damaged=True, yes=True)
    assert_sound(run)
    assert np.isnan(open_run(run)[name].values).all()
    assert open_run(run).sizes["step"] == 11
    # The writer goes on, and what it cuts off is recorded no more.
    source = open_run(whole)
    with RunWriter.resume(run, rows=10) as writer:
        row = {each: source[each].values[10] for each in SERIES if each != "step"}
        writer.append(step=10, **row)
    assert_sound(run)
    assert max(entry["rows"][1] for entry in repairs(run)) == 10


def test_step_has_no_nan_so_its_rows_go(run: Path) -> None:
    flip(run / "step" / "c.2", 99)
    break_chunk(run, "grad", 1)
    found = repair(run, fill_damaged=True, yes=True)
    assert found.rows == 8
    assert "8 stay: step, block 2" in found.actions[1]
    assert assert_sound(run) == ("grad has NaN in steps 4 to 7: a repair filled what was damaged",)


def test_only_the_damaged_array_is_dropped(run: Path, whole: Path) -> None:
    break_chunk(run, "grad", 1)
    before = contents(run)
    planned = repair(run, drop_arrays=["grad"])
    assert contents(run) == before
    assert planned.actions[0] == "the array grad is dropped: damaged in steps 4 to 7"
    repair(run, drop_arrays=["grad"], yes=True)
    assert not (run / "grad").exists()
    assert assert_sound(run) == ("grad is missing: a repair dropped it",)
    got, expected = open_run(run), open_run(whole)
    assert "grad" not in got
    for name in set(SERIES) - {"grad"}:
        assert got[name].values.tobytes() == expected[name].values.tobytes()


def test_a_damaged_coordinate_is_dropped(run: Path) -> None:
    flip(run / "token_text" / "c.0", 140)
    found = repair(run)
    assert (found.damaged, found.alternatives) == (
        {"token_text": ""},
        ("--drop-array token_text",),
    )
    repair(run, drop_arrays=["token_text"], yes=True)
    assert_sound(run)
    assert "token_text" not in open_run(run).coords


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["loss"], "cannot drop loss: it is not damaged; damaged arrays: W, token"),
        (["nothing"], "cannot drop nothing: it is not an array of the run"),
        (["token"], "cannot drop token: every run of these arrays needs it"),
        (["W"], "cannot drop W: a run needs one of W, delta, cells"),
    ],
)
def test_what_cannot_be_dropped_is_refused(run: Path, names: list[str], message: str) -> None:
    break_chunk(run, "W", 1)
    flip(run / "token" / "c.0", 140)
    before = contents(run)
    with pytest.raises(InvalidArgument, match=message):
        repair(run, drop_arrays=names, yes=True)
    assert contents(run) == before


def test_an_interrupted_replacement_leaves_the_old_run_or_is_resumed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before each of its writes and removals, one after the other."""

    def mend() -> None:
        repair(run, fill_damaged=True, drop_arrays=["loss"], yes=True)

    break_chunk(run, "grad", 1)
    (run / "loss" / "c.2").unlink()
    module = import_module("trajstore.integrity.repair")
    kept = run.with_name("kept")
    shutil.copytree(run, kept)
    states = {"old": 0, "new": 0}
    for writes in range(40):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        left = [writes]
        with monkeypatch.context() as patch:
            patch.setattr(module, "put", _until(module.put, left))
            patch.setattr(Path, "unlink", _until(Path.unlink, left))
            try:
                mend()
                ended = True
            except KeyboardInterrupt:
                ended = False
        for lock in run.parent.glob(".run.zarr.lock"):
            lock.unlink()
        planned = repair(run)
        if planned.rows == 11:  # of a repair that has begun no rows go, without any option
            states["new"] += 1
            repair(run, yes=True)
        else:
            assert states["new"] == 0
            states["old"] += 1
            assert planned.damaged == {"grad": "steps 4 to 7", "loss": "steps 8 to 10"}
            mend()
        assert_sound(run)
        assert len(repairs(run)) == 2
        if ended:
            break
    assert ended
    assert states["old"] == 1  # before the root
    assert states["new"] > 2


def _until(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        if left[0] <= 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return call(*args, **options)

    return counted


def test_a_replacement_survives_a_loss_of_power(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_chunk(run, "grad", 1)
    flip(run / "token_text" / "c.0", 140)
    disk = Disk(monkeypatch)
    assert repair(run, fill_damaged=True, drop_arrays=["token_text"], yes=True).actions
    assert disk.survives(run / "grad")
    assert disk.survives(run / "step")
    assert disk.early == []
