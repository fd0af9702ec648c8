"""Runs of format 1 become runs of format 2: the same bits, and gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import xarray as xr
from click.testing import CliRunner
from damage import contents, edit
from exchange_runs import assert_same_run

import trajstore
from trajstore import FormatError, InvalidArgument, RunExists, RunNotFound, RunWriter
from trajstore.cli.main import main
from trajstore.store.metadata.zarr_json import CHANGING

DATA = Path(__file__).parents[3] / "data"
GOLDEN = ("delta", "delta-large", "portable")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "format1-delta.zarr", tmp_path / "old.zarr"))


@pytest.mark.parametrize("name", GOLDEN)
def test_an_upgraded_run_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    old, new = DATA / f"format1-{name}.zarr", tmp_path / "new.zarr"
    calls: list[tuple[int, int]] = []
    before = contents(old)
    done = trajstore.upgrade(old, new, on_progress=lambda *call: calls.append(call))
    assert contents(old) == before
    assert (done.from_format, done.to_format, done.rows, done.status) == (1, 2, 7, "complete")
    assert done.notes == ()
    assert calls
    assert calls[-1][0] == calls[-1][1]
    assert_same_run(old, new)
    first, second = trajstore.open_run(old).load(), xr.open_zarr(new).load()
    assert first.variables.keys() == second.variables.keys()
    for key in first.variables:
        assert first[key].attrs | {"root_attributes": ""} == second[key].attrs | {
            "root_attributes": ""
        }
        assert first[key].dtype == second[key].dtype
        if first[key].dtype.kind != "O":
            assert first[key].values.tobytes() == second[key].values.tobytes()
    written = {*CHANGING, "trajstore_format", "trajstore_version"}
    kept = {key: value for key, value in first.attrs.items() if key not in written}
    assert kept.items() <= second.attrs.items()
    assert second.attrs["trajstore_format"] == 2
    assert second.attrs["upgraded"] == {
        key: first.attrs[key] for key in ("trajstore_format", "trajstore_version", "updated")
    }
    assert trajstore.verify(new).clean


def test_what_is_interrupted_stays_so_and_is_gone_on_with(old: Path, tmp_path: Path) -> None:
    for path in (old / "zarr.json", old / "W" / "zarr.json"):
        edit(path, lambda document: document["attributes"].update(status="interrupted"))
    new = tmp_path / "new.zarr"
    assert trajstore.upgrade(old, new).status == "interrupted"
    assert trajstore.open_run(new).attrs["status"] == "interrupted"
    with RunWriter.resume(new) as run:
        for name, place in run.next_row().items():
            place[...] = len(name)
        run.commit_row(70)
    assert trajstore.open_run(new).attrs["trajstore_format"] == 2
    assert trajstore.open_run(new).step.values.tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert trajstore.verify(new).clean


def test_a_run_that_was_being_recorded_has_what_was_committed(old: Path, tmp_path: Path) -> None:
    edit(old / "zarr.json", lambda document: document["attributes"].update(status="recording"))
    done = trajstore.upgrade(old, tmp_path / "new.zarr")
    assert (done.rows, done.status) == (7, "interrupted")
    assert "committed" in done.notes[0]


def test_checkpoints_are_those_of_the_new_run_too(old: Path, tmp_path: Path) -> None:
    folder, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    folder.mkdir()
    (folder / "step-00000060.safetensors").write_bytes(b"six")
    (folder / "notes.txt").write_text("somebody else's")
    assert trajstore.upgrade(old, tmp_path / "new.zarr").checkpoints == 1
    assert contents(new) == {"step-00000060.safetensors": b"six"}
    shutil.rmtree(tmp_path / "new.zarr")
    with pytest.raises(RunExists, match="checkpoints of another run"):
        trajstore.upgrade(old, tmp_path / "new.zarr")
    assert not (tmp_path / "new.zarr").exists()
    (folder / "step-00000060.safetensors").unlink()
    (folder / "step-00000060.safetensors").write_bytes(b"seven")
    trajstore.upgrade(old, tmp_path / "new.zarr", overwrite=True)
    assert contents(new) == {"step-00000060.safetensors": b"seven"}


def test_what_cannot_be_upgraded_is_refused(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    trajstore.upgrade(old, new)
    with pytest.raises(InvalidArgument, match="of store format 2 already"):
        trajstore.upgrade(new, tmp_path / "newer.zarr")
    with pytest.raises(RunExists):
        trajstore.upgrade(old, new)
    with pytest.raises(InvalidArgument, match="is the run itself"):
        trajstore.upgrade(old, old, overwrite=True)
    with pytest.raises(InvalidArgument, match="local folder"):
        trajstore.upgrade("s3://bucket/run.zarr", tmp_path / "newer.zarr")
    with pytest.raises(RunNotFound):
        trajstore.upgrade(tmp_path / "nothing.zarr", tmp_path / "newer.zarr")
    with pytest.raises(InvalidArgument, match="memory budget"):
        trajstore.upgrade(old, tmp_path / "newer.zarr", memory="1KiB")
    (old / "W" / "c.1.0.0").unlink()
    with pytest.raises(FormatError, match="missing"):
        trajstore.upgrade(old, tmp_path / "newer.zarr")
    edit(old / "zarr.json", lambda document: document["attributes"].pop("encoding"))
    with pytest.raises(FormatError, match="trajstore repair"):
        trajstore.upgrade(old, tmp_path / "newer.zarr")
    assert {path.name for path in tmp_path.iterdir()} == {"old.zarr", "new.zarr"}


def test_the_command_says_what_was_made(old: Path, tmp_path: Path) -> None:
    new = str(tmp_path / "new.zarr")
    result = CliRunner().invoke(main, ["upgrade", str(old), "-o", new])
    assert result.exit_code == 0, result.output
    assert "format 2 of 1, 7 rows" in " ".join(result.output.split())
    again = CliRunner().invoke(main, ["upgrade", str(old), "-o", new, "--overwrite", "--json"])
    assert json.loads(again.stdout)["rows"] == 7
    refused = CliRunner().invoke(main, ["upgrade", new, "-o", str(tmp_path / "newer.zarr")])
    assert refused.exit_code != 0
    assert "nothing to upgrade" in " ".join(refused.output.split())
