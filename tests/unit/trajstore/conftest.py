"""The run that tests damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damage import wide_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_run(tmp_path_factory.mktemp("whole") / "run.zarr")


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run.zarr"))
