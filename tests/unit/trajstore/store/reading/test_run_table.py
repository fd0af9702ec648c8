from __future__ import annotations

from pathlib import Path

import numpy as np

from trajstore import RunWriter
from trajstore.store.reading.open_runs import final_loss, run_table
from trajstore.store.reading.run_info import information


def write(path: Path, rows: int = 3, *, loss: bool = True, **optimizer: object) -> Path:
    types = {"W": "float32", "loss": "float32"} if loss else {"W": "float32"}
    config = {"training": {"seed": rows}, "optimizer": optimizer}
    with RunWriter.create(path, token=[0], hidden=1, variables=types, config=config) as run:
        for step in range(rows):
            known = {"loss": np.float32(step or "nan")} if loss else {}
            run.append(step=step, W=np.zeros((1, 1), "f4"), **known)
    return path


def test_a_line_says_what_a_run_is_and_what_differs(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.zarr", lr=0.1),
        write(tmp_path / "b.zarr", 1, lr=0.1, state_dtype="float32"),
        write(tmp_path / "c.zarr", 0, lr=0.1, loss=False),
    ]
    losses = [final_loss(path) for path in paths]
    assert losses == [2.0, None, None], "the first row has none yet"
    found = {
        path.name: information(path) | {"final_loss": loss}
        for path, loss in zip(paths, losses, strict=True)
    }
    columns, rows = run_table(found)
    assert columns == [
        "run", "status", "rows", "last step", "seed", "state_dtype", "final loss", "on disk",
    ]  # fmt: skip
    assert [row[:-1] for row in rows] == [
        ["a.zarr", "complete", "3", "2", "3", "unset", "2.0000"],
        ["b.zarr", "complete", "1", "0", "1", "float32", ""],
        ["c.zarr", "complete", "0", "", "0", "unset", ""],
    ]
