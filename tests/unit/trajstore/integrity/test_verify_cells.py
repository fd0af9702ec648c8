from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from trajstore import RunWriter, verify


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
