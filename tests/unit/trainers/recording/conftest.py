"""Recordings of a tiny model, for tests of loops that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def record(tiny: Any, tmp_path: Path, notes: list[str]) -> Callable[..., Any]:
    from trajstore.trainers import capture

    def begin(optimizer: Any, model: Any = tiny, **options: Any) -> Any:
        options = {"on_note": notes.append} | options
        return capture(model, optimizer, tmp_path / "run.zarr", **options)

    return begin
