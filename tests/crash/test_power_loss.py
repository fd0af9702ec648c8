"""A loss of power at any moment of a recording, a cut and an annotation loses nothing promised."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "powerloss.py"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="its shim is of Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="its shim needs a C compiler"),
]


def test_commands_survive_a_loss_of_power_unless_nothing_is_flushed() -> None:
    """At some moments; `make powerloss` tries all, and all commands."""
    commands = ["create", "cut", "annotate", "--no-fsync", "--states", "6"]
    done = subprocess.run([sys.executable, TOOL, *commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "create --no-fsync" in line)
    states, promised, lost, *_ = map(int, line.split()[-6:])
    assert 0 < promised < states
    assert lost > 0
