"""`trajstore export` and `import` as installed, and the notebooks' own figures from their files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import Cli
from exchange_runs import ALL, assert_same_run, write_run
from safetensors.numpy import load_file

from trajstore.cli.output import BytesProgress

ROWS, TOKENS = 21, 12
DEAD = np.arange(0, TOKENS, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exchange") / "run.zarr"
    write_run(
        path,
        ALL,
        rows=ROWS,
        tokens=TOKENS,
        hidden=8,
        block_rows=16,
        config={"initialization": {"kind": "point", "sigma": 1e-5}},
        attributes={"optimizer": {"hyperparameters": {"lr": 1e-3, "betas": [0.9, 0.999]}}},
    )
    return path


def test_a_subset_is_exported_and_imported(trajstore_cli: Cli, run: Path, tmp_path: Path) -> None:
    options = ["--select", "step=0:20:10,5", "--select", "token=dead", "--variables", "W,loss"]
    options += ["--memory", "64MiB"]
    written = trajstore_cli("export", run, *options, "-o", tmp_path / "f").stdout
    assert written.startswith(f"Wrote {tmp_path / 'f'}: ")
    assert f"3 rows, {len(DEAD)} tokens." in written
    done = trajstore_cli("import", tmp_path / "f", "-o", tmp_path / "back.zarr", "--json")
    facts = json.loads(done.stdout)
    assert facts["variables"] == {"W": "bfloat16", "loss": "float32"}
    assert (facts["first_step"], facts["last_step"]) == (0, 10)
    expected = xr.open_zarr(run)[["W", "loss"]].sel(step=[0, 5, 10]).isel(token=DEAD)
    assert_same_run(expected, tmp_path / "back.zarr")


def test_the_ending_says_which_format(run: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    for name in ("f.h5", "f.zarr", "f.safetensors"):
        trajstore_cli("export", run, "--variables", "W", "-o", tmp_path / name)
    assert (tmp_path / "f.h5").read_bytes()[:4] == b"\x89HDF"
    assert "W" in xr.open_zarr(tmp_path / "f.zarr")
    assert "W" in load_file(tmp_path / "f.safetensors")


def test_sigterm_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajstore_cli: Cli
) -> None:
    """The signal comes when the file is half written, within a callback that loses exceptions."""
    show = BytesProgress.show

    def interrupted(bar: BytesProgress, done: int, total: int) -> None:
        class Gone:
            pass

        gone = Gone()
        weakref.finalize(gone, signal.raise_signal, signal.SIGTERM)
        del gone
        show(bar, done, total)

    monkeypatch.setattr(BytesProgress, "show", interrupted)
    trajstore_cli("export", run, "-o", tmp_path / "f.h5", rc=128 + signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_write_that_fails_names_the_file(run: Path, tmp_path: Path) -> None:
    """In a process, as HDF5 crashed at its end."""
    code = (
        "import resource, sys\n"
        "from click.testing import CliRunner\n"
        "from trajstore.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "for path in sys.argv[2:]:\n"
        "    done = CliRunner().invoke(main, ['export', sys.argv[1], '-o', path])\n"
        "    print(done.exit_code, ' '.join(done.stderr.split()))\n"
    )
    files = [str(tmp_path / name) for name in ("f.safetensors", "f.zarr", "f.h5")]
    # The limit also holds for the modules that Python compiles: without -B they would be cut.
    words = [sys.executable, "-B", "-c", code, str(run), *files]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for line, file in zip(done.stdout.splitlines(), files, strict=True):
        assert line.startswith("1 ")
        assert f"the operating system reported an error {file}: File too large" in line
    assert list(tmp_path.iterdir()) == []
