"""Copies of damaged runs: without the damaged arrays, or with NaN for damaged chunks only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compact_runs import RULE_ARRAYS, sample_part
from damage import contents, flip, shard_index, wide_run

from trajstore import RunWriter, export, open_run, verify
from trajstore.codec.computed_rows import cache
from trajstore.errors import FormatError, InvalidArgument, RunLocked
from trajstore.store.storage.lock import RunLock

SERIES = ("step", "W", "grad", "exp_avg", "loss")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_run(tmp_path_factory.mktemp("whole") / "run.zarr")


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run.zarr"))


def break_chunk(run: Path, name: str, block: int, chunk: int = 0) -> None:
    path, index = shard_index(run, name, block)
    flip(path, 8 * index[chunk][0] + 300)


def filled(run: Path, **options: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A copy that `verify` finds sound, and its notes. The source does not change."""
    before = contents(run)
    out = run.with_name("out.zarr")
    done = export(run, out, format="run", fill_damaged=True, **options)
    assert contents(run) == before
    found = verify(out)
    assert found.clean, [*map(str, found.problems)]
    notes: list[dict[str, Any]] = open_run(out).attrs.get("notes", [])
    listed = [f"{one['note']} (steps {one['first_step']} to {one['last_step']})" for one in notes]
    assert [note for note in done.notes if "holds NaN" in note] == listed
    return out, notes


def lost(out: Path, whole: Path, name: str) -> np.ndarray:
    """Mask of the values whose bits differ from those of the run. All of them are NaN."""
    got, expected = open_run(out)[name].values, open_run(whole)[name].values
    mask: np.ndarray = got.view("u4") != expected.view("u4")
    assert np.isnan(got[mask]).all()
    return mask


def same_others(out: Path, whole: Path, *names: str) -> None:
    got, expected = open_run(out), open_run(whole)
    for name in expected.variables.keys() - set(names):
        assert got[name].values.tobytes() == expected[name].values.tobytes(), name


def test_one_broken_chunk_becomes_nan_and_every_other_value_stays(run: Path, whole: Path) -> None:
    break_chunk(run, "grad", 1, chunk=1)
    break_chunk(run, "W", 2)
    out, notes = filled(run, block_rows=3)
    assert notes == [
        {
            "note": f"{name} holds NaN in place of damaged values of the exported run",
            "first_step": first, "last_step": last, "count": last - first + 1,
        }
        for name, first, last in (("W", 8, 10), ("grad", 4, 7))
    ]  # fmt: skip
    same_others(out, whole, "W", "grad")
    for name, rows in (("grad", [4, 5, 6, 7]), ("W", [8, 9, 10])):
        mask = lost(out, whole, name)
        tokens = np.flatnonzero(mask.any((0, 2)))
        assert np.flatnonzero(mask.any((1, 2))).tolist() == rows
        assert 0 < tokens.size < 300  # other chunks of the shard stay
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[-1] + 1))


def test_a_lost_array_becomes_nan(run: Path) -> None:
    shutil.rmtree(run / "loss")
    out, (note,) = filled(run)
    assert np.isnan(open_run(out).loss.values).all()
    assert (note["first_step"], note["last_step"], note["count"]) == (0, 10, 11)


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
    same_others(out, whole, "token_text")


@pytest.mark.parametrize(
    ("name", "message"),
    [("step", "integers, which have no NaN, .* trajstore repair"), ("token", "values of token")],
)
def test_steps_and_tokens_cannot_be_nan(run: Path, name: str, message: str) -> None:
    flip(run / name / ("c.1" if name == "step" else "c.0"), 99)
    with pytest.raises(FormatError, match=message):
        filled(run)
    assert not run.with_name("out.zarr").exists()


def test_a_file_that_the_system_refuses_is_no_damage(run: Path) -> None:
    path = run / "grad" / "c.1.0.0"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        export(run, run.with_name("out.zarr"), format="run", fill_damaged=True)


def test_rows_that_are_computed_from_a_damaged_gradient(sample: Path, tmp_path: Path) -> None:
    whole = sample_part(sample, tmp_path / "whole.zarr")
    run = Path(shutil.copytree(whole, tmp_path / "run.zarr"))
    break_chunk(run, "grad", 1)
    cache.clear()  # which may hold these rows
    out, notes = filled(run)
    assert {note["note"].split()[0] for note in notes} == {*RULE_ARRAYS, "grad"}
    assert all((note["first_step"], note["last_step"]) == (8, 15) for note in notes)
    same_others(out, whole, *RULE_ARRAYS, "grad")
    for name in (*RULE_ARRAYS, "grad"):
        assert set(np.flatnonzero(lost(out, whole, name).any((1, 2)))) <= {*range(8, 16)}


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
    for source, options, message in (
        (open_run(run), {"format": "run"}, "got a Dataset"),
        (run, {"format": "zarr"}, "fill_damaged with format zarr"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            export(source, out, fill_damaged=True, **options)  # type: ignore[arg-type]
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
    same_others(out, whole, "grad")
