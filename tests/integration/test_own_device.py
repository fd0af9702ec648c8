"""The recorder on an accelerator of our own, as an unknown device, as CUDA and as MPS."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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

WAITS = {  # of the training for the device, a step: more than without the recorder
    "capture": {"plain": 8, "cuda": 0, "mps": 8},
    "tokens": {"plain": 8, "cuda": 0, "mps": 8},
    "accumulation": {"plain": 9, "cuda": 0, "mps": 9},
    "clipping": {"plain": 8, "cuda": 0, "mps": 8},
    "bfloat16": {"plain": 8, "cuda": 0, "mps": 8},
    "side stream": {"plain": 8, "cuda": 0, "mps": 8},
    "everything": {"plain": 12, "cuda": 0, "mps": 12},
    "everything, fused": {"plain": 14, "cuda": 0, "mps": 14},
    "everything, clipping": {"plain": 12, "cuda": 0, "mps": 12},
    "everything, scaler": {"plain": 13, "cuda": 0},
    "everything, rate as tensor": {"plain": 14, "cuda": 0, "mps": 13},
    "everything, restored and resumed": {"plain": 12, "cuda": 0, "mps": 12},
    "Trainer, everything": {"plain": 14, "cuda": 0, "mps": 14},
}
NONE_LEFT = {"device_bytes": 0, "pinned_bytes": 0}


def test_rows_waits_and_memory(tmp_path: Path) -> None:
    """The processes build the device and import torch for long, so one test looks at all."""
    # It imports torch's builder of extensions.
    from own_device_runs import BRANCHES, MOST_OPERATIONS, measured

    found = measured(tmp_path)
    for branch in BRANCHES:
        failed = found[branch].pop("failing disk")
        assert "no space is left" in failed.pop("raised")
        assert failed == NONE_LEFT, branch
    late = found["cuda"].pop("without wait_event")
    assert late.pop("mutant"), "rows are wrong where the device does not wait for the last row"
    assert late == {"sound": [], **NONE_LEFT}
    for branch in BRANCHES:
        for name, one in found[branch].items():
            assert one.pop("operations", 0) <= MOST_OPERATIONS.get(name, 0), (branch, name)
        expected = {
            name: {"differing": [], "waits": waits[branch], **NONE_LEFT}
            for name, waits in WAITS.items()
            if branch in waits
        }
        assert {name: found[branch][name] for name in expected} == expected, branch
