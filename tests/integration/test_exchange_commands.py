"""`trajstore export` and `import` as installed, and the notebooks' own figures from their files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from bits_and_calls import Cli
from exchange_runs import ALL, assert_same_run, write_run
from safetensors.numpy import load_file, save_file

from trajstore.cli.output import BytesProgress

ROWS, TOKENS = 41, 30
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


@pytest.fixture(scope="module")
def summary(trajstore_cli: Cli, run: Path) -> xr.Dataset:
    """The tables that `trajstore summary` prints."""
    tables = json.loads(trajstore_cli("summary", run, "--json").stdout)
    return xr.Dataset({name: (table["dims"], table["values"]) for name, table in tables.items()})


def close(got: Any, expected: Any) -> bool:
    return bool(np.isclose(float(got), float(expected), rtol=1e-5))


def test_the_figures_of_15_1a(
    trajstore_cli: Cli, run: Path, summary: xr.Dataset, tmp_path: Path
) -> None:
    trajstore_cli("export", run, "--layout", "15.1a", "-o", tmp_path / "f")
    file = load_file(tmp_path / "f")
    norms = {
        name: np.linalg.norm(file["grads"][:, file[f"{name}_token_ids"], :], axis=2)
        for name in ("dead", "live")
    }
    for name, by_row in norms.items():
        for when, row in (("first", 1), ("last", -1)):
            printed = summary["grad_norms"].sel(population=name, when=when)
            assert close(printed.sel(statistic="mean"), by_row[row].mean())
            assert close(printed.sel(statistic="max"), by_row[row].max())
            assert close(printed.sel(statistic="min"), by_row[row].min())
    assert close(summary["max_dead_grad_norm"], norms["dead"][1:].max())
    assert summary["when_step"].values.tolist() == file["recorded_steps"][[1, -1]].tolist()
    centroids = summary["centroid_norm"].sel(population="all")
    assert close(centroids.sel(state="first"), np.linalg.norm(file["embeddings"][0].mean(axis=0)))
    assert close(centroids.sel(state="last"), np.linalg.norm(file["embeddings"][-1].mean(axis=0)))
    logits = summary["logits"]
    assert close(logits.sel(logit_statistic="min"), file["logits"][1].min())
    assert close(logits.sel(logit_statistic="max"), file["logits"][1].max())
    assert close(logits.sel(logit_statistic="range"), np.ptp(file["logits"][1]))
    assert close(logits.sel(logit_statistic="std"), file["logits"][1].std(ddof=1))
    assert close(summary["loss"].sel(when="first"), file["losses"][1])
    assert close(summary["loss"].sel(when="last"), file["losses"][-1])


def test_the_figures_of_1_12f(
    trajstore_cli: Cli, run: Path, summary: xr.Dataset, tmp_path: Path
) -> None:
    trajstore_cli("export", run, "--layout", "1.12f", "-o", tmp_path / "f")
    file = load_file(tmp_path / "f")
    W = file["embeddings"][[0, -1]][:, DEAD].astype("f4")
    moved = np.linalg.norm(W[1] - W[0], axis=1)
    printed = summary["displacement"].sel(population="dead")
    assert close(printed.sel(statistic="max"), moved.max())
    assert close(printed.sel(statistic="mean"), moved.mean())
    assert close(printed.sel(statistic="median"), np.median(moved))
    for when, row in (("first", 1), ("last", -1)):
        loss = np.float32(summary["loss"].sel(when=when)).astype(ml_dtypes.bfloat16)
        assert loss == file["losses"][row]
    # An import of the file, with labels of dead tokens, gives the same tables.
    save_file({"untrained_indices": DEAD}, tmp_path / "masks")
    trajstore_cli(
        "import", tmp_path / "f", "--masks", tmp_path / "masks", "-o", tmp_path / "back.zarr"
    )
    tables = json.loads(trajstore_cli("summary", tmp_path / "back.zarr", "--json").stdout)
    for name in ("grad_norms", "displacement", "centroid_norm", "logits", "max_dead_grad_norm"):
        assert (np.array(tables[name]["values"], float) == summary[name].values).all()


def test_a_subset_is_exported_and_imported(trajstore_cli: Cli, run: Path, tmp_path: Path) -> None:
    options = ["--select", "step=0:30:10,5", "--select", "token=dead", "--variables", "W,loss"]
    options += ["--memory", "64MiB"]
    written = trajstore_cli("export", run, *options, "-o", tmp_path / "f").stdout
    assert written.startswith(f"Wrote {tmp_path / 'f'}: ")
    assert f"4 rows, {len(DEAD)} tokens." in written
    done = trajstore_cli("import", tmp_path / "f", "-o", tmp_path / "back.zarr", "--json")
    facts = json.loads(done.stdout)
    assert facts["variables"] == {"W": "bfloat16", "loss": "float32"}
    assert (facts["first_step"], facts["last_step"]) == (0, 20)
    expected = xr.open_zarr(run)[["W", "loss"]].sel(step=[0, 5, 10, 20]).isel(token=DEAD)
    assert_same_run(expected, tmp_path / "back.zarr")


def test_the_ending_says_which_format(run: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    for name in ("f.h5", "f.zarr", "f.safetensors"):
        trajstore_cli("export", run, "--variables", "W", "-o", tmp_path / name)
    assert (tmp_path / "f.h5").read_bytes()[:4] == b"\x89HDF"
    assert "W" in xr.open_zarr(tmp_path / "f.zarr")
    assert "W" in load_file(tmp_path / "f.safetensors")


@pytest.mark.parametrize("name", ["f.safetensors", "f.h5", "f.zarr"])
def test_sigterm_leaves_nothing(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajstore_cli: Cli
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
    trajstore_cli("export", run, "-o", tmp_path / name, rc=128 + signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["f.safetensors", "f.h5", "f.zarr"])
def test_a_write_that_fails_names_the_file(name: str, run: Path, tmp_path: Path) -> None:
    """In a process, as HDF5 crashed at its end."""
    code = (
        "import resource, sys\n"
        "from trajstore.cli.start import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "main()\n"
    )
    words = [sys.executable, "-c", code, "export", str(run), "-o", str(tmp_path / name)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    sentence = f"the operating system reported an error {tmp_path / name}: File too large"
    assert sentence in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
