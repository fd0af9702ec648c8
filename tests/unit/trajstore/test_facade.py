"""What `import trajstore` gives, and what it does not load for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trajstore

ROOT = Path(__file__).parents[3]
HEAVY = ("xarray", "dask", "pandas", "zarr", "numpy", "torch")


def run(code: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_every_promised_name_is_there_and_is_found_only_once() -> None:
    for name in trajstore.__all__:
        assert getattr(trajstore, name) is getattr(trajstore, name)
    assert set(trajstore.__all__) <= set(dir(trajstore))
    with pytest.raises(AttributeError, match="'trajstore' has no attribute 'opn_run'"):
        trajstore.opn_run  # noqa: B018


@pytest.mark.parametrize("name", ["trainers", "analysis"])
def test_a_folder_of_the_clone_is_no_second_copy(name: str) -> None:
    code = f"""
try:
    import {name}
except ImportError as error:
    print(error)
import trajstore.{name}
"""
    assert f"import trajstore.{name} instead" in run(code, ROOT)


def test_the_command_line_helps_without_loading_them() -> None:
    code = f"""
import sys
from click.testing import CliRunner
from trajstore.cli.main import main
for name in main.list_commands(None):
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
print([m for m in {HEAVY} if m in sys.modules])
"""
    assert run(code) == "[]"
