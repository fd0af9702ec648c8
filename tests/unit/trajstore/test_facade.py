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


def test_the_codec_is_loaded_without_xarray() -> None:
    code = """
import sys
from importlib.metadata import entry_points
(codec,) = entry_points(group="zarr.codecs", name="trajstore.block")
print(codec.load().__name__, [m for m in ("xarray", "dask", "pandas") if m in sys.modules])
"""
    assert run(code) == "BlockCodec []"


def test_datasets_have_traj_from_the_first_one_that_xarray_opens() -> None:
    code = """
import sys, xarray
try:
    xarray.open_dataset("nothing.zarr")
except FileNotFoundError:
    pass
print([m for m in sys.modules if m.startswith("trajstore.analysis")])
print(type(xarray.Dataset().traj).__name__)
"""
    assert run(code).splitlines() == ["[]", "TrajAccessor"]


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
