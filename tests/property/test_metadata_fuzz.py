"""Damaged metadata files of runs: each way to open a run ends well, or in an error that is named.

``TRAJSTORE_METADATA=5000`` tries that many damaged runs with each command instead of a few; with
``pytest -s`` each prints its row of ``benchmarks/results/metadata-fuzz.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRIES = int(os.environ.get("TRAJSTORE_METADATA", "40"))
COMMANDS = ("open_run", "resume", "verify", "repair", "annotate", "info")
FUZZ = Path(__file__).parents[1] / "metadata_fuzz.py"
MOST_MEMORY = 100 << 20


def row(found: dict[str, Any]) -> str:
    classes = found["classes"]
    errors = ", ".join(
        f"{name} {count:,}"
        for name, count in sorted(classes.items())
        if name not in ("done", "raw")
    )
    return (
        f"| {found['command']} | {found['tries']:,} | {classes.get('done', 0):,} | {errors or '—'} "
        f"| {classes.get('raw', 0)} | {found['hangs']} | {found['peak'] / (1 << 20):.0f} MiB "
        f"| {found['slowest']:.1f} s |"
    )


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="measures the memory as Linux tells it")
@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_metadata_are_errors(command: str) -> None:
    done = subprocess.run(
        [sys.executable, FUZZ, command, str(TRIES)], capture_output=True, text=True, timeout=7200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(f"\n{row(found)}")
    assert found["raw"] == {}
    assert found["hangs"] == 0
    assert found["peak"] < MOST_MEMORY
    # Some damage is harmless to who does not read it; some must be noticed.
    classes = found["classes"]
    assert classes["done"] > 0
    assert command in ("verify", "repair") or classes["FormatError"] > TRIES / 4
