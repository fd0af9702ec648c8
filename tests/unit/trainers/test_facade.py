"""What `import trajstore.trainers` gives, and what it needs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from trajstore import trainers

pytestmark = pytest.mark.torch

OWN_LOOP = """
import sys
OTHERS = dict.fromkeys(
    "accelerate datasets huggingface_hub platformdirs pooch pydantic tokenizers tomli_w "
    "transformers".split()
)
sys.modules.update(OTHERS)  # an import fails

import torch
import trajstore
from trajstore.errors import MissingExtra
from trajstore.trainers import capture

assert "xarray" not in sys.modules  # it takes long
from trajstore.trainers import checkout, develop, evaluate, replay, restore

def build():
    return torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16))

model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(inputs):
    optimizer.zero_grad()
    ids = inputs[0]["input"]
    torch.nn.functional.cross_entropy(model(ids), ids).backward()
    optimizer.step()

def record(steps, **options):
    with capture(model, optimizer, "own.zarr", variables="keyframes", keyframe_every=4, **options):
        for number in range(steps):
            step([{"input": torch.arange(number, number + 8) % 16}])

record(6)
record(4, resume=True, first_step=restore("own.zarr", model, optimizer))
assert trajstore.open_run("own.zarr").sizes["step"] == 11
assert replay("own.zarr").clean
assert develop("own.zarr", model, optimizer, step, at=7).difference is None
assert checkout("own.zarr", "folder", step=8, constructor=build).step == 8

def norm(model, step):
    return {"norm": model[0].weight.norm()}

assert evaluate("own.zarr", norm, "norms.zarr", steps=[8], constructor=build).steps == 1
try:
    from trajstore.trainers import TrajectoryCallback
except MissingExtra as error:
    print(error)
print([name for name in OTHERS if sys.modules[name] is not None])
"""


def test_every_name_can_be_imported_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lightning", None)
        importlib.reload(trainers)
        names: dict[str, Any] = {}
        exec("from trajstore.trainers import *", names)
    importlib.reload(trainers)
    assert {"attach", "capture", "TrajectoryCallback"} <= names.keys()
    assert "LightningCallback" not in names


@pytest.mark.nightly
def test_an_own_loop_needs_torch_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_LOOP], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    needed, imported = done.stdout.splitlines()
    assert "needs the extra train" in needed
    assert imported == "[]"
