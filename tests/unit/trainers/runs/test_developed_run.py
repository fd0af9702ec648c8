"""Steps of a preset are developed from its keyframes, and proven from its rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from altered_runs import rewrite
from bits_and_calls import Cli
from damage import contents, flip
from small_trainings import same_values, small_config, stop_after
from trainings import Accumulated, same

from trajstore import RunWriter, open_run, verify
from trajstore.cli.run_commands import print_proof
from trajstore.errors import (
    InvalidArgument,
    NothingToResume,
    StepNotFound,
    VariableNotRecorded,
)
from trajstore.trainers import (
    checkout,
    develop_run,
    evaluate,
    fork,
    model_at,
    models,
    optimizer_state_at,
    prove,
    record,
    restore,
)

STEPS = 7
KEYFRAMES = ["recording.variables=keyframes", "recording.keyframe_every=3"]  # 0, 3, 6, 7
EVERYTHING = ["recording.variables=everything"]
PLAIN = ["gatsby-adam", "training.accumulation=2"]


def config_of(recording: list[str], *settings: str) -> Any:
    return small_config(PLAIN, *recording, *settings, steps=STEPS)


@pytest.fixture(scope="module")
def run(straight: Any) -> Path:
    """A run with keyframes."""
    return Path(straight(config_of(KEYFRAMES)))


@pytest.fixture(scope="module")
def whole(straight: Any) -> Path:
    """The run that recorded everything."""
    return Path(straight(config_of(EVERYTHING)))


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied.zarr"))


def test_steps_and_runs_that_cannot_be_developed(
    run: Path, whole: Path, text: Path, tmp_path: Path
) -> None:
    part, own = tmp_path / "part.zarr", tmp_path / "own.zarr"
    Accumulated().train(own, last=1)
    before = contents(run)
    for source, steps, kind, message in (
        (run, [1, 3], InvalidArgument, "2 steps from 1 to 3, expected consecutive steps"),
        (whole, "1:3", VariableNotRecorded, r"no keyframes.*variables='keyframes'"),
        (run, [9], StepNotFound, "step 9 was not recorded"),
        (own, [1], InvalidArgument, r"with your own loop: trajstore\.trainers\.develop\("),
    ):
        with pytest.raises(kind, match=message):
            develop_run(source, part, steps=steps)
    assert not part.exists()
    with pytest.raises(InvalidArgument, match="is the run to develop"):
        develop_run(run, run, steps=[2], overwrite=True)
    assert contents(run) == before
    for setting, message in (
        ("model.tied=false", r"model\.tied = false records two"),
        ("recording.every=2", r"every: got 2.*set keyframe_every"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            record(config_of(KEYFRAMES, setting), tmp_path / "unused.zarr", corpus=text)


def test_a_difference_is_an_error_or_marks_the_new_run(
    copied: Path, whole: Path, tmp_path: Path
) -> None:
    """Also in a step before the stored ones."""
    rewrite(copied, "params_digest", (5, 2))
    part = tmp_path / "part.zarr"
    message = "at step 5 params_digest differs, in transformer.h.0.ln_1.weight "
    with pytest.raises(NothingToResume, match=f"{message}.*allow_different"):
        develop_run(copied, part, steps="6:7")
    assert not part.exists()
    done = develop_run(copied, part, steps="6:7", allow_different=True)
    assert done.difference is not None
    assert done.difference.startswith(message)
    ds = open_run(part, chunks=None).load()
    rows = open_run(whole, chunks=None).sel(step=ds.step.values).load()
    assert {*rows.data_vars} == {*ds.data_vars} - {"params_digest", "step_digest"}
    for name in rows.data_vars:
        assert rows[name].values.tobytes() == ds[name].values.tobytes(), name
    assert ds.attrs["provenance"]["developed"]["difference"] == done.difference


@pytest.mark.nightly
def test_models_evaluations_and_optimizers_of_keyframes_and_between(
    run: Path, whole: Path, tmp_path: Path
) -> None:
    def probe(model: Any, step: int) -> dict[str, Any]:
        return {"norm": model.lm_head.weight.float().norm()}

    assert [step for step, _ in models(run)] == [0, 3, 6, 7]
    for step, model in models(run, [5, 4]):
        assert same(dict(model.state_dict()), dict(model_at(whole, step).state_dict()))
    keyframes = evaluate(run, probe, tmp_path / "keyframes.zarr")
    assert xr.open_zarr(keyframes.path).step.values.tolist() == [0, 3, 6, 7]
    results, restored = [], []
    for path in (run, whole):
        results.append(evaluate(path, probe, tmp_path / path.name, steps="4:7").path)
        model = model_at(path, 0)
        groups = optimizer_state_at(path, 0)["param_groups"]
        parameters = [*model.parameters()]
        optimizer = torch.optim.Adam(
            [{**group, "params": [parameters[n] for n in group["params"]]} for group in groups]
        )
        assert restore(path, model, optimizer, step=5) == 5
        restored.append([dict(model.state_dict()), optimizer.state_dict()])
    assert same(*restored)
    one, other = (xr.open_zarr(path, chunks=None) for path in results)
    assert one.step.values.tolist() == [4, 5, 6]
    assert one.norm.values.tobytes() == other.norm.values.tobytes()


@pytest.mark.nightly
def test_steps_of_a_fork_are_developed(run: Path, whole: Path, text: Path, tmp_path: Path) -> None:
    settings = ["optimizer.lr=3e-3"]
    path = fork(run, tmp_path / "fork.zarr", at=4, settings=settings, corpus=text)
    other = fork(whole, tmp_path / "other.zarr", at=4, settings=settings, corpus=text)
    for step in (2, 5):  # before and after the fork
        assert same(*(dict(model_at(each, step).state_dict()) for each in (path, other)))


@pytest.mark.nightly
def test_a_stopped_run_continues_from_its_last_keyframe(
    text: Path, straight: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    config = config_of(KEYFRAMES)
    record(config, path, corpus=text, stop=stop_after(4))
    assert open_run(path / "keyframes").step.values.tolist() == [0, 3, 4]
    record(config, path, corpus=text, resume=True)
    same_values(straight(config), path)
    assert verify(path).clean


def test_a_damaged_keyframe_is_seen_named_and_dropped_by_a_repair(
    copied: Path, trajstore_cli: Cli
) -> None:
    assert verify(copied).clean
    name = "keyframes/params_exp_avg/c.1.0"
    flip(copied / name, 8 * 30 + 3)
    (problem,) = verify(copied).problems
    assert (problem.path, problem.array) == (copied / name, "keyframes/params_exp_avg")
    with pytest.raises(Exception, match="params_exp_avg"):
        model_at(copied, 4)
    (copied / "keyframes/params/c.1.0").unlink()
    assert len(verify(copied).problems) == 2
    trajstore_cli("repair", copied)
    assert verify(copied).clean
    assert open_run(copied / "keyframes").step.values.tolist() == [0]


def test_a_proof_finds_an_altered_row(copied: Path) -> None:
    altered: dict[str, tuple[int, ...]] = {
        "logits": (5, 7), "step_digest": (5,), "params_digest": (5, 2),
    }  # fmt: skip
    for variable, where in altered.items():
        rewrite(copied, variable, where)
    found = prove(copied, steps="4:7")
    assert {(one.step, one.variable, one.elements, one.ulps) for one in found.differences} == {
        (5, name, 1, 1 if name == "logits" else None) for name in altered
    }
    assert (found.proven, found.differing) == (2, 1)


def test_the_command_develops_steps(
    copied: Path, text: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    part = tmp_path / "part.zarr"

    def develop(*options: Any, rc: int = 0) -> str:
        said = trajstore_cli("develop", copied, "-o", part, *options, rc=rc).output
        return " ".join(said.split())

    steps = ("--select", "step=4:6")
    said = develop(*steps, "--corpus", text)
    assert f"{part}: 2 steps, developed from the keyframe of step 3" in said
    assert open_run(part).step.values.tolist() == [4, 5]
    assert "already exists" in develop(*steps, rc=2)
    rewrite(copied, "logits", (5, 7))
    said = develop(*steps, "--overwrite", "--allow-different")
    assert "the steps differ from the recorded ones: at step 5" in said
    other = checkout(copied, tmp_path / "step", step=3).path
    said = develop(*steps, "--overwrite", "--tokenizer", other, rc=1)
    assert "give the recorded one: --tokenizer" in said
    assert "give --select step=FIRST:STOP" in develop("--overwrite", rc=2)


def test_a_copy_without_keyframes_says_so(run: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    said = trajstore_cli("export", run, "--format", "run", "-o", tmp_path / "copy.zarr").output
    assert "the copy has no keyframes" in said


# Proven steps ------------------------------------------------------------------------------------


def test_steps_with_gaps_follow_from_the_data(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[int, int]] = []
    found = prove(whole, steps="2:5:2", on_progress=lambda *pair: seen.append(pair))
    assert (found.clean, found.steps, found.proven, found.unproven) == (True, 2, 2, ())
    assert {"loss", "logits", "grad", "params_grad", "W", "params", "batch"} <= {*found.variables}
    assert seen[-1] == (2, 2)
    assert not caplog.records  # notes are of the recording


@pytest.mark.nightly
def test_steps_of_a_run_with_gaps_follow_from_the_data(text: Path, tmp_path: Path) -> None:
    config = small_config(["gatsby-adam"], *EVERYTHING, "recording.every=4", steps=9)
    found = prove(record(config, tmp_path / "run.zarr", corpus=text))
    assert (found.steps, found.proven, found.unproven) == (3, 3, ())  # 4, 8 and 9


def test_an_altered_gradient_is_found_with_its_parameter(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "run.zarr"))
    name = "transformer.h.0.mlp.c_fc.weight"
    (at,) = (each["offset"] for each in open_run(path).attrs["parameters"] if each["name"] == name)
    rewrite(path, "params_grad", (3, at + 17))
    assert verify(path).clean
    found = prove(path)
    (one,) = found.differences
    assert (one.step, one.variable, one.parameter) == (3, "params_grad", name)
    assert (one.elements, one.ulps) == (1, 1)
    assert (found.clean, found.proven, found.differing) == (False, STEPS - 1, 1)
    print_proof(found.facts())
    said = capsys.readouterr().out
    assert f"Trained {STEPS} of {STEPS} steps again: {STEPS - 1} agree in every bit, 1 diff" in said
    assert name in said


def test_what_cannot_be_proven_is_listed(whole: Path, tmp_path: Path) -> None:
    other = fork(whole, tmp_path / "fork.zarr", at=3, settings=["model.dtype=float32"])
    found = prove(other)
    assert (found.clean, found.proven) == (True, STEPS - 3)
    (reason,) = found.unproven
    assert (reason.steps, reason.first, reason.last) == (3, 1, 3)
    assert "before the run was forked" in reason.reason


def test_options_of_the_proof_need_it(trajstore_cli: Cli) -> None:
    for options, message in (
        (["--gradients"], "--gradients needs --replay"),
        (["--replay", "--select", "step=0:4"], "--select needs --gradients"),
    ):
        assert message in trajstore_cli("verify", "run.zarr", *options, rc=2).stderr


def test_runs_without_the_state_are_refused(text: Path, tmp_path: Path) -> None:
    path = record(small_config(["gatsby"], steps=1), tmp_path / "all.zarr", corpus=text)
    with pytest.raises(VariableNotRecorded, match="variables='everything'"):
        prove(path)
    own = tmp_path / "own.zarr"
    with RunWriter.create(own, token=[0], hidden=1, variables={"W": "float32"}):
        pass
    with pytest.raises(InvalidArgument, match="was not recorded by `trajstore record`"):
        prove(own)
