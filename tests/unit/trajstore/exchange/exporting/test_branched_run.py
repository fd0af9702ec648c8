"""A run of another's first rows: the same bits, shared files, and nothing of the other changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from compact_runs import RULE_ARRAYS, same_bits, sample_part
from stored_forms import stored_forms

from trajstore import RunWriter, repair, verify
from trajstore.errors import InvalidArgument, RunExists
from trajstore.exchange.export_run import branch_run, holds_exactly

Small = tuple[Path, dict[str, np.ndarray]]
TYPES = {"W": "bfloat16", "grad": "float16", "logits": "bfloat16", "loss": "float32"}


def branch(source: Path, rows: int, **types: str) -> Path:
    path = source.with_name("branch.zarr")
    attributes = {"config": {"why": "a branch"}}
    branch_run(source, path, rows, types=TYPES | types, attributes=attributes, memory="64MiB")
    return path


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()
    }


def same_rows(run: Path, source: Path, rows: int) -> xr.Dataset:
    ds, whole = xr.open_zarr(run).load(), xr.open_zarr(source).load()
    assert ds.sizes["step"] == rows
    for name in ds.variables:
        expected = whole[name].values[:rows] if "step" in whole[name].dims else whole[name].values
        if expected.dtype.kind == "f":
            assert ds[name].values.tobytes() == expected.tobytes(), name
        else:
            assert (ds[name].values == expected).all(), name
    assert verify(run).clean
    return ds


@pytest.mark.parametrize("rows", [4, 6, 11])
def test_all_blocks_are_shared_until_more_rows_follow(small_run: Small, rows: int) -> None:
    source, values = small_run
    before = contents(source)
    path = branch(source, rows)
    ds = same_rows(path, source, rows)
    assert ds.attrs["status"] == "interrupted"
    assert ds.attrs["config"] == {"why": "a branch"}
    assert ds.attrs["created"] >= xr.open_zarr(source).attrs["created"]
    for name in (*TYPES, "step", "token_text"):
        for shard in (path / name).glob("c.*"):
            assert shard.samefile(source / name / shard.name)
    assert {shard.name for shard in (path / "loss").glob("c.*")} == {
        f"c.{block}" for block in range(-(-rows // 4))
    }
    row = {name: values[name][0] for name in TYPES} | {"loss": np.float32(1)}
    with RunWriter.resume(path) as run:
        run.append(100, **row)
    assert verify(path).clean
    for name in TYPES:
        for shard in (path / name).glob("c.*"):
            whole = (int(shard.name.split(".")[1]) + 1) * 4 <= rows
            assert (shard.stat().st_nlink == 2) == whole
    assert contents(source) == before


def test_wider_types_hold_the_same_values(small_run: Small) -> None:
    source, values = small_run
    path = branch(source, 10, W="float32", grad="float32")
    ds = same_rows(path, source, 10)
    assert ds.W.attrs["native_dtype"] == ds.grad.attrs["native_dtype"] == "float32"
    assert ds.logits.attrs["native_dtype"] == "bfloat16"
    assert (ds.W.values.view("u4") == values["W"][:10].astype("u4") << 16).all()
    assert {shard.stat().st_nlink for shard in path.rglob("c.*")} == {1}  # all is written again


def test_a_branch_is_resumed_cut_and_repaired_and_its_source_stays(small_run: Small) -> None:
    source, values = small_run
    before = contents(source)
    path = branch(source, 8)
    rest: dict[str, Any] = {name: values[name][0] for name in ("W", "grad", "logits")}
    with RunWriter.resume(path) as run:
        for step in (100, 101, 102, 103, 104):
            run.append(step, **rest, loss=np.float32(step))
    RunWriter.resume(path, rows=6).close("interrupted")
    assert not (path / "W" / "c.1.0.0").samefile(source / "W" / "c.1.0.0")
    same_rows(path, source, 6)
    (path / "W" / "c.0.0.0").unlink()
    assert repair(path).rows == 0
    assert contents(source) == before
    assert verify(source).clean


def test_variables_can_be_left_out(small_run: Small) -> None:
    source, _ = small_run
    path = source.with_name("branch.zarr")
    branch_run(source, path, 5, types={"W": "bfloat16"}, attributes={}, memory="64MiB")
    assert list(same_rows(path, source, 5).data_vars) == ["W"]


@pytest.mark.parametrize("types", [{}, {"W": "float32"}], ids=["linked", "written"])
def test_notes_of_its_rows_are_kept(small_run: Small, types: dict[str, str]) -> None:
    source, values = small_run
    notes = [
        {"note": name, "first_step": step, "last_step": step, "count": 1}
        for name, step in (("early", 4), ("late", 22))
    ]
    with RunWriter.resume(source) as run:
        row: dict[str, Any] = {name: values[name][0] for name in ("W", "grad", "logits")}
        run.append(22, **row, loss=np.float32(1))
        run.notes = notes
    assert xr.open_zarr(branch(source, 11, **types)).attrs["notes"] == notes[:1]


def test_without_hard_links_files_are_copied(
    small_run: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    path = branch(small_run[0], 9)
    same_rows(path, small_run[0], 9)
    assert (path / "W" / "c.0.0.0").stat().st_nlink == 1


def test_what_cannot_be_branched_is_refused_and_nothing_is_left(small_run: Small) -> None:
    source, _ = small_run
    with pytest.raises(InvalidArgument, match=r"after 12 rows, expected 0 to 11"):
        branch(source, 12)
    with pytest.raises(InvalidArgument, match=r"loss is float32 .* bfloat16 does not hold"):
        branch(source, 4, loss="bfloat16")
    with pytest.raises(InvalidArgument, match="does not hold exp_avg"):
        branch(source, 4, exp_avg="bfloat16")
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    branch(source, 4)
    with pytest.raises(RunExists):
        branch(source, 4)


def test_types_that_hold_others_exactly() -> None:
    assert holds_exactly("float16", "float32")
    assert holds_exactly("float64", "float64")
    assert not holds_exactly("float32", "float64")  # no run was ever widened so
    assert not holds_exactly("bfloat16", "float16")


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
        pytest.param({}, {"rounding": "stochastic"}, False, None, id="no rule"),
        pytest.param({"exp_avg": "float32"}, {}, False, None, id="a wider type",
                     marks=pytest.mark.nightly),
        pytest.param({"grad": "float32"}, {}, False, None, id="a wider gradient"),
        pytest.param({"clip_coef": None}, {}, False, 0, id="less to compute from",
                     marks=pytest.mark.nightly),
        pytest.param({"exp_avg": None, "exp_avg_sq": None}, {}, False, None, id="no moments",
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_computed_arrays_keep_their_blocks_if_the_rule_does_not_change(
    sample: Path,
    tmp_path: Path,
    types: dict[str, str | None],
    settings: dict[str, Any],
    shared: bool,
    differing: int | None,
) -> None:
    source = sample_part(sample, tmp_path / "run.zarr")
    before = contents(source)
    path = tmp_path / "branch.zarr"
    kept = {name: native for name, native in (SAMPLE_TYPES | types).items() if native}
    optimizer = {"class": "RoundedAdamW", "hyperparameters": OPTIMIZER | settings}
    notes: list[str] = []
    branch_run(
        source,
        path,
        19,
        types=kept,
        attributes={"optimizer": optimizer},
        memory="64MiB",
        on_note=notes.append,
    )
    ds = same_bits(source, path, 19)
    assert ds.attrs["encoding"] == "compact"
    assert verify(path).clean
    assert {shard.stat().st_nlink for shard in path.rglob("c.*")} == {2 if shared else 1}
    forms = stored_forms(path)
    computed = [name for name, counts in forms.items() if "elements" in counts]
    has_rule = "rounding" not in settings and "exp_avg" in kept
    assert computed == ([*RULE_ARRAYS] if has_rule else [])
    assert bool(notes) == (not has_rule)
    if differing is not None:
        assert sum(forms[name]["differences"] > 0 for name in computed) == differing
    assert contents(source) == before
    with RunWriter.resume(path, rows=13) as run:
        for row in range(13, 19):
            run.append(row, **{name: ds[name].values[row] for name in kept})
    again = same_bits(source, path, 19)
    assert again.attrs["content_digest"] == ds.attrs["content_digest"]
    assert verify(path).clean
