"""Runs as runs again, with blocks of another size."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
import zarr
from bits_and_calls import nightly_but
from compact_runs import RULE_ARRAYS, same_bits, sample_part
from damage import contents, flip, shard_index
from disk import stand_in
from exchange_runs import assert_same_run
from stored_forms import stored_forms

from trajstore import RunWriter, export, open_run, repair, verify
from trajstore.codec.computed_rows import cache
from trajstore.errors import FormatError, InvalidArgument, RunExists, RunLocked
from trajstore.exchange.export_run import branch_run
from trajstore.store.metadata.block_plan import plan
from trajstore.store.reading.run_info import information
from trajstore.store.storage.lock import RunLock

SmallRun = tuple[Path, dict[str, np.ndarray]]
TYPES = {"W": "bfloat16", "grad": "float16", "logits": "bfloat16", "loss": "float32"}


@pytest.mark.parametrize(("block_rows", "spare_rows"), [(1, 100), (3, 0)])
def test_blocks_of_any_size_within_any_memory(
    small_run: SmallRun, block_rows: int, spare_rows: int
) -> None:
    path, _ = small_run
    sizes = {"tokens": 10, "hidden": 6, "block_rows": block_rows, "buffers": 1}
    layout = plan(TYPES, **sizes)  # type: ignore[arg-type]
    row = sum(array.row_bytes for array in layout.arrays.values())
    before = open_run(path).load()
    memory = layout.memory + spare_rows * row
    export(path, path, format="run", block_rows=block_rows, memory=memory, overwrite=True)
    assert_same_run(before, path)
    assert open_run(path).attrs["block_rows"] == block_rows
    assert [each.name for each in path.parent.iterdir()] == [path.name]


SOME = [*range(0, 128, 4)]
"""Tokens of the sample run."""


@pytest.fixture(scope="module")
def compact(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 22 rows in blocks of 8, of which three arrays are computed."""
    return sample_part(sample, tmp_path_factory.mktemp("compact") / "run.zarr", tokens=SOME)


def test_a_run_is_the_same_after_replay_and_back(sample: Path, tmp_path: Path) -> None:
    source, small, back = (tmp_path / f"{name}.zarr" for name in ("source", "small", "back"))
    sample_part(sample, source, encoding="delta", tokens=SOME)
    attributes = {"segments": [{"step": 0, "config": {}}], "mine": {"why": "a test"}}
    zarr.open_group(source).attrs.update(attributes)
    done = export(source, small, encoding="compact", block_rows=3)
    assert (done.format, done.notes) == ("run", ())
    kinds = {name: array["kind"] for name, array in information(small)["arrays"].items()}
    assert {name for name in kinds if kinds[name] == "computed"} == {*RULE_ARRAYS}
    assert verify(small).clean
    export(small, back, encoding="delta", block_rows=8)
    ds, before = same_bits(source, back), xr.open_zarr(source).attrs
    own = ("runs", "content_digest", "fingerprint", "updated")
    for attrs in (ds.attrs, before):
        assert attrs["mine"] == attributes["mine"]
        for name in own:
            del attrs[name]
    assert ds.attrs == before
    # Without it, the encoding stays; some tokens follow from their own gradients.
    export(small, back, format="run", tokens=[4, 100], overwrite=True)
    part = xr.open_zarr(back).load()
    assert part.attrs["encoding"] == "compact"
    xr.testing.assert_equal(part.W, xr.open_zarr(source).W.sel(token=[4, 100]).load())
    done = export(source, tmp_path / "few.zarr", encoding="compact", variables="W", steps="0:9")
    assert done.notes[0].endswith("the run does not hold exp_avg, exp_avg_sq, grad, lr")


def branch(source: Path, rows: int, **types: str) -> Path:
    path = source.with_name("branch.zarr")
    attributes = {"config": {"why": "a branch"}}
    branch_run(source, path, rows, types=TYPES | types, attributes=attributes, memory="64MiB")
    return path


def same_rows(run: Path, source: Path, rows: int) -> xr.Dataset:
    assert verify(run).clean
    ds = same_bits(source, run, rows)
    assert ds.sizes["step"] == rows
    return ds


@pytest.mark.parametrize("rows", nightly_but([4, 6], 6))
def test_blocks_are_shared_until_rows_follow_and_the_source_stays(
    small_run: SmallRun, rows: int
) -> None:
    source, values = small_run
    before = contents(source)
    path = branch(source, rows)
    ds = same_rows(path, source, rows)
    assert (ds.attrs["status"], ds.attrs["config"]) == ("interrupted", {"why": "a branch"})
    assert ds.attrs["created"] >= xr.open_zarr(source).attrs["created"]
    for name in (*TYPES, "step", "token_text"):
        for shard in (path / name).glob("c.*"):
            assert shard.samefile(source / name / shard.name)
    assert len([*(path / "loss").glob("c.*")]) == -(-rows // 4)
    rest: dict[str, Any] = {name: values[name][0] for name in ("W", "grad", "logits")}
    with RunWriter.resume(path) as run:
        for step in (100, 101, 102, 103, 104):
            run.append(step, **rest, loss=np.float32(step))
    assert verify(path).clean
    for name in TYPES:
        for shard in (path / name).glob("c.*"):
            whole = (int(shard.name.split(".")[1]) + 1) * 4 <= rows
            assert (shard.stat().st_nlink == 2) == whole
    RunWriter.resume(path, rows=rows - 1).close("interrupted")
    same_rows(path, source, rows - 1)
    (path / "W" / "c.0.0.0").unlink()
    assert repair(path).rows == 0
    assert contents(source) == before
    assert verify(source).clean


def test_variables_can_be_left_out_or_be_wider(small_run: SmallRun) -> None:
    """Notes of later rows stay with the source."""
    source, values = small_run
    notes = [
        {"note": name, "first_step": step, "last_step": step, "count": 1}
        for name, step in (("early", 4), ("late", 22))
    ]
    with RunWriter.resume(source) as run:
        row: dict[str, Any] = {name: values[name][0] for name in ("W", "grad", "logits")}
        run.append(22, **row, loss=np.float32(1))
        run.notes = notes
    wider = {"W": "float32", "grad": "float32", "logits": "bfloat16"}
    for types, links in (({"W": "bfloat16"}, {2}), (wider, {1})):  # linked, and written again
        path = source.with_name(f"{len(types)}.zarr")
        branch_run(source, path, 8, types=types, attributes={}, memory="64MiB")
        ds = same_rows(path, source, 8)
        assert {name: ds[name].attrs["native_dtype"] for name in ds.data_vars} == types
        assert {shard.stat().st_nlink for shard in (path / "W").glob("c.*")} == links
        assert ds.attrs["notes"] == notes[:1]
    assert (ds.W.values.view("u4") == values["W"][:8].astype("u4") << 16).all()


def test_without_hard_links_files_are_copied(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, link=Mock(side_effect=OSError(18, "Invalid cross-device link")))
    path = branch(small_run[0], 9)
    same_rows(path, small_run[0], 9)
    assert (path / "W" / "c.0.0.0").stat().st_nlink == 1


def test_what_cannot_be_branched_is_refused_and_nothing_is_left(small_run: SmallRun) -> None:
    source, _ = small_run
    for rows, types, message in (
        (12, {}, r"after 12 rows, expected 0 to 11"),
        (4, {"loss": "bfloat16"}, "bfloat16 does not hold"),
        (4, {"logits": "float64"}, "float64 does not hold"),  # never widened
        (4, {"W": "float16"}, "W is bfloat16 .* float16 does not hold"),
        (4, {"exp_avg": "bfloat16"}, "does not hold exp_avg"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            branch(source, rows, **types)
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    branch(source, 4)
    with pytest.raises(RunExists):
        branch(source, 4)


SAMPLE_TYPES = {
    "W": "bfloat16", "grad": "bfloat16", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16",
    "lr": "float64", "clip_coef": "float32",
}  # fmt: skip
OPTIMIZER = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("types", "settings", "shared", "differing"),
    [
        pytest.param({}, {}, True, 0, id="nothing changes"),
        pytest.param({}, {"betas": [0.5, 0.9]}, False, 3, id="another rule"),
        pytest.param({}, {"rounding": "stochastic"}, False, None, id="no rule",
                     marks=pytest.mark.nightly),
        pytest.param({"grad": "float32"}, {}, False, None, id="a wider gradient",
                     marks=pytest.mark.nightly),
        pytest.param({"clip_coef": None}, {}, False, 0, id="less to compute from",
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_computed_arrays_keep_their_blocks_if_the_rule_does_not_change(
    compact: Path, tmp_path: Path, types: dict[str, str | None], settings: dict[str, Any],
    shared: bool, differing: int | None,
) -> None:  # fmt: skip
    before, path = contents(compact), tmp_path / "branch.zarr"
    kept = {name: native for name, native in (SAMPLE_TYPES | types).items() if native}
    optimizer = {"class": "RoundedAdamW", "hyperparameters": OPTIMIZER | settings}
    notes: list[str] = []
    attributes = {"optimizer": optimizer}
    branch_run(compact, path, 19, types=kept, attributes=attributes, memory="64MiB",
               on_note=notes.append)  # fmt: skip
    ds = same_rows(path, compact, 19)
    assert ds.attrs["encoding"] == "compact"
    for shard in path.rglob("c.*"):
        assert shard.samefile(compact / shard.relative_to(path)) == shared
    forms = stored_forms(path)
    computed = [name for name, counts in forms.items() if "elements" in counts]
    has_rule = "rounding" not in settings
    assert computed == ([*RULE_ARRAYS] if has_rule else [])
    assert any("as differences" in note for note in notes) == (not has_rule)
    if differing is not None:
        assert sum(forms[name]["differences"] > 0 for name in computed) == differing
    with RunWriter.resume(path, rows=13) as run:
        for row in range(13, 19):
            run.append(row, **{name: ds[name].values[row] for name in kept})
    again = same_rows(path, compact, 19)
    assert again.attrs["content_digest"] == ds.attrs["content_digest"]
    assert contents(compact) == before


def break_chunk(run: Path, name: str, block: int, chunk: int = 0) -> None:
    path, index = shard_index(run, name, block)
    flip(path, 8 * index[chunk][0] + 300)


def filled(run: Path, **options: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A copy that `verify` finds sound, and its notes. The source does not change."""
    before = contents(run)
    out = run.with_name("out.zarr")
    done = export(run, out, format="run", fill_damaged=True, **options)
    assert contents(run) == before
    assert verify(out).clean
    notes: list[dict[str, Any]] = open_run(out).attrs.get("notes", [])
    listed = ["{note} (steps {first_step} to {last_step})".format(**note) for note in notes]
    assert [note for note in done.notes if "holds NaN" in note] == listed
    return out, notes


def lost(out: Path, whole: Path, *names: str) -> dict[str, np.ndarray]:
    """Masks of the values that differ. They are NaN, and no other variable differs."""
    got, expected, masks = open_run(out), open_run(whole), {}
    for name in expected.variables.keys() - ({*names} - {*got.variables}):
        one, other = got[name].values, expected[name].values
        if name in names:
            masks[name] = one.view("u4") != other.view("u4")
            assert np.isnan(one[masks[name]]).all()
        else:
            assert one.tobytes() == other.tobytes(), name
    return masks


def test_one_broken_chunk_becomes_nan_and_every_other_value_stays(run: Path, whole: Path) -> None:
    break_chunk(run, "grad", 1, chunk=1)
    break_chunk(run, "W", 2)
    shutil.rmtree(run / "loss")
    out, notes = filled(run, block_rows=3)
    assert [(note["note"].split()[0], *list(note.values())[1:]) for note in notes] == [
        ("W", 8, 10, 3), ("grad", 4, 7, 4), ("loss", 0, 10, 11)
    ]  # fmt: skip
    masks = lost(out, whole, "W", "grad", "loss")
    assert masks["loss"][1:].all()
    for name, rows in (("grad", [4, 5, 6, 7]), ("W", [8, 9, 10])):
        mask = masks[name]
        tokens = np.flatnonzero(mask.any((0, 2)))
        assert np.flatnonzero(mask.any((1, 2))).tolist() == rows
        assert 0 < tokens.size < 300  # other chunks of the shard stay
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[-1] + 1))


def test_only_damage_of_the_selection_is_noted(run: Path) -> None:
    break_chunk(run, "grad", 1, chunk=1)
    assert filled(run, tokens=[0, 299])[1] == []  # the chunk holds tokens between them
    (run / "grad" / "c.0.0.0").unlink()
    shutil.rmtree(run.with_name("out.zarr"))
    _, (note,) = filled(run, steps="0:11:3", tokens=[0, 299])
    assert (note["first_step"], note["last_step"], note["count"]) == (0, 3, 2)


def test_a_damaged_coordinate_is_left_out(run: Path, whole: Path) -> None:
    flip(run / "token_text" / "c.0", 140)
    with pytest.raises(FormatError, match="the values of token_text"):
        export(run, run.with_name("out.zarr"), format="run")
    out, _ = filled(run)
    assert "token_text" not in open_run(out).coords
    assert lost(out, whole, "token_text") == {}


@pytest.mark.parametrize("name", ["step", "token"])
def test_steps_and_tokens_cannot_be_nan(run: Path, name: str) -> None:
    flip(run / name / ("c.1" if name == "step" else "c.0"), 99)
    with pytest.raises(FormatError, match=name):
        filled(run)
    assert not run.with_name("out.zarr").exists()


def test_a_file_that_the_system_refuses_is_no_damage(run: Path) -> None:
    path = run / "grad" / "c.1.0.0"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        export(run, run.with_name("out.zarr"), format="run", fill_damaged=True)


def test_rows_that_are_computed_from_a_damaged_gradient(compact: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(compact, tmp_path / "run.zarr"))
    break_chunk(run, "grad", 1)
    cache.clear()  # which may hold these rows
    out, notes = filled(run)
    assert {note["note"].split()[0] for note in notes} == {*RULE_ARRAYS, "grad"}
    assert all((note["first_step"], note["last_step"]) == (8, 15) for note in notes)
    for mask in lost(out, compact, *RULE_ARRAYS, "grad").values():
        assert set(np.flatnonzero(mask.any((1, 2)))) <= {*range(8, 16)}


@pytest.mark.parametrize("name", ["W", "cells"])
def test_cells_and_weights_without_each_other(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run.zarr"
    types = {"W": "float32", "cells": "bfloat16"}
    with RunWriter.create(run, token=[5, 7], hidden=1, variables=types, block_rows=2) as writer:
        for step in range(5):
            W = np.full((2, 1), step, np.float32)
            writer.append(step=step, W=W, cells=W.astype(ml_dtypes.bfloat16))
    break_chunk(run, name, 1)
    out, _ = filled(run)
    values = open_run(out)[name].values[:, 0, 0]
    np.testing.assert_array_equal(values, [0, 1, np.nan, np.nan, 4])


def test_what_cannot_be_filled_is_refused(run: Path) -> None:
    out = run.with_name("out.zarr")
    with pytest.raises(InvalidArgument, match="got a Dataset"):
        export(open_run(run), out, fill_damaged=True, format="run")
    with RunLock.acquire(run), pytest.raises(RunLocked, match="is writing to"):
        export(run, out, format="run", fill_damaged=True)


def test_an_array_that_is_left_out_is_not_read(run: Path, whole: Path) -> None:
    break_chunk(run, "grad", 0)
    (run / "grad" / "c.1.0.0").unlink()
    (run / "grad" / "zarr.json").write_text("{")
    out = run.with_name("out.zarr")
    assert export(run, out, format="run", variables="W,exp_avg,loss").notes == ()
    assert verify(out).clean
    assert "grad" not in open_run(out)
    assert lost(out, whole, "grad") == {}
