"""`info` prints several runs as a table, and the segments of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from compact_runs import sample_part, scheduled_run
from growing_runs import begin, extend

from trajstore import RunWriter
from trajstore.cli.main import main
from trajstore.cli.run_commands import print_information
from trajstore.store.reading.run_info import information


def test_the_runs_of_a_folder_are_a_table(tmp_path: Path) -> None:
    for seed in (1, 2):
        config = {"training": {"seed": seed}}
        with begin(tmp_path / f"{seed}.zarr", config=config) as run:
            extend(run, range(4))
    done = CliRunner().invoke(main, ["info", str(tmp_path)])
    assert done.exit_code == 0
    assert "final loss" in done.stdout
    assert done.stdout.count("4.7000") == 2
    (tmp_path / "none.zarr").mkdir()
    done = CliRunner().invoke(main, ["info", f"{tmp_path}/*.zarr", "--json"])
    assert done.exit_code == 1, "one of them is no run"
    assert "none.zarr" in done.stderr
    first, second = json.loads(done.stdout)
    assert second["differing_settings"] == {"config.training.seed": 2}
    assert first["committed_rows"] == 4
    done = CliRunner().invoke(main, ["info", str(tmp_path / "1.zarr"), str(tmp_path / "3.zarr")])
    assert (done.exit_code, done.stderr) == (
        1, f"trajstore: there is no run at {tmp_path / '3.zarr'}; "
        f"runs in {tmp_path}: 1.zarr, 2.zarr\n",
    )  # fmt: skip
    assert "1.zarr" in done.stdout


def test_what_differs_between_the_segments_of_a_run_is_shown(
    small_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = information(small_run[0])
    last = facts["steps"]["last"]
    segments = [
        {"step": step, "config": {"training": {"steps": steps, "seed": 42}}}
        for step, steps in ((0, 1), (1, last), (last, 2 * last))
    ]
    print_information("run.zarr", facts | {"config": {"seed": 42}, "segments": segments})
    printed = capsys.readouterr().out.splitlines()
    begin = printed.index("segments")
    assert printed[begin + 1 :] == [
        "  steps 1 to 1: training.steps = 1",
        f"  steps 2 to {last}: training.steps = {last}",
    ]


def test_computed_arrays_are_named(sample: Path, tmp_path: Path) -> None:
    path = sample_part(sample, tmp_path / "run.zarr")
    done = CliRunner().invoke(main, ["info", str(path)])
    assert "encoding compact" in done.stdout
    assert "Computed from the gradient: W, exp_avg, exp_avg_sq." in done.stdout
    notes: list[str] = []
    unknown = scheduled_run(tmp_path / "unknown.zarr", recorded=False, on_note=notes.append)
    stored = information(unknown)["arrays"]
    shares = ", ".join(f"{1 / stored[name]['ratio']:.0%}" for name in ("W", "exp_avg"))
    assert notes == [
        "not all rows of W, exp_avg could be computed from the rows before, so these arrays take "
        f"{shares} of their uncompressed bytes; the run does not hold hyperparameters"
    ]
    for command in ("info", "summary"):
        printed = CliRunner().invoke(main, [command, str(unknown)]).stdout
        assert f"Note: {notes[0]}." in " ".join(printed.split())
    without = tmp_path / "without.zarr"
    RunWriter.create(
        without, token=[0], hidden=1, variables={"W": "float32"}, encoding="compact"
    ).close()
    printed = CliRunner().invoke(main, ["info", str(without)]).stdout
    assert "Computed from the gradient: nothing." in printed
    assert "W as differences: the run does not name its optimizer" in printed.replace("\n", " ")
    some = sample_part(path, tmp_path / "some.zarr", steps="0:22:2")
    printed = CliRunner().invoke(main, ["info", str(some)]).stdout
    assert "uncompressed bytes; its steps are not consecutive." in " ".join(printed.split())
