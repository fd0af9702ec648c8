from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tiny() -> Any:
    """A float32 `TinyModel`, the same every time."""
    torch = pytest.importorskip("torch")
    from trainings import TinyModel

    torch.manual_seed(1)
    return TinyModel()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """GPT-2 in two blocks of rows, and copies of all its steps."""
    pytest.importorskip("torch")
    from trainings import record_gpt2

    return record_gpt2(tmp_path_factory.mktemp("recorded"), block_rows=4)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that is not one of transformers, and copies of all its steps."""
    pytest.importorskip("torch")
    from trainings import record_own

    return record_own(tmp_path_factory.mktemp("own"))
