"""The recorder on an accelerator of our own, as an unknown device, as CUDA and as MPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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

BRANCHES = ("plain", "cuda", "mps")
SCRIPT = Path(__file__).parents[1] / "own_device_runs.py"
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
    "disk that fails": (0, 0, 0),
}


def test_rows_waits_and_memory(tmp_path: Path) -> None:
    """To build the device and to import torch takes long, so one test looks at all."""
    pytest.importorskip("torch")
    ran = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, *BRANCHES],
        cwd=tmp_path,
        env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), **os.environ},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    for number, branch in enumerate(BRANCHES):
        expected = {name: [waits[number], 0, 0] for name, waits in WAITS.items()}
        if branch == "mps":
            del expected["everything, scaler"]
        assert json.loads((tmp_path / f"{branch}.json").read_text()) == expected, branch
