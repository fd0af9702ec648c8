from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from bits_and_calls import nightly_but
from checkpoints import write_checkpoint
from damage import (
    COPIES,
    VALUES,
    Damage,
    all_of,
    arrays_of,
    contents,
    copied,
    flip,
    in_chunk,
    lost,
    member,
    root,
    times,
    wide_run,
    write,
)
from disk import Disk, failing_moves, stand_in

from trajstore import RunWriter, open_run, repair, verify
from trajstore.errors import InvalidArgument, RunLocked
from trajstore.integrity.repair import Repair

SERIES = ("step", "W", "grad", "exp_avg", "loss")
BLOCK = 4


LIKE_OTHERS = (
    "native_dtype", "shape.1", "0.name", "fill_value is missing", "no end", "empty", "updated",
    "config.why", "segments", "notes", "trajstore_format",
)  # fmt: skip


def few_of_a_kind(damages: tuple[Damage, ...]) -> list[Any]:
    return nightly_but(damages, *(each for each in damages if not each.name.endswith(LIKE_OTHERS)))


def mended(run: Path) -> Repair:
    """Repair a run, first dry; it is sound afterwards."""
    before = times(run.parent)
    planned = repair(run, dry_run=True)
    assert times(run.parent) == before  # nor was there a lock for a moment
    assert not planned.done
    done = repair(run)
    assert done.done
    assert (done.actions, done.rows) == (planned.actions, planned.rows)
    assert done.actions
    assert done.unrepaired == ()
    found = verify(run)
    assert found.clean, [str(problem) for problem in found.problems]
    assert found.notes == ()
    after = contents(run)
    again = repair(run)
    assert (again.actions, again.unrepaired) == ((), ())
    assert contents(run) == after
    return done


def test_the_damage_and_what_is_whole_are_named(run: Path) -> None:
    all_of(in_chunk("grad", 1, 0), lost("loss/c.2"))(run)
    found = repair(run, dry_run=True)
    assert found.damaged == {"grad": "steps 4 to 7", "loss": "steps 8 to 10"}
    assert found.whole == ("step", "W", "exp_avg")
    assert found.rows == 4
    assert found.exports == ("--variables W,exp_avg", "--fill-damaged")
    flip(run / "token_text" / "c.0", 140)  # only --fill-damaged leaves it out
    assert repair(run, dry_run=True).exports == ("--fill-damaged",)
    found = repair(run)  # all but the coordinate
    assert found.rows == 4
    (left,) = found.unrepaired
    assert left.startswith("token_text, block 0")
    assert [problem.array for problem in verify(run).problems] == ["token_text"]
    assert repair(run, dry_run=True).actions == ()
    flip(run / "step" / "c.0", 99)  # no copy holds more
    assert repair(run, dry_run=True).exports == ()
    (run / "token_text" / "c.0").unlink()  # without which no run is opened
    assert repair(run, dry_run=True).exports == ()


def assert_first_rows(run: Path, whole: Path, rows: int) -> None:
    """All values of the rows that stay are as they were, and so are their files."""
    got, expected = open_run(run), open_run(whole)
    assert got.sizes["step"] == rows
    assert got.attrs["committed_rows"] == rows
    for name in expected.variables:
        values = expected[name].values[:rows] if name in SERIES else expected[name].values
        assert got[name].values.tobytes() == values.tobytes() or name == "token_text", name
    assert list(got.token_text.values) == list(expected.token_text.values)
    shards = {key: data for key, data in contents(whole).items() if "/c." in key}
    for key, data in shards.items():
        name, block = key.split("/")[0], int(key.split("/c.")[1].split(".")[0])
        if name not in SERIES or block * BLOCK < rows:
            assert (run / key).read_bytes() == data
        else:
            assert not (run / key).exists()


def test_rows_go_from_the_first_broken_block_on(
    run: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair survives a loss of power, and does not report attributes that stay."""
    (run / "W" / "c.2.0.0").unlink()
    (run / "grad" / "zarr.json").unlink()
    flip(run / "step" / "c.1", 99)
    disk = Disk(monkeypatch)
    found = mended(run)
    assert disk.survives(run / "W")
    assert disk.survives(run / "grad")
    assert disk.early == []
    assert (found.rows_before, found.rows) == (11, BLOCK)
    assert found.actions[0].startswith("7 of 11 rows are dropped, from row 4 on; 4 stay: step, bl")
    assert "and 1 more" in found.actions[0]
    assert not [action for action in found.actions if "receives the attributes" in action]
    assert_first_rows(run, whole, BLOCK)
    assert open_run(run).attrs["status"] == "interrupted"


def test_a_lost_array_costs_every_row_and_the_run_still_continues(run: Path, whole: Path) -> None:
    shutil.rmtree(run / "loss")
    found = mended(run)
    assert "none stay" in found.actions[0]
    assert_first_rows(run, whole, 0)
    source = open_run(whole)
    with RunWriter.resume(run) as writer:
        for row in range(11):
            values = {name: source[name].values[row] for name in SERIES if name != "step"}
            writer.append(step=row, **values)
    assert verify(run).clean
    assert_first_rows(run, whole, 11)


def test_what_a_crash_leaves_is_a_note_and_goes(run: Path, whole: Path) -> None:
    copied("W/c.2.0.0", "W/c.3.0.0")(run)
    write(run / "W" / ".c.4.0.0.123.partial", b"half")
    write(run / "notes.txt", b"mine")
    noted = verify(run)
    assert noted.clean
    assert "W has shards past the commit (1)" in noted.notes[0]
    assert "temporary files (1)" in noted.notes[1]
    assert noted.notes[2] == "notes.txt is not part of the run"
    (run / "notes.txt").unlink()
    member("W", "shape.0", 15, "own")(run)
    write(run / "grad" / "c.4.0.0", b"torn")
    root("attributes.status", "recording")(run)
    found = mended(run)
    assert [action.split(" (")[0] for action in found.actions] == [
        "the status becomes interrupted: no process is recording the run",
        "W/zarr.json is reset from 15 rows to 11: the others were never committed",
        "shards past the commit are removed",
        "temporary files of unfinished writes are removed",
    ]
    assert_first_rows(run, whole, 11)
    assert open_run(run).attrs["status"] == "interrupted"


@pytest.mark.parametrize("drops", [False, True])
def test_an_attribute_added_with_zarr_stays_and_a_changed_one_does_not(
    run: Path, whole: Path, drops: bool
) -> None:
    """Also if zarr drops the consolidated metadata, as with this option."""
    group = zarr.open_group(run, mode="r+", use_consolidated=False if drops else None)
    group.attrs["mine"] = {"a": 1}
    group.attrs["config"] = {"changed": True}
    told = "\n".join(map(str, verify(run).problems))
    assert "attribute mine is missing in its copy in step" in told
    assert ("has lost its consolidated metadata" in told) is drops
    mended(run)
    assert_first_rows(run, whole, 11)
    changed = {key: open_run(run).attrs[key] for key in ("updated", "fingerprint")}
    assert open_run(run).attrs == open_run(whole).attrs | {"mine": {"a": 1}} | changed


def test_a_wrong_fingerprint_stays_wrong_beside_an_added_attribute(run: Path) -> None:
    all_of(root("attributes.fingerprint", "ab" * 32), root("attributes.mine", 1))(run)
    assert repair(run).done
    (problem,) = verify(run).problems
    assert "the fingerprint differs" in problem.message


def test_notes_of_the_rows_that_stay_are_kept(run: Path) -> None:
    notes = [{"note": "a", "first_step": n, "last_step": n, "count": 1} for n in (2, 6)]
    root("attributes.notes", notes)(run)
    assert repair(run).actions == ()
    assert open_run(run).attrs["notes"] == notes
    (run / "W" / "c.1.0.0").unlink()
    repair(run)
    assert open_run(run).attrs["notes"] == notes[:1]


@pytest.mark.parametrize("damage", few_of_a_kind(COPIES), ids=lambda damage: damage.name)
def test_a_damaged_copy_of_the_metadata_is_named_and_restored_from_the_other(
    run: Path, whole: Path, damage: Damage
) -> None:
    """The digests of the commit decide if both are possible."""
    damage.act(run)
    here, before = contents(run), contents(whole)
    found = verify(run)
    assert found.rows == 11
    assert re.search(damage.told, "\n".join(map(str, found.problems)))
    damaged = {key for key in before if json_of(here.get(key)) != json_of(before[key])}
    assert {str(problem.path.relative_to(run)) for problem in found.problems} == damaged
    assert repair(run).actions
    assert verify(run).clean
    after = {key: json.loads(data) for key, data in contents(run).items() if "json" in key}
    changed = {"updated": after["zarr.json"]["attributes"]["updated"]}
    if damage.name in ("root: missing", "root: cut"):  # then its status is lost
        changed["status"] = "interrupted"
    expected = {key: json.loads(before[key]) for key in after}
    expected["zarr.json"]["attributes"] |= changed
    assert after == expected


def json_of(data: bytes | None) -> Any:
    """Content of a metadata file; the bytes themselves of what is none."""
    try:
        return json.loads(data or b"")
    except ValueError:
        return data


def test_if_the_digests_prove_no_copy_the_one_in_the_folders_counts(
    run: Path, tmp_path: Path
) -> None:
    """Here because of a root of another run, which would cost all rows."""
    shutil.copy(wide_run(tmp_path / "other.zarr") / "zarr.json", run)
    found = repair(run)
    assert found.rows == 11
    assert "the fingerprint differs" in str(verify(run).problems[0])


def test_what_the_system_refuses_to_read_proves_no_copy(run: Path) -> None:
    member("W", "attributes.units", "furlong", "own")(run)
    path, kept = run / "token" / "c.0", run.with_name("kept")
    path.rename(kept)
    path.mkdir()
    before = contents(run)
    assert repair(run).actions == ()
    assert contents(run) == before
    path.rmdir()
    kept.rename(path)
    mended(run)


@pytest.mark.parametrize("damage", few_of_a_kind(VALUES), ids=lambda damage: damage.name)
def test_damaged_values_are_named_and_cost_the_rows_from_there_on(
    run: Path, whole: Path, damage: Damage
) -> None:
    damage.act(run)
    problems, before = [str(problem) for problem in verify(run).problems], contents(run)
    assert re.search(damage.told, "\n".join(problems), re.MULTILINE)
    if damage.kept is None:
        found = repair(run)
        assert (found.actions, found.rows, list(found.unrepaired)) == ((), 11, problems)
        assert contents(run) == before
    else:
        assert len(problems) == 1
        assert mended(run).rows == damage.kept
        assert_first_rows(run, whole, damage.kept)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_arrays_of_somebody_else_are_named_and_left(run: Path) -> None:
    group = zarr.open_group(run, mode="r+", use_consolidated=False)
    group.create_array("mask", data=np.arange(3), dimension_names=["place"])
    group.create_array("along", data=np.arange(11), dimension_names=["step"])
    group.attrs["m"] = 1
    zarr.consolidate_metadata(run)
    group.create_array("mine", data=np.arange(3))  # without names of dimensions
    (run / "W" / "c.2.0.0").unlink()
    found = repair(run)
    assert found.rows == 8
    assert found.unrepaired == ()
    assert verify(run).clean
    assert verify(run).notes == tuple(
        f"{name} is an array that is not part of the run" for name in ("along", "mask", "mine")
    )
    assert open_run(run).sizes["step"] == 8
    assert open_run(run).attrs["m"] == 1
    assert "along" not in open_run(run)  # its rows would contradict those of the run
    mask = json.loads((run / "mask" / "zarr.json").read_bytes())
    assert mask["shape"] == [3]
    assert arrays_of(json.loads((run / "zarr.json").read_bytes()))["mask"] == mask
    assert list(zarr.open_group(run, mode="r")["mask"][...]) == [0, 1, 2]
    member("mask", "dimension_names", 5, "own")(run)
    for act in (root("consolidated_metadata", None), lost("zarr.json")):
        act(run)
        assert repair(run).unrepaired == ()
        assert verify(run).clean
        assert open_run(run).attrs["m"] == 1
    assert list(zarr.open_array(run / "mine")[...]) == [0, 1, 2]


def test_a_broken_checkpoint_goes_and_a_good_one_stays(run: Path) -> None:
    folder = run.with_name("run.ckpt")
    good, bad = folder / "step-00000004.safetensors", folder / "step-00000008.safetensors"
    for path in (good, bad):
        write_checkpoint(path)
    flip(bad, 8 * (bad.stat().st_size - 2))
    data = good.read_bytes()
    found = mended(run)
    assert found.actions[0].startswith("run.ckpt/step-00000008.safetensors is removed")
    assert not bad.exists()
    assert good.read_bytes() == data


def test_what_would_be_done_is_said_where_nothing_can_be_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *more, **options)

    (run / "W" / "c.2.0.0").unlink()
    stand_in(monkeypatch, open=refuse)
    found = repair(run, dry_run=True)
    assert (found.rows_before, found.rows, found.done) == (11, 8, False)
    with pytest.raises(InvalidArgument, match="which is read-only"):
        repair(run)


@pytest.mark.parametrize("writes", nightly_but(range(0, 6, 2), 2))
def test_a_repair_that_ends_in_the_middle_can_be_repaired(
    run: Path, whole: Path, writes: int
) -> None:
    """Damage of every kind, and the power goes after so many writes."""
    all_of(lost("W/c.2.0.0"), lost("zarr.json"), copied("loss/c.2", "loss/c.3"))(run)
    member("grad", "shape.0", 15, "own")(run)
    with failing_moves(writes), pytest.raises(OSError, match="No space left"):
        repair(run)
    mended(run)
    assert_first_rows(run, whole, 8)


def test_what_somebody_records_is_not_touched_by_any_link(run: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "link.zarr"
    link.parent.mkdir()
    link.symlink_to(run)
    with RunWriter.resume(run):
        before = contents(run)
        for path, dry_run in ((run, True), (run, False), (link, False)):
            with pytest.raises(RunLocked):
                repair(path, dry_run=dry_run)
        assert contents(run) == before
    assert list(link.parent.iterdir()) == [link]
