"""`trajstore plot`, as a user calls it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore.schema import EVALUATION

pytest.importorskip("matplotlib")


@pytest.fixture
def run(example_run: Path) -> Path:
    return example_run


def test_figures(run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path) -> None:
    one = tmp_path / "norms.svg"
    out = trajstore_cli("plot", run, "grad-norms", "-o", one, "--style", "dark").stdout
    assert "norms.svg: grad_norms." in out
    text = one.read_text()
    assert "gatsby.zarr · W 128 × 4, AdamW, bfloat16" in text
    assert "L2 norm of the gradient / nat" in text
    sheet = tmp_path / "sheet.png"
    parts = ("step=2:", "token=live", "population=live")
    options = [word for part in parts for word in ("--select", part)]
    out = trajstore_cli("plot", run, "grad_norms", "freeze", "-o", sheet, *options).stdout
    assert "sheet.png: grad_norms, freeze." in out
    assert sheet.stat().st_size > 10_000
    both = tmp_path / "both.png"
    trajstore_cli("plot", run, run, "loss", "freeze", "-o", both, "--lattice", "native")
    paths = tmp_path / "paths.svg"
    trajstore_cli("plot", run, "displacement", "-o", paths, "--vectors", "centroid:all")
    assert "centroid of all 1 × 4" in paths.read_text()
    other = tmp_path / "other.zarr"
    shutil.copytree(run, other)
    runs = tmp_path / "runs.svg"
    out = trajstore_cli("plot", run, other, "divergence", "-o", runs, "--common-steps").stdout
    assert "runs.svg: divergence." in out


def test_the_film(run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path) -> None:
    still = tmp_path / "film.svg"
    options = ("--frames", "even:3", "--style", "dark")
    out = trajstore_cli("plot", run, "film", "-o", still, *options).stdout
    assert out.split() == ["Wrote", f"{still}:", "film."]
    assert "frozen (" in still.read_text()
    other = shutil.copytree(run, tmp_path / "other.zarr")
    for arguments, sentence in (
        ((run, "film", "loss"), "film is drawn alone, got film, loss; draw the others"),
        ((run, other, "film"), "film shows one run, got 2; draw a film of each"),
        ((run, "loss", "--frames", 5), "--frames is for film, got loss; leave it out"),
        ((run, "film", "--frames", "odd:5"), "got frames='odd:5', expected a number from 2"),
        ((run, "film", "-o", "film.avi"), "extensions .gif, .webp, .mp4, .png, .svg, .pdf, or a"),
        (
            (run, "film", "-o", still),
            "already exists; choose another path, or replace it with --overwrite",
        ),
    ):
        error = trajstore_cli("plot", *arguments, rc=2).stderr
        assert sentence in " ".join(error.split()), arguments


def test_an_added_population_is_drawn(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "added.svg"
    trajstore_cli("plot", run, "grad_norms", "-o", file, "--population", "few=token < 9")
    assert all(f"{name} tokens" in file.read_text() for name in ("dead", "live", "few"))


def test_wrong_options_of_plot_are_errors(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    for arguments, code, sentence in (
        (("divergence",), 2, "divergence compares runs, got one"),
        (("loss", "--select", "step=5:2"), 2, "no recorded step is in '5:2'"),
        (("loss", "--select", "token=999"), 2, "token 999 was not recorded"),
        (("freeze", "--select", "population=mostly_dead"), 2, "choose from dead, live, all"),
        (("loss", "--lattice", "float32"), 2, "loss has no lattice"),
        (("trajectory", "--plane", "hidden_mean"), 1, "hidden_mean"),
    ):
        error = trajstore_cli("plot", run, *arguments, rc=code).stderr
        assert sentence in " ".join(error.split()), arguments
    file.write_text("mine")
    refused = trajstore_cli("plot", run, "loss", "-o", file, rc=2).stderr
    assert "already exists; choose another path, or replace it with --overwrite" in refused
    assert file.read_text() == "mine"
    trajstore_cli("plot", run, "loss", "-o", file, "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_results_of_an_evaluation(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    results = tmp_path / "results.zarr"
    xr.Dataset(
        {"text_loss": ("step", [3.0, 2.0]), "text": ("step", np.array(["a", "b"], object))},
        {"step": [0, 1]},
        {EVALUATION: {"run": "gatsby.zarr", "function": "probe"}},
    ).to_zarr(results, zarr_format=3)
    file = tmp_path / "results.svg"
    out = trajstore_cli("plot", results, "all", "-o", file).stdout
    assert "results.svg: text_loss." in out
    assert "text is left out: text has texts" in out
    assert "results.zarr · probe, gatsby.zarr" in file.read_text()
    error = trajstore_cli("plot", results, "freeze", rc=2).stderr
    assert "got 'freeze', expected one or more of all, text, text_loss" in error
    error = trajstore_cli("plot", results, run, "text_loss", rc=1).stderr
    assert "gatsby.zarr is not the store of an evaluation" in " ".join(error.split())
