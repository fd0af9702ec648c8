"""Imports of the package."""

from __future__ import annotations

import subprocess
import sys


def test_who_analyses_what_is_in_memory_does_not_load_zarr():
    loaded = (
        "import trajstore.analysis.functions, sys; "
        "print('xarray' in sys.modules, 'zarr' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
