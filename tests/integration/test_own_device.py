"""The recorder on an accelerator of our own, as an unknown device, as CUDA and as MPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None,
        reason="needs a compiler of C++ and ninja to build the device",
    ),
]

TESTS = Path(__file__).parent.parent

WAITS = {  # of the training for the device, a step: more than without the recorder
    "capture": {"plain": 8, "cuda": 0, "mps": 8},
    "tokens": {"plain": 8, "cuda": 0, "mps": 8},
    "clipping": {"plain": 8, "cuda": 0, "mps": 8},
    "accumulation": {"plain": 9, "cuda": 0, "mps": 9},
    "bfloat16": {"plain": 8, "cuda": 0, "mps": 8},
    "fused": {"plain": 8, "cuda": 0, "mps": 8},
    "scaler": {"plain": 9, "cuda": 1},
    "side stream": {"plain": 8, "cuda": 0, "mps": 8},
    "everything": {"plain": 16, "cuda": 0, "mps": 16},
    "everything, fused": {"plain": 17, "cuda": 0, "mps": 19},
    "everything, clipping": {"plain": 16, "cuda": 0, "mps": 16},
    "everything, scaler": {"plain": 17, "cuda": 1},
    "everything, rate as tensor": {"plain": 18, "cuda": 0, "mps": 18},
}
NONE_LEFT = {"device_bytes": 0, "pinned_bytes": 0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `own_device_runs` found in each branch. A process can have one such device only."""
    folder = tmp_path_factory.mktemp("own_device")
    environment = os.environ | {
        "PYTHONPATH": str(TESTS),
        "TORCH_EXTENSIONS_DIR": str(folder / "built"),
    }
    found = {}
    for branch in ("plain", "cuda", "mps"):
        ran = subprocess.run(
            [sys.executable, str(TESTS / "own_device_runs.py"), branch, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        found[branch] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("name", "branch"), [(name, branch) for name, row in WAITS.items() for branch in row]
)
def test_rows_waits_and_memory(name: str, branch: str, measured: Any) -> None:
    expected = {"differing": [], "waits": WAITS[name][branch], **NONE_LEFT}
    assert measured[branch][name] == expected


@pytest.mark.parametrize("branch", ["plain", "cuda", "mps"])
def test_a_failing_disk_leaves_no_memory(branch: str, measured: Any) -> None:
    found = dict(measured[branch]["failing disk"])
    assert "no room" in found.pop("raised")
    assert found == NONE_LEFT
