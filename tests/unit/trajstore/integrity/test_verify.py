from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
import zarr
from altered_runs import rewrite
from bits_and_calls import Cli
from checkpoints import write_checkpoint
from damage import (
    all_of,
    attribute,
    contents,
    cut,
    flip,
    member,
    root,
    shard_index,
    times,
    with_zarr,
    write,
    write_shard,
)
from disk import objects_of, stand_in
from golden_runs import unpack

from trajstore import RunWriter, open_run, repair, verify
from trajstore.errors import FormatError, InvalidArgument, RunNotFound
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.integrity import metadata_checks as inspection
from trajstore.integrity.verify import Verification, check_checkpoints


def only(found: Verification) -> Any:
    assert len(found.problems) == 1, [str(problem) for problem in found.problems]
    return found.problems[0]


def test_a_sound_run_is_clean_and_all_of_it_was_read(run: Path) -> None:
    calls: list[tuple[int, int]] = []
    found = verify(run, on_progress=lambda *call: calls.append(call))
    assert found.clean
    assert found.notes == ()
    assert (found.rows, found.arrays, found.shards) == (11, 9, 15)
    chunks = objects_of(run)
    assert found.bytes == sum(map(len, chunks.values()))
    # W, grad and exp_avg have three chunks of 128 tokens a shard.
    assert found.chunks == 3 * (3 * 3 + 2) + 4
    shards = sum(len(data) for key, data in chunks.items() if key.split("/")[0] in
                 ("step", "W", "grad", "exp_avg", "loss"))  # fmt: skip
    assert calls[-1] == (shards, shards)
    assert verify(run, threads=1) == found
    json.dumps(found.facts())


def test_a_zip_file_is_checked_as_its_content(
    run: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    packed = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", run))
    sound, found = verify(run), verify(packed)
    assert found.clean
    assert (found.path, found.rows, found.bytes) == (packed, sound.rows, sound.bytes)
    flip(run / "W" / "c.1.0.0", 5)
    with zipfile.ZipFile(packed, "w") as file:
        for key, data in contents(run).items():
            file.writestr(key, data)
    assert only(verify(packed)).path == packed / "W" / "c.1.0.0"
    trajstore_cli("verify", packed, rc=1)
    with zipfile.ZipFile(packed, "a") as file:
        file.writestr("W/large", b"")
        file.filelist[-1].file_size = 1 << 60
    with pytest.raises(FormatError, match=r"packed.zip unpacks to .*, but .* free; set TM"):
        verify(packed)


def cut_run(run: Path) -> RunWriter:
    return RunWriter.resume(run, rows=6)


def created_again(run: Path) -> None:
    shutil.rmtree(run)
    unpack(run.parent, run="compact.zarr").rename(run)


@pytest.mark.parametrize(("change", "rows"), [(cut_run, 6), (created_again, 11)])
def test_a_run_that_changes_meanwhile_is_looked_at_again(
    run: Path, change: Callable[[Path], Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its root is read; then a writer continues after fewer rows, or makes a new run."""
    real = inspection.read_metadata
    done: list[Any] = []

    def read(path: Path, array: str | None) -> Any:
        if array is not None and not done:
            done.append(change(run))
        return real(path, array)

    monkeypatch.setattr(inspection, "read_metadata", read)
    found = verify(run)
    assert (found.problems, found.rows) == ((), rows)


def test_every_chunk_and_the_label_are_checked_and_named(run: Path) -> None:
    for name, block in (("W", 1), ("exp_avg", 0), ("loss", 1), ("step", 2)):
        path, index = shard_index(run, name, block)
        chunks = [(offset, offset + length) for offset, length in index]
        for first, stop in (*chunks, (chunks[-1][1], path.stat().st_size)):
            bit = 8 * ((first + stop) // 2)
            flip(path, bit)
            problem = only(verify(run))
            assert (problem.array, problem.block, problem.path) == (name, block, path)
            assert (problem.first_byte, problem.stop_byte) == (first, stop)
            assert "checksum" in problem.message
            flip(path, bit)


def test_chunks_must_cover_the_shard(run: Path) -> None:
    path, index = shard_index(run, "W", 1)
    end, data = sum(index[-1]), path.read_bytes()
    for more, changed, message, span in (
        (b"", [*index[:2], (2**64 - 1, 2**64 - 1)], "chunk 2 is not stored", None),
        (b"", [*index[:2], (index[2][0], 10**9)], "chunk 2 ends beyond", None),
        (b"1234", index, "belong to no chunk", (end, end + 4)),
        (b"", [index[0], index[0], index[2]], "belong to two chunks", (0, index[0][1])),
    ):
        write_shard(run, "W", 1, data[:end] + more, changed)
        found = [problem for problem in verify(run).problems if message in problem.message]
        assert [(problem.array, problem.block) for problem in found] == [("W", 1)]
        assert span in (None, (found[0].first_byte, found[0].stop_byte))
        write(path, data)


def test_values_that_are_not_of_the_native_type_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    types = {"W": "bfloat16", "loss": "bfloat16"}
    with RunWriter.create(run, token=[0], hidden=1, variables=types, block_rows=2) as writer:
        for step in range(4):
            writer.append(step, W=np.zeros((1, 1), "f4"), loss=np.zeros((), "f4"))
    with_zarr("loss", 2, 0.1)(run)
    foreign, problem = verify(run).problems
    assert "another program wrote it" in foreign.message
    assert (problem.array, problem.block) == ("loss", 1)
    assert "bfloat16" in problem.message


@pytest.mark.parametrize(
    ("status", "changed", "clean"),
    [("recording", False, True), ("complete", False, False), ("recording", True, False)],
)
def test_only_a_resume_that_died_leaves_an_older_copy_of_the_attributes(
    run: Path, status: str, changed: bool, clean: bool
) -> None:
    """The fingerprint shows that the root has the present attributes, unless they were changed."""
    older = (run / "step" / "zarr.json").read_bytes()
    with RunWriter.resume(run, attributes={"config": {"why": "another"}}) as writer:
        writer.close("interrupted")
    (run / "step" / "zarr.json").write_bytes(older)
    root("attributes.status", status)(run)
    if changed:
        other = {"config": {"why": "forged"}}
        root("attributes.config", other["config"])(run)
        in_copy = "attributes.root_attributes"
        member("step", in_copy, lambda old: json.dumps(json.loads(old) | other), "root")(run)
    found = verify(run)
    assert found.clean == clean
    assert any("being changed" in note for note in found.notes) == clean


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_variable_that_a_user_adds_with_xarray_is_a_note(run: Path) -> None:
    ds = open_run(run)
    ds.assign(mine=ds.W.mean("hidden"))[["mine"]].to_zarr(run, mode="a")  # and step, again
    found = verify(run)
    assert found.clean, found.problems
    assert found.notes == (
        "mine is an array that is not part of the run",
        "step: another program wrote 3 shards again, with the recorded values",
    )
    assert open_run(run).mine.dims == ("step", "token")
    # A longer run no longer lists it: its rows would contradict those of the run.
    last = {str(name): ds[name].values[-1] for name in ds.data_vars}
    with RunWriter.resume(run) as writer:
        writer.append(step=11, **last)
    assert "mine" not in open_run(run)
    assert verify(run).clean
    # The same shards are problems if the values are not those of the run.
    with_zarr("W", 3, 0)(run)
    assert {problem.array for problem in verify(run).problems} == {"step", "W", None}


def test_numbers_before_the_first_step_are_a_note(small_run: tuple[Path, Any]) -> None:
    found = verify(small_run[0])
    assert found.clean
    assert [note.split()[0] for note in found.notes] == ["grad", "logits", "loss"]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_an_array_that_no_recorder_wrote_is_a_problem(run: Path) -> None:
    """zarr could read it, and nothing would vouch for what it reads."""
    group = zarr.open_group(run, mode="r+", use_consolidated=False)
    for name in ("W", "token"):
        source = group[name]
        values, attributes = np.asarray(source), source.attrs.asdict()
        dims = source.metadata.dimension_names
        group.create_array(
            name, data=values, chunks=(5, *values.shape[1:]), overwrite=True,
            dimension_names=dims, attributes=attributes,
        )  # fmt: skip
    zarr.consolidate_metadata(run)
    for found in (verify(run).problems, repair(run).unrepaired):
        foreign = [item for item in map(str, found) if "stored it in its own way" in item]
        assert {item.partition(":")[0] for item in foreign} == {"W", "token"}


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path) -> None:
    os.truncate(path, 1 << 40)  # sparse


@pytest.mark.parametrize(
    ("key", "act", "told"),
    [
        ("zarr.json", directory, "directory"),
        ("step/zarr.json", directory, "directory"),
        ("W/c.1.0.0", directory, "not a regular file"),
        ("token/c.0", endless, "more than 268,435,456 bytes"),
    ],
)
def test_what_the_system_refuses_to_read_is_named_and_nothing_is_put_in_its_place(
    run: Path, key: str, act: Callable[[Path], None], told: str
) -> None:
    """A later attempt may succeed."""
    act(run / key)
    before = times(run)
    problem = only(verify(run))
    assert (problem.path, problem.remedy) == (run / key, "none")
    assert told in problem.message
    found = repair(run)
    assert (found.actions, found.rows, found.unrepaired) == ((), found.rows_before, (str(problem),))
    assert times(run) == before


@pytest.mark.parametrize("first_byte", [None, 0])
def test_rows_stay_while_a_shard_or_one_of_its_chunks_cannot_be_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, first_byte: int | None
) -> None:
    path, real = run / "W/c.1.0.0", os.pread
    bad = path.stat()

    def pread(file: int, length: int, offset: int) -> bytes:
        is_there = offset + length == bad.st_size if first_byte is None else offset == first_byte
        if is_there and os.fstat(file).st_ino == bad.st_ino:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, length, offset)

    before = times(run)
    stand_in(monkeypatch, pread=pread)
    problem, found = only(verify(run)), repair(run)
    assert (problem.path, problem.first_byte, problem.remedy) == (path, first_byte, "none")
    assert "cannot be read: [Errno 5]" in problem.message
    assert (found.actions, found.rows, found.unrepaired) == ((), 11, (str(problem),))
    assert times(run) == before


def test_what_is_no_run_is_an_error_and_stays(tmp_path: Path, run: Path) -> None:
    (tmp_path / "empty").mkdir()
    # A Zarr of another program, which has the names of a run.
    W = ("step", "token", "hidden"), np.zeros((3, 2, 2), "i4")
    others = xr.Dataset({"W": W, "step": np.arange(3), "token": np.arange(2)})
    others.to_zarr(tmp_path / "others.zarr", consolidated=False)
    # The result of an analysis: coordinates of the run, and `step` with its copy of the root.
    series = shutil.ignore_patterns("W", "grad", "exp_avg", "loss")
    shutil.copytree(run, tmp_path / "result.zarr", ignore=series)
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    (tmp_path / "result.zarr" / "zarr.json").write_text(json.dumps(metadata))
    for name in ("others.zarr", "result.zarr"):
        without_root = shutil.copytree(tmp_path / name, tmp_path / f"rootless-{name}")
        (without_root / "zarr.json").unlink()
    before = contents(tmp_path)
    for check in (verify, repair):
        for name, told in (
            ("", r"name one of .*run\.zarr"),
            ("empty", r"is not a run: it has no zarr\.json"),
            ("others.zarr", "no trajstore_format"),
            ("result.zarr", "no trajstore_format"),
            ("rootless-others.zarr", "is not a run"),
            ("rootless-result.zarr", "is not a run"),
        ):
            with pytest.raises(FormatError, match=told):
                check(tmp_path / name)
        with pytest.raises(RunNotFound):
            check(tmp_path / "nothing.zarr")
        with pytest.raises(InvalidArgument, match="got threads=0"):
            check(run, threads=0)
    assert contents(tmp_path) == before


def test_another_format_is_not_judged(run: Path) -> None:
    all_of(attribute("trajstore_format", 9), attribute("trajstore_version", "9.1"))(run)
    with pytest.raises(FormatError, match=r"has store format 9, .* with the trajstore 9\.1 that"):
        verify(run)


def test_a_digest_that_differs_names_the_version_which_may_know_more(tmp_path: Path) -> None:
    run = unpack(tmp_path, run="delta.zarr")
    root("attributes.content_digest", "0" * 64)(run)
    (problem,) = verify(run).problems
    assert "trajstore 0.3.0.dev0 that recorded it" in problem.message


def test_far_more_shards_than_there_are_are_not_looked_for(run: Path) -> None:
    for name in ("step", "W", "grad", "exp_avg", "loss"):
        member(name, "shape.0", 1 << 44)(run)
    root("attributes.committed_rows", 1 << 44)(run)
    with pytest.raises(FormatError, match=r"announces [\d,]+ shards of \w+, and there are"):
        verify(run)


@pytest.mark.parametrize("name", ["grad", "step"])
def test_without_a_whole_copy_of_the_metadata_a_backup_is_needed(run: Path, name: str) -> None:
    cut(run / "zarr.json", 500)
    cut(run / name / "zarr.json", 50)
    before = contents(run)
    *problems, last = verify(run).problems
    assert {problem.path for problem in problems} == {run / "zarr.json", run / name / "zarr.json"}
    assert "restore the run from a backup" in last.message
    done = repair(run)
    assert (done.actions, len(done.unrepaired)) == ((), len(problems) + 1)
    assert contents(run) == before


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run.ckpt" / "step-00000007.safetensors"
    write_checkpoint(path)
    return path


def messages(path: Path) -> list[str]:
    found = list(check_checkpoints(path.parent.with_name("run.zarr")))
    assert {(problem.array, problem.path) for problem in found} <= {(None, path)}
    return [problem.message for problem in found]


def test_a_broken_tensor_is_named_with_its_bytes(checkpoint: Path) -> None:
    name = "random.state"
    with SafetensorsFile(checkpoint) as file:
        entry = file.entries[name]
    flip(checkpoint, 8 * entry.begin + 5)
    (problem,) = check_checkpoints(checkpoint.parent.with_name("run.zarr"))
    assert f"the tensor {name} does not fit its checksum" in problem.message
    assert (problem.first_byte, problem.stop_byte) == (entry.begin, entry.end)


def test_tensors_must_be_as_described_and_whole(checkpoint: Path) -> None:
    for size in (-1, 5):
        cut(checkpoint, size)
        assert len(messages(checkpoint)) == 1
    for dtype, shape in (("int32", [3, 4]), ("float32", [4, 3])):
        described = {"dtype": dtype, "shape": shape, "crc32c": 0}
        write_checkpoint(checkpoint, **{"model.weight": described})
        (told,) = messages(checkpoint)
        assert "type and shape" in told
    header = json.dumps({"__metadata__": {}}).encode()
    checkpoint.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "description" in messages(checkpoint)[0]


def test_every_flipped_bit_is_found(checkpoint: Path) -> None:
    """Anywhere: in the length, the header, its padding, the description and the tensors.

    Files of somebody else are no checkpoints.
    """
    for name in ("model.safetensors", "step-7.safetensors", "my-step-00000007"):
        (checkpoint.parent / name).write_bytes(b"mine")
    assert messages(checkpoint) == []
    size = 8 * checkpoint.stat().st_size
    for bit in random.Random(5).sample(range(size), 150):
        flip(checkpoint, bit)
        assert messages(checkpoint), f"bit {bit}"
        flip(checkpoint, bit)


def test_a_checkpoint_that_vanishes_during_the_check_is_ignored(checkpoint: Path) -> None:
    """After it was opened, and before, as a recording removes the older ones."""
    write_checkpoint(checkpoint, more={"dtype": "float32", "shape": [1], "crc32c": 0})
    write_checkpoint(checkpoint.with_name("step-00000008.safetensors"))
    found = check_checkpoints(checkpoint.parent.with_name("run.zarr"))
    assert "more is missing" in next(found).message
    shutil.rmtree(checkpoint.parent)
    assert list(found) == []


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Path.mkdir, "no file"),
        pytest.param(
            lambda path: path.symlink_to("/proc/self/mem"),  # can be opened, and not read
            "Input/output error",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
        ),
    ],
)
def test_what_cannot_be_read_is_reported_and_stays(
    checkpoint: Path, make: Callable[[Path], None], told: str
) -> None:
    path = checkpoint.with_name("step-00000009.safetensors")
    make(path)
    (problem,) = check_checkpoints(checkpoint.parent.with_name("run.zarr"))
    assert (problem.path, problem.remedy) == (path, "none")
    assert told in problem.message


def written(path: Path, *, wrong: bool) -> Path:
    rng = np.random.default_rng(0)
    types = {"W": "float32", "cells": "bfloat16"}
    with RunWriter.create(path, token=[5, 7, 9], hidden=4, variables=types, block_rows=2) as run:
        for step in range(5):
            W = rng.normal(size=(3, 4)).astype("f4")
            W[0, 0] = np.nan
            cells = W.astype(ml_dtypes.bfloat16)
            if wrong and step >= 3:
                cells[1, 2] = 0.5
            run.append(step=step, W=W, cells=cells)
    return path


def test_cells_are_those_of_W(tmp_path: Path) -> None:
    assert verify(written(tmp_path / "run.zarr", wrong=False)).clean
    (problem,) = verify(written(tmp_path / "wrong.zarr", wrong=True)).problems
    assert str(problem).startswith(
        "cells: 2 values are not W rounded to bfloat16, the first at step 3 of token 7"
    )
    assert problem.remedy == "none"


def test_the_common_name_of_two_matrices(trajstore_cli: Cli, tmp_path: Path) -> None:
    paths = [tmp_path / f"pair.{name}.zarr" for name in ("E", "W")]
    for path in paths:
        attributes = {"recording": {"parameter": path.suffixes[0][1:]}}
        with RunWriter.create(
            path, token=range(3), hidden=2, variables={"W": "float32"}, attributes=attributes
        ) as writer:
            writer.append(0, W=np.zeros((3, 2), np.float32))
    pair = tmp_path / "pair.zarr"
    facts = json.loads(trajstore_cli("verify", pair, "--json").stdout)
    assert {name: one["clean"] for name, one in facts.items()} == {str(p): True for p in paths}
    (paths[0] / "W" / "zarr.json").unlink()
    lines = trajstore_cli("verify", pair, rc=1).stdout.splitlines()
    assert "pair.E.zarr: 1 problem" in "".join(lines)
    assert lines[-1].startswith("pair.W.zarr: sound")
    (paths[0] / "zarr.json").unlink()
    assert f"similar names: {paths[0]}, {paths[1]}" in trajstore_cli("verify", pair, rc=2).stderr


def test_the_commands_show_damage_and_repair_it(trajstore_cli: Cli, run: Path) -> None:
    done = trajstore_cli("verify", run).stdout
    assert done.startswith("run.zarr: sound; checked 11 rows in 15 shards, 37 chunks, ")
    assert done.count("\n") == 1
    assert trajstore_cli("repair", run).stdout == "run.zarr is sound; nothing to repair.\n"

    path, index = shard_index(run, "W", 2)
    offset, length = index[1]
    flip(path, 8 * offset + 500)
    (run / "grad" / "zarr.json").unlink()
    done = trajstore_cli("verify", run, "--replay", rc=1).stdout
    row = next(line for line in done.splitlines() if line.strip().startswith("W "))
    assert row.split()[:4] == ["W", "2", f"{offset}–{offset + length}", "run.zarr/W/c.2.0.0"]
    assert "run.zarr: 2 problems" in done
    assert f"would do: trajstore repair {run} --dry-run\n" in done
    assert f"trajstore export {run} --format run --fill-damaged -o COPY.zarr\n" in done
    assert "Replay skipped: the run is damaged" in done
    facts = json.loads(trajstore_cli("verify", run, "--replay", "--json", rc=1).stdout)
    assert [problem["array"] for problem in facts["problems"]] == ["grad", "W"]
    assert facts["problems"][1]["first_byte"] == offset
    assert facts["replay"] is None

    before = contents(run)
    done = trajstore_cli("repair", run, "--dry-run").stdout
    assert done.startswith(
        "Damaged: W, steps 8 to 10. Whole: step, grad, exp_avg, loss.\n"
        "Repair:\n  3 of 11 rows are dropped, from row 8 on"
    )
    assert "grad/zarr.json is rewritten" in done
    copy = f"  trajstore export {run} --format run"
    assert f"{copy} --fill-damaged -o COPY.zarr\n" in done
    assert f"{copy} --variables" not in done  # a run needs W
    assert f"cp -r {run} {run}.copy\n" in done
    assert done.endswith(f"To repair, run: trajstore repair {run}\n")
    copied = trajstore_cli(*copy.split()[1:], "--fill-damaged", "-o", run.with_name("copy.zarr"))
    assert "W holds NaN in place of damaged values" in copied.stdout
    assert contents(run) == before
    planned, _, rest = done.partition("To keep more")
    assert rest
    assert trajstore_cli("repair", run).stdout == f"{planned}run.zarr is repaired.\n"
    assert "interrupted, 8 rows" in trajstore_cli("info", run).stdout
    flip(run / "token_text" / "c.0", 99)
    done = trajstore_cli("repair", run, rc=1).stdout
    assert "Cannot be repaired" in done
    assert "token_text, block 0" in done
    assert "Repair:" not in done


@pytest.mark.torch
def test_a_replay_finds_one_altered_bit_whose_checksum_fits(
    trajstore_cli: Cli, tmp_path: Path
) -> None:
    from trainings import tiny_run

    run = tiny_run(tmp_path / "run.zarr", count=3)
    assert "Replayed 3 of 3 steps" in trajstore_cli("verify", run, "--replay").stdout
    rewrite(run, "W", (3, 2, 1))
    facts = json.loads(trajstore_cli("verify", run, "--replay", "--json", rc=1).stdout)
    assert facts["clean"] is True
    assert facts["replay"]["variables"]["W"]["first"] == {"step": 3, "token": 2, "hidden": 1}
