from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tiny() -> Any:
    """A float32 `TinyModel`, the same every time."""
    import torch
    from trainings import TinyModel

    torch.manual_seed(1)
    return TinyModel()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """GPT-2 in two blocks of rows, and copies of all its steps."""
    from trainings import record_gpt2

    return record_gpt2(tmp_path_factory.mktemp("recorded"), block_rows=4)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that is not one of transformers, and copies of all its steps."""
    from trainings import record_own

    return record_own(tmp_path_factory.mktemp("own"))


# Runs of presets.


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
