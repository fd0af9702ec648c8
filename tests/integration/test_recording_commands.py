"""`record` and `presets` as a user types them, and scripts of the how-tos as they are printed."""

from __future__ import annotations

import json
import math
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import independent_trainings as trainings
import numpy as np
import pytest
import torch
import xarray as xr
from bits_and_calls import Cli
from trainings import same
from transformers import AutoModelForCausalLM

from trajstore.trainers import model_at, models, optimizer_state_at
from trajstore.trainers.presets import PRESETS
from trajstore.trainers.texts import embedded_text

SMALL = [
    "--set", "model.context=16", "--set", "training.batch_size=2", "--set", "training.device=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJSTORE_CACHE", str(tmp_path / "cache"))


ADVICE = "exp_avg_sq can never decay: 0.999·v rounds back to v for 100 % of bfloat16 values"


def test_presets_are_listed_and_printed_as_files(trajstore_cli: Cli, tmp_path: Path) -> None:
    listed = trajstore_cli("presets").stdout.splitlines()
    assert {line.split()[0] for line in listed} == set(PRESETS)
    file = tmp_path / "mine.toml"
    file.write_text(trajstore_cli("presets", "gatsby-adam").stdout)
    one, other = (
        trajstore_cli("record", *source, "--dry-run").stdout
        for source in (("--preset", "gatsby-adam"), ("--config", file))
    )
    assert one == other


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "wordybird-1b"])
def test_a_preset_records_without_files(name: str, trajstore_cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    narrow = ("--set", "model.hidden=8", "--set", "model.layers=1")
    done = trajstore_cli("record", "--preset", name, "--steps", 2, *SMALL, *narrow, "-o", path)
    assert "embedded" in done.stderr
    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == [0, 1, 2]
    vocabulary = ds.attrs["config"]["model"]["vocab_size"]
    assert abs(ds.loss.values[1] - np.log(vocabulary)) < 0.1
    assert (np.abs(ds.grad.values[1, ds.is_dead.values]).max(axis=-1) > 0).all()


def test_a_dry_run_says_what_would_be_recorded(trajstore_cli: Cli, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("101 7 32\n")
    call = [
        "--preset", "gatsby", "--steps", 10, "--set", "recording.every=4",
        "--set", f"recording.tokens={tokens}", "--set", "recording.variables=matrix,W_ulp_l1",
    ]  # fmt: skip
    path = tmp_path / "run.zarr"
    planned = trajstore_cli("record", *call, "--dry-run", "-o", path).stdout
    assert not path.exists()
    assert planned.startswith("4 rows of 3 tokens: steps 0 to 10, every 4;")
    for tier in ("weights", "weights+grads", "matrix", "norms", "everything"):
        assert f"  {tier} " in planned
    assert ADVICE in planned


def test_a_device_that_is_not_there_is_refused(trajstore_cli: Cli, tmp_path: Path) -> None:
    missing = "mps" if torch.cuda.is_available() else "cuda"  # no machine has both
    call = ["record", "--preset", "gatsby", "--device", missing, "-o", tmp_path / "run.zarr"]
    assert "torch finds no such device" in trajstore_cli(*call, rc=2).stderr


STEPS = 6


def test_a_recording_and_what_is_typed_after_it(trajstore_cli: Cli, tmp_path: Path) -> None:
    """The run obeys the laws of the notebook."""
    path = tmp_path / "my run.zarr"
    # Native products take four times as long on processors without bfloat16 units.
    changes = ("recording.block_rows=8", "training.device=cpu", "training.products=float32")
    settings = [word for change in changes for word in ("--set", change)]
    options = ("--steps", STEPS, "--memory", "64MiB", *settings, "-o", path)
    done = trajstore_cli("record", "--preset", "gatsby", *options)
    assert "gatsby stand-in (embedded)" in done.stderr
    assert f"step {STEPS}/{STEPS}" in done.stderr
    assert done.stderr.count(ADVICE) == 1
    lines = done.stdout.splitlines()
    pace = r"Recorded 7 rows to .* in [\d.]+ m?s \([\d.e+]+ steps per second\): "
    assert re.match(pace, lines[0])

    ds = xr.open_zarr(path)
    assert ds.step.values.tolist() == list(range(STEPS + 1))
    dead = ds.is_dead.values
    assert dead.sum() == 51
    assert (ds.token_count.values[dead] == 0).all()
    assert float(ds.loss[1]) == pytest.approx(math.log(128), abs=0.001)
    assert float(ds.loss[-1]) < 4.75
    logits = ds.logits[1].values
    assert logits.max() == logits.min()
    norms = np.linalg.norm(ds.grad[1].values, axis=-1)
    assert norms[dead].mean() == pytest.approx(6.17e-2, rel=0.02)
    assert norms[dead].std() < 1e-3 * norms[dead].mean()
    assert norms[~dead].max() > 1
    start = ds.W[0].values
    assert np.linalg.norm(start.mean(0)) == pytest.approx(1, abs=0.002)
    assert np.linalg.norm(start - start.mean(0), axis=-1).max() < 0.01
    assert (ds.traj.coherence("dead") > 0.99).all()
    assert (ds.traj.coherence("live") < 0.9).all()

    summary, analyze, verify = [shlex.split(line.split("   ")[0])[1:] for line in lines[2:]]
    text = trajstore_cli(*summary).stdout
    assert "Loss: 4.8520 at step 1" in text
    assert "NON-ZERO" in text
    trajstore_cli(*analyze)
    assert "sound" in trajstore_cli(*verify).stdout
    text = trajstore_cli("info", path).stdout
    assert f"complete, {STEPS + 1} rows, steps 0 to {STEPS}" in text
    assert ADVICE in text
    facts = json.loads(trajstore_cli("info", path, "--json").stdout)
    assert facts["config"]["data"]["target_offset"] == 2
    assert facts["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert facts["optimizer"]["hyperparameters"]["weight_decay"] == 0.01
    assert facts["provenance"]["corpus"]["bytes"] == 265_905


DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = {
    name: script
    for page in (DOCS / "howto").glob("*.md")
    for name, script in re.findall(
        r"<!-- run: (\w+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL
    )
}


def test_the_docs_have_a_script_for_each_way_to_train() -> None:
    assert set(SCRIPTS) == {"trainer", "lightning", "loop", "accelerate"}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_docs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lightning":
        pytest.importorskip("lightning")
        warnings.simplefilter("ignore", UserWarning)  # of its logger, and of few batches
    assert len([line for line in SCRIPTS[name].splitlines() if line.strip()]) < 25
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS["loop"] if name == "accelerate" else "") + SCRIPTS[name])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    path = min(tmp_path.glob("*.zarr"))  # that of accelerate, before that of the loop
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "complete"
    assert ds.sizes["step"] > 5
    assert set(ds) >= {"W", "grad", "exp_avg", "exp_avg_sq", "logits", "loss"}
    assert ds.W.shape[1] == 128
    assert ds.loss.values[-1] < ds.loss.values[1]
    never = np.isin(np.arange(128), list(b"In my younger and more vulnerable years "), invert=True)
    assert (ds.grad.values[1, never] != 0).any(axis=-1).all()


# Recorded models and states against those that a program without trajstore saved -----------------


TOTAL = 10
SAVED = sorted(random.Random(0).sample(range(1, TOTAL + 1), 4))


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the states that the independent programs save."""
    folder = tmp_path_factory.mktemp("states")
    np.save(folder / "ids.npy", np.frombuffer(embedded_text(), np.uint8).astype(np.int64))
    command = [sys.executable, trainings.__file__, folder, TOTAL, *SAVED]
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=os.environ | {"PYTHONPATH": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("case", list(trainings.CASES))
def test_recorded_steps_are_those_of_an_independent_training(
    case: str, states: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    run, folder = tmp_path / "run.zarr", tmp_path / "checkout"
    # The independent program multiplies as torch does, also on processors where that is slow.
    changes = (
        "training.device=cpu", "training.products=native", "recording.block_rows=4",
        f"training.batch_size={trainings.BATCH}",
    )  # fmt: skip
    chosen = [argument for change in changes for argument in ("--set", change)]
    options = ("--variables", "everything", "--steps", TOTAL, *chosen)
    trajstore_cli("record", "--preset", case, *options, "-o", run)
    saved = {step: torch.load(states / f"{case}-{step}.pt") for step in SAVED}
    for step, model in models(run, SAVED):
        for each in (model, model_at(run, step)):
            assert [*each.state_dict()] == [*saved[step]["model"]]
            assert same(dict(each.state_dict()), dict(saved[step]["model"])), step
        assert same(optimizer_state_at(run, step), saved[step]["optimizer"]), step
    step = random.Random(case).choice(SAVED)
    trajstore_cli("checkout", run, "--at", step, "--optimizer", "-o", folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert same(dict(loaded), dict(saved[step]["model"]))
    assert same(torch.load(folder / "optimizer.pt"), saved[step]["optimizer"])
