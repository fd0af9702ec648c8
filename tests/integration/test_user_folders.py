"""A user's own folders named as parts of this repository: both theirs and ours are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("analysis", "benchmarks", "tools", "trainers")

SCRIPT = """
import numpy as np
import xarray as xr
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


COMMANDS = {
    "script": ["script.py"],
    "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
}


@pytest.mark.parametrize(
    ("command", "packages"),
    [
        ("script", True),
        pytest.param("tests", False, marks=pytest.mark.nightly),
    ],
)
def test_folders_of_the_user_and_the_project_are_apart(
    tmp_path: Path, command: str, packages: bool
) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("THEIRS = True\n")
        if packages:
            (tmp_path / name / "__init__.py").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mine.py").write_text(
        "import os, runpy\n\n\n"
        "def test_mine(tmp_path, monkeypatch):\n"
        "    script = os.path.abspath('script.py')\n"
        "    monkeypatch.chdir(tmp_path)\n"
        "    runpy.run_path(script)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *COMMANDS[command]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
