"""`info` of several runs; what it tells of one, the tests of `record` and `fork` show."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from watched_runs import begin, extend

from trajstore.cli.main import main


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
        1, f"trajstore: there is no run at {tmp_path / '3.zarr'}\n",
    )  # fmt: skip
    assert "1.zarr" in done.stdout
