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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the run that most tests record."""
    return tmp_path / "run.zarr"


@pytest.fixture
def optimizer(tiny: Any) -> Any:
    """AdamW of the tiny model."""
    from loops_of_others import adamw

    return adamw(tiny)


@pytest.fixture
def use_streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Let a transfer from CUDA run on other streams; returns the module that stands for torch."""
    from lazy_streams import LazyTorch

    from trajstore.trainers.recording import device_to_host

    def use(streams: Any) -> Any:
        lazy = LazyTorch(streams)
        monkeypatch.setattr(device_to_host, "torch", lazy)
        return lazy

    return use
