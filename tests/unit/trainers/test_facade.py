"""What `import trajstore.trainers` gives."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

pytest.importorskip("torch")
from trajstore import trainers

pytestmark = pytest.mark.torch


def test_every_name_can_be_imported_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lightning", None)
        importlib.reload(trainers)
        names: dict[str, Any] = {}
        exec("from trajstore.trainers import *", names)
    importlib.reload(trainers)
    assert {"attach", "capture", "TrajectoryCallback"} <= names.keys()
    assert "LightningCallback" not in names
