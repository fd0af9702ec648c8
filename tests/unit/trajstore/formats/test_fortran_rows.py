from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import trajstore
from trajstore.formats.fortran_rows import FortranRows
from trajstore.formats.numpy_files import NpyFile, NpzFile


@pytest.mark.parametrize("shape", [(9, 5), (9, 5, 4), (3, 9, 5, 4), (9, 1, 1), (1, 4, 3)])
@pytest.mark.parametrize("memory", [1, 200, 1 << 20])
def test_rows_in_any_order(shape: tuple[int, ...], memory: int) -> None:
    whole = np.random.default_rng(0).normal(size=shape).astype("f4")
    flat = whole.reshape(-1, order="F")
    rows = FortranRows(
        shape, whole.dtype, lambda count, before: flat[before : before + count], memory
    )
    assert (rows.read(None, None, None) == whole).all()
    for start, stop in ((0, 2), (2, 3), (7, 20), (1, 4), (3, 3)):
        assert (rows.read(start, stop, None) == whole[start:stop]).all()
        if len(shape) == 4:
            for outer in (2, 0):
                assert (rows.read(start, stop, outer) == whole[outer, start:stop]).all()


def test_files_in_fortran_order_stay_within_the_memory(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(64, 1536, 64)).astype("f4")  # 24 MiB
    np.save(tmp_path / "W.npy", np.asfortranarray(whole))
    np.savez(tmp_path / "f.npz", W=np.asfortranarray(whole))
    row = whole[0].nbytes
    for opened in (
        NpyFile(tmp_path / "W.npy", memory=8 * row),
        NpzFile(tmp_path / "f.npz", memory=8 * row),
    ):
        tracemalloc.start()
        with opened as file:
            for start in range(0, 64, 8):
                bits = file.read("W", start, start + 8)
                assert (bits.view("f4") == whole[start : start + 8]).all()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < whole.nbytes / 2
    done = trajstore.import_file(tmp_path / "W.npy", tmp_path / "run.zarr")
    assert (trajstore.open_run(done.path).W.values == whole).all()
