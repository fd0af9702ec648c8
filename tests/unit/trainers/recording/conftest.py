"""Recordings of a tiny model, for tests of loops that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trajstore import open_run


class Record:
    """Begins recordings at one path, and holds their notes."""

    def __init__(self, model: Any, path: Path) -> None:
        self.model, self.path = model, path
        self.notes: list[str] = []
        self.options: dict[str, Any] = {"on_note": self.notes.append, "fsync": False}

    def __call__(self, optimizer: Any, model: Any = None, **options: Any) -> Any:
        from trajstore.trainers import capture

        model = self.model if model is None else model
        return capture(model, optimizer, self.path, **self.options | options)

    def read(self) -> Any:
        return open_run(self.path, chunks=None)

    def losses(self) -> list[float]:
        return [float(loss) for loss in self.read().loss.values[1:]]

    def noted(self, *words: str) -> bool:
        """True if a note has all these words."""
        return any(all(word in note for word in words) for note in self.notes)


@pytest.fixture
def record(tiny: Any, path: Path) -> Record:
    return Record(tiny, path)


@pytest.fixture
def notes(record: Record) -> list[str]:
    return record.notes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the run that most tests record."""
    return tmp_path / "run.zarr"


@pytest.fixture
def optimizer(tiny: Any) -> Any:
    """AdamW of the tiny model."""
    from trainings import adamw

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
