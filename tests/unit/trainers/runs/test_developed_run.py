"""Steps of a preset between its keyframes are those of a run that recorded everything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from click.testing import CliRunner

torch = pytest.importorskip("torch")
from altered_runs import rewrite  # noqa: E402
from damage import flip  # noqa: E402
from small_trainings import contents, same_values, small_config, stop_after  # noqa: E402
from trainings import Accumulated, same  # noqa: E402

from trajstore import open_run, verify  # noqa: E402
from trajstore.cli.main import main  # noqa: E402
from trajstore.errors import (  # noqa: E402
    InvalidArgument,
    NothingToResume,
    RunExists,
    StepNotFound,
    VariableNotRecorded,
)
from trajstore.trainers import (  # noqa: E402
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

pytestmark = pytest.mark.torch

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


def same_steps(part: Path, whole: Path) -> xr.Dataset:
    """The part, whose rows have all variables of the same steps of the whole run."""
    ds = open_run(part, chunks=None).load()
    rows = open_run(whole, chunks=None).sel(step=ds.step.values).load()
    assert {*rows.data_vars} == {*ds.data_vars} - {"params_digest", "step_digest"}
    for name in rows.data_vars:
        assert rows[name].values.tobytes() == ds[name].values.tobytes(), name
    return ds


def test_steps_and_runs_that_cannot_be_developed(
    run: Path, whole: Path, text: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part.zarr"
    with pytest.raises(InvalidArgument, match="2 steps from 1 to 3, expected consecutive steps"):
        develop_run(run, part, steps=[1, 3])
    with pytest.raises(InvalidArgument, match="2 steps from 1 to 5, expected consecutive steps"):
        develop_run(run, part, steps="1:7:4")
    with pytest.raises(StepNotFound):
        develop_run(run, part, steps=[9])
    with pytest.raises(VariableNotRecorded, match=r"no keyframes.*variables='keyframes'"):
        develop_run(whole, part, steps="1:3")
    assert not part.exists()
    part.mkdir()
    with pytest.raises(RunExists):
        develop_run(run, part, steps="1:3")
    Accumulated().train(tmp_path / "own.zarr", last=1)
    with pytest.raises(InvalidArgument, match=r"your own loop: trajstore\.trainers\.develop\("):
        develop_run(tmp_path / "own.zarr", tmp_path / "other.zarr", steps=[1])
    before = contents(run)
    with pytest.raises(InvalidArgument, match="is the run to develop"):
        develop_run(run, run, steps=[2], overwrite=True)
    assert contents(run) == before
    for setting, message in (
        ("model.tied=false", r"model\.tied = false records two"),
        ("recording.every=2", r"every: got 2.*set keyframe_every"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            record(config_of(KEYFRAMES, setting), tmp_path / "unused.zarr", corpus=text)


@pytest.mark.parametrize(
    ("variable", "where", "steps", "message"),
    [
        ("params_digest", (5, 2), "5:7", "params_digest differs, in transformer.h.0.ln_1.weight "),
        # In a step before the stored ones.
        pytest.param("logits", (5, 7), "6:7", "logits differs ", marks=pytest.mark.nightly),
    ],
)
def test_a_difference_is_an_error_or_marks_the_new_run(
    variable: str,
    where: tuple[int, ...],
    steps: str,
    message: str,
    copied: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    rewrite(copied, variable, where)
    part = tmp_path / "part.zarr"
    with pytest.raises(NothingToResume, match=f"at step 5 {message}.*allow_different"):
        develop_run(copied, part, steps=steps)
    assert not part.exists()
    done = develop_run(copied, part, steps=steps, allow_different=True)
    assert done.difference is not None
    assert done.difference.startswith(f"at step 5 {message}")
    ds = same_steps(part, whole)
    assert ds.attrs["provenance"]["developed"]["difference"] == done.difference


@pytest.mark.nightly
def test_models_of_all_keyframes_or_of_chosen_steps(run: Path, whole: Path) -> None:
    assert [step for step, _ in models(run)] == [0, 3, 6, 7]
    for step, model in models(run, [5, 4]):
        assert same(dict(model.state_dict()), dict(model_at(whole, step).state_dict()))
    with pytest.raises(StepNotFound, match="no row of step 9; the nearest: 7"):
        model_at(run, 9)


@pytest.mark.nightly
def test_a_step_between_keyframes_is_restored(run: Path, whole: Path) -> None:
    restored = []
    for path in (run, whole):
        model = model_at(path, 0)
        groups = optimizer_state_at(path, 0)["param_groups"]
        parameters = [*model.parameters()]
        optimizer = torch.optim.Adam(
            [{**group, "params": [parameters[n] for n in group["params"]]} for group in groups]
        )
        assert restore(path, model, optimizer, step=5) == 5
        restored.append([dict(model.state_dict()), optimizer.state_dict()])
    assert same(*restored)


@pytest.mark.nightly
def test_steps_between_keyframes_are_evaluated(run: Path, whole: Path, tmp_path: Path) -> None:
    def probe(model: Any, step: int) -> dict[str, Any]:
        return {"norm": model.lm_head.weight.float().norm()}

    results = [evaluate(path, probe, tmp_path / path.name, steps="4:7") for path in (run, whole)]
    one, other = (xr.open_zarr(result.path, chunks=None) for result in results)
    assert one.step.values.tolist() == [4, 5, 6]
    assert one.norm.values.tobytes() == other.norm.values.tobytes()
    keyframes = evaluate(run, probe, tmp_path / "keyframes.zarr")
    assert xr.open_zarr(keyframes.path).step.values.tolist() == [0, 3, 6, 7]


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


def test_verify_sees_a_flipped_bit_in_a_keyframe(copied: Path) -> None:
    assert verify(copied).clean
    name = "keyframes/params_exp_avg/c.1.0"
    flip(copied / name, 8 * 30 + 3)
    (problem,) = verify(copied).problems
    assert problem.path == copied / name
    with pytest.raises(Exception, match="params_exp_avg"):
        model_at(copied, 4)
    (copied / "keyframes/params/c.1.0").unlink()
    assert len(verify(copied).problems) == 2


@pytest.mark.parametrize(
    ("variable", "where"),
    [
        pytest.param("logits", (5, 7), marks=pytest.mark.nightly),
        pytest.param("step_digest", (5,), marks=pytest.mark.nightly),
        ("params_digest", (5, 2)),
    ],
)
def test_a_proof_finds_an_altered_row(variable: str, where: tuple[int, ...], copied: Path) -> None:
    rewrite(copied, variable, where)
    found = prove(copied, steps="4:7")
    (one,) = found.differences
    assert (one.step, one.variable, one.elements) == (5, variable, 1)
    assert one.ulps == (1 if variable == "logits" else None)
    assert (found.proven, found.differing) == (2, 1)


def test_the_command_develops_steps(copied: Path, text: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.zarr"
    words = ["develop", str(copied), "--select", "step=4:6", "-o", str(part)]

    def run(*options: str) -> Any:
        return CliRunner().invoke(main, [*words, *options])

    done = run("--corpus", str(text))
    assert done.exit_code == 0, done.output
    assert f"{part}: 2 steps, developed from the keyframe of step 3" in " ".join(
        done.stdout.split()
    )
    assert open_run(part).step.values.tolist() == [4, 5]
    assert "already exists" in run().stderr
    rewrite(copied, "logits", (5, 7))
    done = run("--overwrite", "--allow-different")
    assert done.exit_code == 0, done.output
    assert "the steps differ from the recorded ones: at step 5" in " ".join(done.output.split())
    other = checkout(copied, tmp_path / "step", step=3).path
    done = run("--tokenizer", str(other), "--overwrite")
    assert "give the recorded one: --tokenizer" in " ".join(done.stderr.split())
    assert "give --allow-different" in " ".join(run("--overwrite").stderr.split())
    words[2:4] = []
    assert "give --select step=FIRST:STOP" in run().stderr


def test_a_copy_without_keyframes_says_so(copied: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["export", str(copied), "--format", "run", "-o", str(tmp_path / "copy.zarr")]
    )
    assert "the copy has no keyframes" in result.output


def test_a_damaged_keyframe_is_dropped_by_a_repair(copied: Path) -> None:
    flip(copied / "keyframes" / "params" / "c.2.0", 800)
    (problem, *_) = verify(copied).problems
    assert problem.array == "keyframes/params"
    assert CliRunner().invoke(main, ["repair", str(copied)]).exit_code == 0
    assert verify(copied).clean
    assert len(open_run(copied / "keyframes").step) == 2
