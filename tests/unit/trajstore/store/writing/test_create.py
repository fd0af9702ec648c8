"""Runs and files that appear whole or not at all, and annotations of runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from bits_and_calls import Cli
from disk import Disk

from trajstore import RunWriter, open_run, verify
from trajstore.errors import FormatError, InvalidArgument, RunExists, RunLocked
from trajstore.exchange.token_tables import texts_of
from trajstore.store.storage.lock import RunLock
from trajstore.store.writing.create import annotate_run, staged_file, staged_folder, staged_run


def write(path: Path, value: int, **options: Any) -> None:
    variables = {"W": "float32"}
    with RunWriter.create(path, token=[1, 2], hidden=3, variables=variables, **options) as run:
        run.append(step=0, W=np.full((2, 3), value, "f4"))


def value(path: Path) -> float:
    return float(open_run(path).W.values[0, 0, 0])


@pytest.fixture
def dead() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("kind", [staged_file, staged_folder, staged_run])
def test_leftovers_of_killed_writers_are_removed_and_a_failure_leaves_none(
    tmp_path: Path, kind: Any, dead: int
) -> None:
    partial, old = (tmp_path / f".run.zarr.{dead}{end}" for end in (".partial", ".old"))
    partial.write_text("of a file")
    (old / "W").mkdir(parents=True)
    (tmp_path / ".run.zarr.lock").write_text("{}")
    with pytest.raises(RuntimeError), kind(tmp_path / "run.zarr") as place:  # noqa: PT012
        assert not partial.exists()
        assert not old.exists()
        if kind is staged_run:
            write(place, 1)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_is_replaced_whole_and_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """With the system call that exchanges two folders, and without it."""
    if not at_once:
        monkeypatch.setattr("trajstore.store.writing.create.exchange", lambda one, other: False)
    disk, run, file = Disk(monkeypatch), tmp_path / "new" / "run.zarr", tmp_path / "other" / "file"
    survived: list[bool] = []
    remove = shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        survived.append(disk.survives(run, below=tmp_path))
        remove(path, **options)

    with staged_run(run) as new:
        write(new, 1, fsync=False)
    with RunLock.acquire(run), pytest.raises(RunLocked), staged_run(run, overwrite=True):
        pass
    monkeypatch.setattr(shutil, "rmtree", watched)
    disk.calls.clear()
    with staged_run(run, overwrite=True) as new:
        write(new, 2, fsync=False)
        assert value(run) == 1
    assert value(run) == 2
    assert disk.survives(run, below=tmp_path)
    # The old one gets another name, and is removed, after the new one has survived.
    assert disk.calls[-1][0] == ("move" if at_once else "flush")
    write(run, 3, overwrite=True)
    assert value(run) == 3
    assert survived == [True, True], "before what it replaced is removed"
    with staged_file(file) as new:
        new.write_text("x")
    assert disk.survives(run, below=tmp_path)
    assert disk.survives(file, below=tmp_path)
    assert disk.early == []
    assert list(run.parent.iterdir()) == [run]


def test_verify_names_what_the_dead_have_left(tmp_path: Path, dead: int) -> None:
    run = tmp_path / "run.zarr"
    write(run, 1)
    (tmp_path / ".run.zarr.lock").write_text("{}")
    folder = tmp_path / f".run.zarr.{dead}.partial"
    folder.mkdir()
    (folder / "piece").write_bytes(bytes(2048))
    notes = " ".join(verify(run).notes)
    assert f"{folder.name} (2 KiB)" in notes
    assert ".run.zarr.lock (2 B)" in notes


ROWS, BLOCK = 10, 4
VARIABLES = {"W": "bfloat16", "logits": "float32", "loss": "float32", "param_norm": "float32"}
ROW: dict[str, Any] = {"logits": np.ones(3, "f4"), "loss": 1.0, "param_norm": np.ones(2, "f4")}


def write_steps(path: Path, **coordinates: Any) -> Path:
    """A run with names of parameters and a population, which annotations keep."""
    with RunWriter.create(
        path, token=[3, 5, 7], hidden=2, variables=VARIABLES, parameter=["a", "b"],
        populations={"is_odd": [True, True, False]}, block_rows=BLOCK, config={"a": 1},
        **coordinates,
    ) as run:  # fmt: skip
        for step in range(ROWS):
            run.append(step, W=np.full((3, 2), step, "f4"), **ROW)
    return path


def test_an_annotated_run_equals_one_recorded_with_the_labels(tmp_path: Path) -> None:
    run = write_steps(tmp_path / "run.zarr")
    (run / "notes.txt").write_text("mine")
    notes = [{"note": "a test", "first_step": 1, "last_step": 3, "count": 2}]
    with RunWriter.resume(run) as writer:
        writer.notes = notes
    inodes = {file: (run / file).stat().st_ino for file in ("W/c.0.0.0", "loss/c.1")}
    before = open_run(run).attrs
    told = {
        "is_dead": [True, False, False],
        "token_count": [0, 2, 1],
        "token_text": ["a", "b", "ü"],
    }
    assert annotate_run(run, **told) == tuple(told)  # type: ignore[arg-type]
    recorded = write_steps(tmp_path / "recorded.zarr", **told)
    found = verify(run)
    assert found.clean, found.problems
    assert open_run(run).attrs["notes"] == notes
    (run / "notes.txt").unlink()
    assert verify(run).notes == verify(recorded).notes
    xr.testing.assert_identical(
        open_run(run).load().drop_attrs(), open_run(recorded).load().drop_attrs()
    )
    for name in ("W", "logits", "is_dead", "token_text"):
        one, other = (zarr.open_group(path)[name].attrs.asdict() for path in (run, recorded))
        assert one == other
    after = open_run(run).attrs
    digest = open_run(recorded).attrs["content_digest"]
    assert after["content_digest"] == digest != before["content_digest"]
    assert after["fingerprint"] != before["fingerprint"]
    changed = ("content_digest", "fingerprint", "updated")
    assert {k: v for k, v in after.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    assert inodes == {file: (run / file).stat().st_ino for file in inodes}
    with RunWriter.resume(run) as more:
        more.append(ROWS, W=np.ones((3, 2), "f4"), **ROW)
    assert verify(run).clean


def test_what_cannot_be_is_refused_and_what_is_there_is_replaced_only_if_asked(
    tmp_path: Path,
) -> None:
    run = write_steps(tmp_path / "run.zarr", is_dead=[True, False, False])
    before = open_run(run).attrs
    for given, message in (
        ({}, "got no coordinate"),
        ({"token_text": ["a"]}, "got 1 values, expected 3"),
        ({"token_count": [0, 1, 0]}, "position 2"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            annotate_run(run, **given)
    with pytest.raises(RunExists, match="already has is_dead"):
        annotate_run(run, is_dead=[False] * 3)
    assert open_run(run).attrs == before
    assert list(tmp_path.iterdir()) == [run]
    annotate_run(run, is_dead=[False] * 3, overwrite=True)
    assert not open_run(run).is_dead.values.any()
    assert verify(run).clean


def test_the_command_takes_masks_a_text_and_texts(tmp_path: Path, trajstore_cli: Cli) -> None:
    pytest.importorskip("transformers")
    run, text, texts = (tmp_path / name for name in ("run.zarr", "text", "texts.json"))
    write_steps(run)
    np.save(tmp_path / "dead_mask.npy", np.arange(10) % 5 == 3)
    done = trajstore_cli("annotate", run, "--masks", tmp_path / "dead_mask.npy")
    assert "1 of 3 tokens are dead" in done.stdout
    assert open_run(run).is_dead.values.tolist() == [True, False, False]
    text.write_text("\x03\x03\x07 and more")
    trajstore_cli("annotate", run, "--corpus", text, "--tokenizer", "ascii", "--overwrite")
    ds = open_run(run)
    assert ds.token_count.values.tolist() == [2, 0, 1]
    assert ds.is_dead.values.tolist() == [False, True, False]
    assert ds.token_text.values.tolist() == [r"\x03", r"\x05", r"\x07"]
    texts.write_text('["a", "b", "c", "\\n", "e", "f", "g", "é"]')
    trajstore_cli("annotate", run, "--texts", texts, "--overwrite")
    assert open_run(run).token_text.values.tolist() == ["\n", "f", "é"]
    both = ["--texts", texts, "--tokenizer", "ascii"]
    for wrong in (both, ["--corpus", text], []):
        trajstore_cli("annotate", run, *wrong, rc=2)


@pytest.mark.parametrize(
    ("text", "message"), [('["a"]', "1 texts"), ('{"a": 0}', "a list"), ("a\nb", "not JSON")]
)
def test_a_file_that_holds_no_text_for_each_token(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "texts.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        texts_of(tmp_path / "texts.json", np.array([3, 5, 7]))
