"""Whoever mistypes a name, of any kind and in any command, is told the right one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from example_run import write_example_run

from trajstore.cli.main import main

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MISTYPED = {
    # options
    "record --prest gatsby": "--preset",
    "report gatsby.zarr --out r.html": "--output",
    # presets, texts
    "record --preset gatsbi": "gatsby",
    "fetch gpt-2": "gpt2",
    # fields, and what is in them
    "record --dry-run --preset gatsby --set optimizer.weigth_decay=1": "weight_decay",
    "record --dry-run --preset gatsby --set lr=3": "optimizer.lr",
    "record --dry-run --preset gatsby --set training.warmup_steps=3": "schedule.warmup_steps",
    "record --dry-run --preset gatsby --set schedule.name=cosin": "cosine",
    "record --dry-run --preset gatsby --set training.device=gpu": "cuda",
    "record --preset gatsby --device gpu": "cuda",
    # variables, tokens
    "export gatsby.zarr --variables W,gard -o g.safetensors": "grad",
    "export gatsby.zarr --select token=ded -o g.safetensors": "dead",
    # runs
    "info gatsby": "gatsby.zarr",
    "verify gatsy.zarr": "gatsby.zarr",
    "info gatsy.zarr": "gatsby.zarr",
    # quantities, their options, lattices, populations
    "analyze gatsby.zarr frezee": "freeze",
    "analyze gatsby.zarr freeze --set latice=bfloat16": "lattice",
    "analyze gatsby.zarr freeze --lattice bflaot16": "bfloat16",
    "analyze gatsby.zarr freeze --population 'rare=token_cout < 3'": "token_count",
    # figures, formats, layouts
    "plot gatsby.zarr heatmpa -o g.png": "heatmap",
    "export gatsby.zarr --format hdf -o g.h5": "hdf5",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistyped")
    write_example_run(made / "gatsby.zarr")
    return made


@pytest.mark.parametrize("call", MISTYPED)
def test_a_mistyped_name_gets_a_suggestion(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(main, shlex.split(call), prog_name="trajstore")
    assert done.exit_code == 2
    _, asked, told = done.stderr.lower().partition("did you mean")
    assert asked
    assert f"'{MISTYPED[call]}'" in told
    assert [entry.name for entry in folder.iterdir()] == ["gatsby.zarr"]
