"""Runs that several tests look at, and the command line."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits_and_calls import Cli, random_bits
from click.testing import CliRunner, Result
from hypothesis import settings

from trajstore import RunWriter, sample_run, threads
from trajstore.cli.main import main

# The models of the tests are tiny. Several threads of torch would wait for each other most of the
# time, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test has a time limit: on a busy machine, any example may take longer than Hypothesis allows.
settings.register_profile("untimed", deadline=None, max_examples=30)
settings.load_profile("untimed")

# Loops are compiled from their first number on, instead of after many millions.
if "TRAJSTORE_COMPILED" in os.environ:
    threads._ENOUGH = 0

# In the background of a script SIGINT is ignored, here and in all that is started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Choose the same products on every processor."""
    if "torch" in sys.modules:
        from trajstore.trainers import matrix_products

        matrix_products.native_is_slow = lambda kind: False


@pytest.fixture(scope="session")
def trajstore_cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """Run `trajstore` in this process and an empty folder: (arguments, rc) to its result.

    What it refuses, with the exit code 2, must leave nothing in that folder.
    """
    folder = tmp_path_factory.mktemp("cwd")

    def run(*arguments: Any, rc: int = 0) -> Result:
        before = os.listdir(folder)
        with contextlib.chdir(folder):
            done = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == rc, done.output
        assert rc != 2 or os.listdir(folder) == before
        return done

    return run


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample run, which tests only read."""
    return sample_run(tmp_path_factory.mktemp("sample") / "sample.zarr")


@pytest.fixture(scope="session")
def accelerator() -> Any:
    """The device of the tests marked `device`."""
    from trajstore.trainers.runs.training_setup import find_device

    device = find_device(os.environ.get("TRAJSTORE_DEVICE", "auto"))
    if device.type == "cpu" and "TRAJSTORE_DEVICE" not in os.environ:
        pytest.skip("needs a CUDA or MPS device")
    return device


@pytest.fixture
def small_run(
    tmp_path: Path, _small_run: tuple[Path, dict[str, np.ndarray]]
) -> tuple[Path, dict[str, np.ndarray]]:
    """A run of 11 rows in blocks of 4, every third token dead, and its bits."""
    path, values = _small_run
    return Path(shutil.copytree(path, tmp_path / path.name)), values


@pytest.fixture(scope="session")
def _small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    rows = 11
    values = {
        "W": random_bits((rows, 10, 6), 1),
        "grad": random_bits((rows, 10, 6), 2),
        "logits": random_bits((rows, 10), 3),
        "loss": random_bits((rows,), 4, 32),
    }
    path = tmp_path_factory.mktemp("small") / "small.zarr"
    with RunWriter.create(
        path,
        token=np.arange(10) * 7,
        hidden=6,
        variables={"W": "bfloat16", "grad": "float16", "logits": "bfloat16", "loss": "float32"},
        is_dead=np.arange(10) % 3 == 0,
        token_count=np.arange(10) % 3 * 5,
        token_text=[f"<{number}>" for number in range(9)] + ["é\n"],
        config={"why": "a test"},
        block_rows=4,
    ) as run:
        stored = values | {"loss": values["loss"].view("float32")}
        for row in range(rows):
            run.append(step=row * 2, **{name: bits[row] for name, bits in stored.items()})
    return path, values
