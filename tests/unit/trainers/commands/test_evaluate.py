from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from click.testing import CliRunner

from trajstore.cli.main import main
from trajstore.errors import InvalidArgument
from trajstore.trainers.commands.model_commands import check_options

NOTHING = dict.fromkeys(("text", "prompt", "against", "length", "tokenizer"))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("los", {}, r"got 'los' \(did you mean 'loss'\?\)"),
        ("loss", {}, "loss needs --text"),
        ("loss", {"text": "a.txt", "prompt": "a"}, "loss has no option --prompt"),
        ("attention", {"prompt": "a", "length": 3}, "attention has no option --length"),
        ("probe.py:probe", {"tokenizer": "ascii"}, "probe.py:probe has no option --tokenizer"),
    ],
)
def test_options_that_do_not_belong_together(
    function: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_options(function, {**NOTHING, **options})


@pytest.mark.torch
def test_the_commands_evaluate_and_check_out_a_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trainings import record_gpt2

    run = record_gpt2(tmp_path).path
    words = ["evaluate", str(run), "generation", "--prompt", "th", "--length", "3", "--every", "3"]
    words += ["-o", str(tmp_path / "texts.zarr")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "generation of 3 steps, 3 of them new" in done.output
    assert xr.open_zarr(tmp_path / "texts.zarr")["step"].values.tolist() == [0, 3, 6]
    words = ["checkout", str(run), "--at", "2", "--optimizer", "-o", str(tmp_path / "folder")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= {
        "config.json", "model.safetensors", "optimizer.pt", "tokenizer.json"
    }  # fmt: skip
    words = ["checkout", str(run), "--at", "4", "-o", str(tmp_path / "folder"), "--overwrite"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "folder" / "optimizer.pt").exists()
    (tmp_path / "folder" / "config.json").unlink()
    done = CliRunner().invoke(main, words)
    assert "is not a checkout and is not overwritten; choose another path" in done.stderr
