"""The recorder on an accelerator of our own, as an unknown device, as CUDA and as MPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None,
        reason="needs a compiler of C++ and ninja to build the device",
    ),
]

SCRIPT = Path(__file__).parents[1] / "own_device_runs.py"
BRANCHES = ("plain", "cuda", "mps")
WAITS = {  # of the training for the device, a step: more than without the recorder
    "matrix": (8, 0, 8),
    "tokens, accumulation, clipping": (9, 0, 9),
    "bfloat16, side stream": (8, 0, 8),
    "everything, clipping": (12, 0, 12),
    "everything, fused": (14, 0, 14),
    "everything, scaler": (13, 0, None),
    "everything, rate as tensor": (14, 0, 13),
    "everything, restored and resumed": (12, 0, 12),
    "Trainer, everything": (14, 0, 14),
}


def test_rows_waits_and_memory(tmp_path: Path) -> None:
    """The processes, which can have one such device only, build it and import torch for long."""
    pytest.importorskip("torch")
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), **os.environ}

    def run(branch: str) -> object:
        command = [sys.executable, SCRIPT, branch, tmp_path]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return json.loads(ran.stdout.splitlines()[-1])

    with ThreadPoolExecutor() as pool:  # the first builds the device, and the others wait for it
        found = dict(zip(BRANCHES, pool.map(run, BRANCHES), strict=True))
    for number, branch in enumerate(BRANCHES):
        expected = {name: [waits[number], 0, 0] for name, waits in WAITS.items()}
        if branch == "mps":
            del expected["everything, scaler"]
        assert found[branch] == expected, branch
