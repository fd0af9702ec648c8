"""Imports of the package."""

from __future__ import annotations

import subprocess
import sys


def test_importing_analysis_does_not_import_zarr():
    loaded = (
        "import trajstore.analysis.accessor, sys; "
        "print('xarray' in sys.modules, 'zarr' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
