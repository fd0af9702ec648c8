"""A user's own folders named as parts of this repository: both theirs and ours are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("analysis", "benchmarks", "tools", "trainers")

SCRIPT = """
import sys
import numpy as np
import xarray as xr

# Datasets have traj from the first one on that xarray opens.
try:
    xr.open_dataset("nothing.zarr")
except FileNotFoundError:
    pass
assert not [name for name in sys.modules if name.startswith("trajstore.analysis")]
assert type(xr.Dataset().traj).__name__ == "TrajAccessor"

from analysis.mine import THEIRS
from benchmarks.mine import THEIRS
from tools.mine import THEIRS
from trainers.mine import THEIRS
from trajstore import RunWriter
from trajstore.analysis import freeze

with RunWriter.create(
    "mine.zarr", token=np.arange(4), hidden=3, variables={"W": "float32"}
) as run:
    for step in range(3):
        run.append(step=step, W=np.full((4, 3), min(step, 1), "float32"))
ds = xr.open_zarr("mine.zarr")
assert ds.traj.freeze().last_motion.values.tolist() == [1, 1, 1, 1]
assert freeze(ds).moves.values.tolist() == [1, 1, 1, 1]
"""


@pytest.mark.nightly
def test_folders_of_the_user_and_the_project_are_apart(tmp_path: Path) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("THEIRS = True\n")
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
