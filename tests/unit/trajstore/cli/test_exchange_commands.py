"""Output of `trajstore import`, without a process per call."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from exchange_runs import write_run
from grammar_files import stored, truth, write
from safetensors.numpy import load_file

from trajstore import open_run
from trajstore.cli.main import main
from trajstore.exchange.layouts import NAMES


def call(*arguments: object, rc: int = 0) -> Result:
    done = CliRunner().invoke(main, ["import", *map(str, arguments)])
    assert done.exit_code == rc, done.output
    return done


@pytest.fixture
def file(tmp_path: Path) -> Path:
    known = truth()
    arrays = {"x": stored(known.values["W"], "uint16"), "nll": stored(known.values["loss"], "f4"),
              "centroid": np.zeros((6, 3)), "dead_ids": np.flatnonzero(known.dead)}  # fmt: skip
    return write(tmp_path / "mine.npz", "npz", arrays)


def test_without_a_file_it_lists_what_it_understands() -> None:
    printed = call().stdout
    for word in ("safetensors", "embedding_matrix", "untrained_mask", "adam_beta1", *NAMES):
        assert word in printed
    facts = json.loads(call("--json").stdout)
    assert "w" in facts["kinds"]["W"]["names"]
    assert facts["scalars"]["seed"]["goes_to"] == "config.training.seed"


def test_a_dry_run_prints_the_table_and_writes_nothing(file: Path) -> None:
    options = "--map W=x --labels steps=0:60:10 --bits W=bfloat16".split()
    printed = call(file, "--dry-run", *options, "--map", "loss=nll").stdout
    lines = {line.split()[0]: line for line in reversed(printed.splitlines()) if line.split()}
    assert "uint16" in lines["x"]
    assert "bits of bfloat16" in lines["x"]
    assert "omitted" in lines["centroid"]
    assert "unknown name" in lines["centroid"]
    assert "steps 0 to 50, 7 tokens, 2 of them dead" in lines["Run:"]
    assert [path.name for path in file.parent.iterdir()] == ["mine.npz"]
    facts = json.loads(call(file, "--dry-run", "--json", *options).stdout)
    assert {line["name"]: line["kind"] for line in facts["table"]}["x"] == "W"
    assert (facts["path"], facts["tokens"], facts["others"]) == (None, 7, [])
    printed = call(file, "-o", file.with_name("run.zarr"), *options, "--map", "ignore=nll").stdout
    assert f"Imported {file.with_name('run.zarr')}: 6 rows" in printed


def test_the_printed_layout_is_edited_and_passed(file: Path) -> None:
    """It says what the options said, so the edited text replaces them."""
    options = "--map W=x --labels steps=0:60:10 --bits W=float16".split()
    printed = call(file, "--dry-run", *options).stdout
    layout = file.with_name("mine.toml")
    layout.write_text(printed.partition("FILE.toml:\n")[2] + 'nll = "loss"\n')
    run = file.with_name("run.zarr")
    call(file, "--layout", layout, "-o", run)
    ds = open_run(run)
    assert ds.step.values.tolist() == [0, 10, 20, 30, 40, 50]
    assert (ds.W.attrs["native_dtype"], "loss" in ds) == ("float16", True)
    assert np.flatnonzero(ds.is_dead.values).tolist() == np.load(file)["dead_ids"].tolist()


def test_runs_of_a_folder_go_into_one_file(tmp_path: Path) -> None:
    for number in (10, 2):
        write_run(
            tmp_path / f"runs/{number}.zarr", {"W": "bfloat16"}, rows=2, tokens=3, hidden=number
        )
    arguments = ["export", str(tmp_path / "runs"), "-o", str(tmp_path / "f.csv")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "unknown extension .csv of" in done.stderr
    assert "or --format safetensors, hdf5" in done.stderr
    done = CliRunner().invoke(main, [*arguments, "--layout", "flannel-3"])
    assert done.exit_code == 0, done.output
    held = load_file(tmp_path / "f.csv")
    assert [held[f"run_{at}_embeddings"].shape[-1] for at in (0, 1)] == [2, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no output given"),
        (["--dry-run", "--map", "W"], "expected KIND=NAME"),
        (["--dry-run", "--bits", "bfloat16", "--bits", "float16"], "and float16 for one variable"),
        (["--dry-run", "--first-row", "2"], "got --first-row 2, expected 0 or 1"),
    ],
)
def test_wrong_calls_are_one_sentence(file: Path, arguments: list[str], message: str) -> None:
    done = call(file, *arguments, rc=2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
