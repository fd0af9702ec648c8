"""Where the examples in docstrings run, and what they find there."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Figures are drawn without a screen. Set later, matplotlib would close those of other tests.
os.environ["MPLBACKEND"] = "agg"

# Until all tests are collected: looking through all that is imported takes seconds.
gc.disable()

HAS_TORCH = importlib.util.find_spec("torch") is not None

# Its modules cannot be imported, so neither can their examples. The folder itself is among
# `testpaths`, and what is named there is collected whatever this says; what it holds is not.
collect_ignore_glob = [] if HAS_TORCH else ["trajstore/trainers/*", "tests/loops/*"]
if importlib.util.find_spec("lightning") is None:
    collect_ignore_glob.append("trajstore/trainers/recording/lightning_callback.py")

# Torch, or a kit of the tests that trains.
TORCH = re.compile(r"^(?:import|from) (?:torch|\w*trainings)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules of tests that need torch, where it is not installed."""
    return True if not HAS_TORCH and _imports_torch(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of modules that import torch, and the examples that need it."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and _needs_torch(item):
            item.add_marker(pytest.mark.torch)
            if not HAS_TORCH:
                item.add_marker(pytest.mark.skip(reason="could not import 'torch'"))
        elif _imports_torch(item.path):
            item.add_marker(pytest.mark.torch)


@functools.cache
def _imports_torch(path: Path) -> bool:
    in_tests = path.suffix == ".py" and path.is_relative_to(Path(__file__).parent / "tests")
    return in_tests and TORCH.search(path.read_text()) is not None


def pytest_collection_finish() -> None:
    """Hide imports from the garbage collector, which every Trainer calls at its start."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say the processor's seconds of this process and of its children, the workers among them."""
    terminalreporter.write_line(f"processor: {sum(os.times()[:4]):.0f} s")


def _needs_torch(item: pytest.DoctestItem) -> bool:
    return (
        item.path.is_relative_to(item.config.rootpath / "trajstore" / "trainers")
        or "torch" in item.name
    )


@pytest.fixture(scope="session")
def example_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the examples call ``gatsby.zarr``."""
    from example_run import write_example_run

    path = tmp_path_factory.mktemp("examples") / "gatsby.zarr"
    write_example_run(path)
    return path


@pytest.fixture(scope="session")
def everything_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the examples call ``everything.zarr``: 3 steps of the tier everything."""
    from trajstore.trainers import preset, record

    settings = ["training.steps=3", "training.batch_size=4", "recording.variables=everything"]
    path = tmp_path_factory.mktemp("examples") / "everything.zarr"
    return Path(record(preset("gatsby").with_values(settings), path))


@pytest.fixture(scope="session", autouse=True)
def _no_flush() -> Iterator[None]:
    """Write to disks when the system likes: no test loses its power, and waiting takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _example(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Run each example in a folder of its own, with copies of its runs; gatsby.zarr is ``ds``."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    folder: Path = request.getfixturevalue("tmp_path")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    text = "".join(example.source for example in request.node.dtest.examples)
    opens = re.search(r"\bds\b", text) is not None
    if opens or "gatsby.zarr" in text:
        shutil.copytree(request.getfixturevalue("example_run"), folder / "gatsby.zarr")
    if "everything.zarr" in text:
        shutil.copytree(request.getfixturevalue("everything_run"), folder / "everything.zarr")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRAJSTORE_CACHE", str(folder / "cache"))
    if opens:
        from trajstore import open_run

        doctest_namespace["ds"] = open_run("gatsby.zarr")
