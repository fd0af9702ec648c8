"""The recorder on an accelerator of our own, as an unknown device, as CUDA and as MPS."""

from __future__ import annotations

import os
import shutil
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

WAITS = {  # of the training for the device, a step: more than without the recorder
    "capture": {"plain": 8, "cuda": 0, "mps": 8},
    "tokens": {"plain": 8, "cuda": 0, "mps": 8},
    "clipping": {"plain": 8, "cuda": 0, "mps": 8},
    "accumulation": {"plain": 9, "cuda": 0, "mps": 9},
    "bfloat16": {"plain": 8, "cuda": 0, "mps": 8},
    "fused": {"plain": 8, "cuda": 0, "mps": 8},
    "scaler": {"plain": 9, "cuda": 1},
    "side stream": {"plain": 8, "cuda": 0, "mps": 8},
    "everything": {"plain": 12, "cuda": 0, "mps": 12},
    "everything, fused": {"plain": 13, "cuda": 0, "mps": 15},
    "everything, clipping": {"plain": 12, "cuda": 0, "mps": 12},
    "everything, scaler": {"plain": 13, "cuda": 1},
    "everything, rate as tensor": {"plain": 14, "cuda": 0, "mps": 14},
    "everything, restored and resumed": {"plain": 12, "cuda": 0, "mps": 12},
    "Trainer": {"plain": 8, "cuda": 0, "mps": 8},
    "Trainer, everything": {"plain": 13, "cuda": 0, "mps": 15},
}
NONE_LEFT = {"device_bytes": 0, "pinned_bytes": 0}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from own_device_runs import measured  # it imports torch's builder of extensions

    return measured(tmp_path_factory.mktemp("own_device"))


@pytest.mark.parametrize(
    ("name", "branch"), [(name, branch) for name, row in WAITS.items() for branch in row]
)
def test_rows_waits_and_memory(name: str, branch: str, found: Any) -> None:
    expected = {"differing": [], "waits": WAITS[name][branch], **NONE_LEFT}
    assert found[branch][name] == expected


@pytest.mark.parametrize("branch", ["plain", "cuda", "mps"])
def test_a_failing_disk_leaves_no_memory(branch: str, found: Any) -> None:
    failed = dict(found[branch]["failing disk"])
    assert "no room" in failed.pop("raised")
    assert failed == NONE_LEFT


def test_rows_are_wrong_where_the_device_does_not_wait_for_the_last_row(found: Any) -> None:
    late = dict(found["cuda"]["without wait_event"])
    assert late.pop("mutant")
    assert late == {"sound": [], **NONE_LEFT}
