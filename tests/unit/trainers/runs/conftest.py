from __future__ import annotations

import shutil
from collections.abc import Callable
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


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Callable[[Any], Path]:
    """Records a configuration once, without an interruption; it trains on the text or on ids."""
    from trajstore.trainers import record

    folder = tmp_path_factory.mktemp("straight")
    runs: dict[Any, Path] = {}

    def run(config: Any) -> Path:
        if config not in runs:
            runs[config] = folder / f"{len(runs)}.zarr"
            record(config, runs[config], corpus=None if config.data.tokenizer == "none" else text)
        return runs[config]

    return run


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run of 9 steps, stopped after step 5."""
    from small_trainings import small_config, stop_after

    from trajstore.trainers import record

    path = tmp_path_factory.mktemp("stopped") / "run.zarr"
    record(small_config(["gatsby"], steps=9), path, corpus=text, stop=stop_after(5))
    return path


@pytest.fixture
def lost(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it without the checkpoint."""
    return Path(shutil.copytree(stopped, tmp_path / "run.zarr"))


@pytest.fixture
def interrupted(stopped: Path, lost: Path) -> Path:
    """A copy of it with the checkpoint."""
    shutil.copytree(stopped.with_suffix(".ckpt"), lost.with_suffix(".ckpt"))
    return lost
