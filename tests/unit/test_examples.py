"""Docstrings show by example what a function does; pytest runs the examples of all packages."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "trajstore",
    "trajstore.analysis",
    pytest.param("trajstore.trainers", marks=pytest.mark.torch),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_has_an_example(package: str) -> None:
    if package == "trajstore.trainers":
        pytest.importorskip("torch")
    facade = importlib.import_module(package)
    functions = {
        name: found for name in facade.__all__ if inspect.isfunction(found := getattr(facade, name))
    }
    assert functions
    assert [name for name, found in functions.items() if ">>>" not in (found.__doc__ or "")] == []


@pytest.mark.parametrize("package", ["trajstore", "analysis", "trainers"])
def test_no_example_is_skipped(package: str) -> None:
    skipped = [
        path for path in (ROOT / package).rglob("*.py") if "doctest: +SKIP" in path.read_text()
    ]
    assert skipped == []
