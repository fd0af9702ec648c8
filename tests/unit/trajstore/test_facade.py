"""What `import trajstore` gives, and what it does not load for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trajstore
from trajstore import RunWriter, analysis, open_run, sample_run, verify
from trajstore.errors import RunExists

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


def test_the_sample_run_shows_the_freeze_of_dead_tokens(sample: Path) -> None:
    ds = open_run(sample).load()
    assert (ds.loss[1] > ds.loss[-1]).item()
    assert (ds.grad[-1].where(ds.is_dead, 1) != 0).any("hidden").all()
    frozen = analysis.freeze(ds).frozen_since.where(ds.is_dead, drop=True)
    assert ((frozen > 100) & (frozen < 300)).all()
    cause = analysis.freeze_cause(ds).values
    assert (cause[cause != 0] == analysis.CAUSES.index("lost_update")).mean() > 0.99


@pytest.mark.torch
def test_the_sample_run_replays(sample: Path) -> None:
    pytest.importorskip("torch")
    from trajstore.trainers.replays.replay import replay

    assert verify(sample).clean
    found = replay(sample)
    assert found.replayed == 300
    # torch fuses a product and a sum on some processors only.
    assert found.differing < 20


def test_a_sample_run_is_returned_as_it_is(sample: Path) -> None:
    before = (sample / "zarr.json").stat().st_mtime_ns
    assert sample_run(sample) == sample
    assert (sample / "zarr.json").stat().st_mtime_ns == before


def test_sample_run_does_not_replace_other_paths(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with RunWriter.create(
        tmp_path / "run.zarr", token=[0], hidden=1, variables={"W": "float32"}
    ) as run:
        run.append(step=0, W=np.float32([[1]]))
    for name in ("folder", "run.zarr"):
        with pytest.raises(RunExists, match="exists and is not a complete sample run"):
            sample_run(tmp_path / name)
