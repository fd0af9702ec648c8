"""Each recorded step is trained again from the row before it; an altered value is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xarray as xr
from click.testing import CliRunner

torch = pytest.importorskip("torch")
from altered_runs import rewrite  # noqa: E402
from small_trainings import small_config  # noqa: E402

from trajstore import RunWriter, verify  # noqa: E402
from trajstore.cli.main import main  # noqa: E402
from trajstore.cli.run_commands import print_proof  # noqa: E402
from trajstore.errors import InvalidArgument, VariableNotRecorded  # noqa: E402
from trajstore.trainers import fork, prove, record  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 5
EVERYTHING = "recording.variables=['everything']"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    config = small_config(["gatsby"], EVERYTHING, "training.accumulation=2", steps=STEPS)
    return Path(record(config, tmp_path_factory.mktemp("proven") / "run.zarr", corpus=text))


def offsets(path: Path) -> dict[str, int]:
    table = xr.open_zarr(path).attrs["parameters"]
    return {entry["name"]: entry.get("offset", 0) for entry in table}


def test_steps_follow_from_the_data(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, int]] = []
    found = prove(run, steps="2:5:2", on_progress=lambda *pair: seen.append(pair))
    assert found.clean
    assert (found.steps, found.proven, found.unproven) == (2, 2, ())
    assert {"loss", "logits", "grad", "params_grad", "W", "params", "batch"} <= {*found.variables}
    assert seen[-1] == (2, 2)
    assert not caplog.records  # notes are of the recording


@pytest.mark.nightly
def test_steps_of_the_plain_loop_with_gaps_follow_from_the_data(text: Path, tmp_path: Path) -> None:
    config = small_config(["gatsby-adam"], EVERYTHING, "recording.every=4", steps=9)
    found = prove(record(config, tmp_path / "run.zarr", corpus=text))
    assert (found.steps, found.proven, found.unproven) == (3, 3, ())  # 4, 8 and 9


def test_an_altered_gradient_is_found_with_its_parameter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(run, tmp_path / "run.zarr"))
    name = "transformer.h.0.mlp.c_fc.weight"
    rewrite(path, "params_grad", (3, offsets(path)[name] + 17))
    assert verify(path).clean
    found = prove(path)
    (one,) = found.differences
    assert (one.step, one.variable, one.parameter) == (3, "params_grad", name)
    assert (one.elements, one.ulps) == (1, 1)
    assert (found.clean, found.proven, found.differing) == (False, STEPS - 1, 1)
    print_proof(found.facts())
    text = capsys.readouterr().out
    assert (
        f"Trained {STEPS} of {STEPS} steps again: {STEPS - 1} agree in every bit, 1 differ" in text
    )
    assert name in text


def test_what_cannot_be_proven_is_listed(run: Path, tmp_path: Path) -> None:
    other = fork(run, tmp_path / "fork.zarr", at=3, settings=["model.dtype=float32"])
    found = prove(other)
    assert found.clean
    assert found.proven == STEPS - 3
    (reason,) = found.unproven
    assert (reason.steps, reason.first, reason.last) == (3, 1, 3)
    assert "before the run was forked" in reason.reason


def test_options_of_the_proof_need_it() -> None:
    for options, message in (
        (["--gradients"], "--gradients needs --replay"),
        (["--replay", "--select", "step=0:4"], "--select needs --gradients"),
    ):
        result = CliRunner().invoke(main, ["verify", "run.zarr", *options])
        assert result.exit_code == 2
        assert message in result.stderr


def test_runs_without_the_state_are_refused(run: Path, text: Path, tmp_path: Path) -> None:
    path = record(small_config(["gatsby"], steps=1), tmp_path / "all.zarr", corpus=text)
    with pytest.raises(VariableNotRecorded, match="variables='everything'"):
        prove(path)
    own = tmp_path / "own.zarr"
    with RunWriter.create(own, token=[0], hidden=1, variables={"W": "float32"}):
        pass
    with pytest.raises(InvalidArgument, match="was not recorded by `trajstore record`"):
        prove(own)
