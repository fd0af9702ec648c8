from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few words, as a file."""
    from small_trainings import TEXT

    path = tmp_path_factory.mktemp("text") / "april.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no step go by while a checkpoint is written."""

    def done(_: Any, work: Any, *arguments: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(work(*arguments))
        return future

    monkeypatch.setattr("trajstore.trainers.runs.checkpoint_schedule.submit", done)
