from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few words, as a file."""
    from small_trainings import TEXT

    path = tmp_path_factory.mktemp("text") / "april.txt"
    path.write_bytes(TEXT)
    return path
