from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tiny() -> Any:
    """A float32 `TinyModel`, the same every time."""
    torch = pytest.importorskip("torch")
    from list_recorder import TinyModel

    torch.manual_seed(1)
    return TinyModel()
