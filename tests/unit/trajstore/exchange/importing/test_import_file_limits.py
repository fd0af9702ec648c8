from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grammar_files import write

import trajstore
from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange import import_file as module
from trajstore.exchange.file_rows import check_size
from trajstore.formats import array_file


def test_rows_and_memory_are_bounded_before_anything_is_read() -> None:
    file = Path("x.h5")
    check_size(file, "W", (1 << 22, 2, 2), "float32", 1 << 20)
    with pytest.raises(FormatError, match=r"W has 4,194,305 rows, .* at most 4,194,304"):
        check_size(file, "W", ((1 << 22) + 1, 2, 2), "float32", 1 << 20)
    with pytest.raises(InvalidArgument, match=r"rows of 4 MiB; .* \(--memory 13MiB\)"):
        check_size(file, "W", (1, 1 << 10, 1 << 10), "float32", 12 << 20)
    check_size(file, "W", (1, 1 << 10, 1 << 10), "float32", 13 << 20)


def test_what_would_be_far_larger_when_decompressed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = np.zeros((100, 64, 64), "f4")
    file = write(tmp_path / "x.npz", "npz", {"W": W})
    trajstore.import_file(file, tmp_path / "run.zarr")
    monkeypatch.setattr(array_file, "_ALWAYS_EXPANDED", 1 << 20)
    with pytest.raises(
        FormatError, match=r"x\.npz has .* would expand to 1\.5.* without compression"
    ):
        trajstore.import_file(file, tmp_path / "other.zarr")
    np.savez(file, W=W)
    trajstore.import_file(file, tmp_path / "other.zarr")


def test_a_table_of_tokens_is_not_read_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_file, "_LARGEST_TABLE", 100)
    np.savez(tmp_path / "x.npz", W=np.zeros((3, 4, 2), "f4"), dead_ids=np.arange(50))
    with pytest.raises(FormatError, match=r"dead_ids has shape \(50,\), .* --map ignore=dead_ids"):
        trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")


def test_very_many_tiny_rows_are_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = np.random.default_rng(0).normal(size=(600, 4, 2)).astype("f4")
    np.savez(tmp_path / "x.npz", W=W)
    monkeypatch.setattr(module, "_MANY_ROWS", 300)
    monkeypatch.setattr(module, "_BATCH", 24_000)
    done = trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path)
    assert ds.attrs["block_rows"] == 512
    assert (ds.W.values == W).all()
    assert trajstore.verify(done.path).clean
    given = trajstore.import_file(tmp_path / "x.npz", tmp_path / "other.zarr", block_rows=64)
    assert trajstore.open_run(given.path).attrs["block_rows"] == 64
