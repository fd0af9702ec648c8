"""Runs that are interrupted, resumed, forked, changed, and made again, as a user types it."""

from __future__ import annotations

import itertools
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import xarray as xr
from bits_and_calls import Cli
from click.testing import CliRunner
from small_trainings import TEXT, same_values, small_config, stop_after

from trajstore.analysis.results.verdicts import reproduction
from trajstore.cli.main import main
from trajstore.cli.stop_signals import StopRequest
from trajstore.store.reading.run_info import information
from trajstore.trainers import fork, preset, record, recorded_config
from trajstore.trainers.commands.configuration import configured
from trajstore.trainers.commands.training_commands import _train_and_print

FIELDS = (
    "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=2",
    "training.device=cpu", "recording.block_rows=8", "schedule.steps=500",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "the text.txt"
    path.write_bytes(b"It was a bright cold day in April. " * 9)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run that was never interrupted."""
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    return record(preset("gatsby").with_values([*FIELDS, "training.steps=6"]), path, corpus=text)


def test_a_signal_interrupts_and_the_command_it_names_continues(
    text: Path, tmp_path: Path, run: Path, trajstore_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, last, steps = tmp_path / "a run.zarr", 3, itertools.count(1)

    def after_step(request: StopRequest) -> bool:
        if next(steps) == last:
            signal.raise_signal(signal.SIGINT)
        return request.number is not None

    small = [argument for field in FIELDS for argument in ("--set", field)]
    call = ["record", "--preset", "gatsby", "--resume", "--corpus", text, *small, "-o", path]
    call += ["--no-fsync"]
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", after_step)
        done = trajstore_cli(*call, "--set", "recording.checkpoint_every=40", rc=130)
    assert done.stderr.startswith("Corpus: the text.txt")
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values.tolist() == list(range(last + 1))
    assert f"Interrupted after step {last}; {last + 1} rows are committed." in done.stderr
    resume = done.stderr.partition("Resume with: ")[2].strip()
    assert resume == f"trajstore record --resume -o '{path}' --no-fsync"
    trajstore_cli(*shlex.split(resume)[1:], "--steps", 6)
    same_values(run, path)
    assert [file.name for file in (tmp_path / "a run.ckpt").iterdir()] == [
        "step-00000006.safetensors"
    ]


def test_the_steps_of_a_preset_are_not_those_of_a_run_that_continues(
    run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(preset("gatsby").with_values(["optimizer.lr=0.5"]).to_toml())
    for source in ({"preset_name": "gatsby"}, {"config_file": str(file)}, {}):
        options = {"preset_name": None, "config_file": None, "assignments": (), **source}
        assert configured(options, run).training.steps == 6
        assert (
            configured({**options, "assignments": ("training.steps=8",)}, run).training.steps == 8
        )
    assert configured({**options, "config_file": str(file)}, run).optimizer.lr == 0.5
    begun = configured({**options, "preset_name": "gatsby"}, tmp_path / "none.zarr")
    assert begun.training.steps == preset("gatsby").training.steps


@pytest.mark.parametrize("there", [False, True])
def test_a_signal_before_the_training_says_what_is_there(
    tmp_path: Path, there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.zarr"
    if there:
        path.mkdir()
    with pytest.raises(SystemExit) as ended:
        _train_and_print(path, lambda: signal.raise_signal(signal.SIGINT), record, {})  # type: ignore[arg-type]
    assert ended.value.code == 128 + signal.SIGINT
    left = f"{path} is unchanged" if there else "nothing was recorded"
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(f"Stopped before the training started; {left}.")


def test_a_fork_and_where_it_parts(
    run: Path, text: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    other = tmp_path / "other.zarr"
    fork = ["fork", run, "--at", 3, "--corpus", text, "--set", "optimizer.lr=3e-3", "-o", other]
    assert "comparing step 3 of 3" in trajstore_cli(*fork).stderr
    said = trajstore_cli("compare", run, other).stdout
    assert "first differing step" in said
    assert "config.optimizer.lr" in said
    assert xr.open_zarr(other).attrs["provenance"]["fork"]["settings"] == {"optimizer.lr": 0.003}
    assert "fork.step = 3" in trajstore_cli("info", other).stdout
    said = trajstore_cli("record", "--resume", "-o", other).stderr
    assert "has all 6 steps already" in " ".join(said.split())


def test_there_must_be_a_run_to_resume(trajstore_cli: Cli) -> None:
    for words, told in (([], "no run to resume"), (["-o", "no.zarr"], "to start one, name a pre")):
        said = trajstore_cli("record", "--resume", *words, rc=2).stderr
        assert told in " ".join(said.split())


def test_a_what_if_says_what_it_made(run: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    said = trajstore_cli("what-if", run, "-o", tmp_path / "same.zarr").output
    assert "7 rows, steps 0 to 6" in said
    assert "Note: no setting was changed; the result equals the recorded run, bit for bit" in said
    changed = shutil.copytree(run, tmp_path / "changed.zarr")
    root = changed / "zarr.json"
    assert '"maximize": false' in root.read_text()
    root.write_text(root.read_text().replace('"maximize": false', '"maximize": true'))
    said = trajstore_cli("what-if", changed, "-o", tmp_path / "maximized.zarr").output
    assert "W or a moment differs from the recorded run from step 1 on" in said

    other = tmp_path / "other.zarr"
    options = ("--set", "optimizer.state_dtype=float32", "--at", 4, "--tokens", "dead")
    said = trajstore_cli("what-if", run, *options, "-o", other).output
    assert "3 rows, steps 4 to 6, from the gradients of" in said
    shown = trajstore_cli("info", other).stdout
    assert "what_if.settings = ['optimizer.state_dtype=float32']" in shown
    assert "what_if.caveat = the gradients are those of the recorded run" in shown


def extend(path: Path, steps: int, *settings: str) -> None:
    longer = recorded_config(path).with_values([f"training.steps={steps}", *settings])
    record(longer, path, resume=True)


@pytest.mark.nightly
@pytest.mark.parametrize("forked", [False, True])
def test_the_commands_of_a_report_make_the_run_again(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was extended twice, or a fork of a run that was stopped and extended."""
    path, text = tmp_path / "run.zarr", tmp_path / "the text.txt"
    text.write_bytes(TEXT)
    config = small_config(["gatsby", "recording.every=2"], steps=6)
    if forked:
        source = tmp_path / "source.zarr"
        record(config, source, corpus=text, stop=stop_after(3))
        extend(source, 8)
        settings = ["optimizer.lr=3e-3", "optimizer.betas=[0.8,0.99]", "model.dtype=float32"]
        fork(source, path, at=6, settings=settings)
        extend(path, 11)
    else:
        record(config.with_values(["training.threads=2"]), path, corpus=text)
        extend(path, 9)
        extend(path, 12, "training.threads=3")
    found = reproduction(path.name, information(path))
    (tmp_path / "run.toml").write_text(found["settings"])
    commands = [shlex.split(line)[1:] for line in found["commands"].splitlines()]
    verbs = ["fork"] * 3 if forked else ["--resume"] * 2
    assert [words[words[0] == "record"] for words in commands[:-1]] == ["--config", *verbs]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    same_values(path, tmp_path / commands[-1][-1])
