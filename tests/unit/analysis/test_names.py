"""The index of names and the stub for type checkers, against the decorators."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trajstore.analysis.figures.figure import LISTED
from trajstore.analysis.scan.quantity import every_quantity

TOOL = Path(__file__).parents[3] / "tools" / "names.py"


@pytest.mark.skipif(not TOOL.exists(), reason="needs a clone")
def test_the_files_of_names_are_those_of_the_decorators() -> None:
    spec = importlib.util.spec_from_file_location("names_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.files().items():
        assert path.read_text() == text, "run make names"


def test_every_place_in_a_list_is_taken_once() -> None:
    for places in (
        [quantity.place for quantity in every_quantity().values()],
        [listed.place for listed in LISTED],
        [listed.place_in_list for listed in LISTED],
    ):
        assert Counter(places).most_common(1)[0][1] == 1


def test_importing_analysis_does_not_import_zarr():
    loaded = (
        "import trajstore.analysis.accessor, sys; "
        "print('xarray' in sys.modules, 'zarr' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
