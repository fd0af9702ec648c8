"""Runs that are interrupted, resumed, forked, changed, and made again, as a user types it."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from bits_and_calls import Cli
from click.testing import CliRunner

pytest.importorskip("torch")
from small_trainings import TEXT, same_values, small_config, stop_after

from trajstore.analysis.results.verdicts import reproduction
from trajstore.cli.main import main
from trajstore.cli.stop_signals import StopRequest
from trajstore.store.reading.run_info import information
from trajstore.trainers import fork, preset, record, recorded_config

pytestmark = pytest.mark.torch

FIELDS = (
    "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=2",
    "training.device=cpu", "recording.block_rows=8", "schedule.steps=500",
)  # fmt: skip
SMALL = [argument for field in FIELDS for argument in ("--set", field)]


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAJSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "the text.txt"
    path.write_bytes(b"It was a bright cold day in April. " * 9)
    return path


@pytest.fixture
def straight(tmp_path: Path, text: Path) -> Callable[[str, int], Path]:
    """Run of a preset, over so many steps, that was never interrupted."""

    def run(name: str, steps: int) -> Path:
        path = tmp_path / "straight.zarr"
        config = preset(name).with_values([*FIELDS, f"training.steps={steps}"])
        record(config, path, corpus=text)
        return path

    return run


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGINT, "gatsby"),
        pytest.param(signal.SIGTERM, "gatsby-adam", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_interrupts_and_the_command_it_names_continues(
    number: signal.Signals,
    name: str,
    text: Path,
    tmp_path: Path,
    straight: Callable[[str, int], Path],
    trajstore_cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, last, steps = tmp_path / "a run.zarr", 5, itertools.count(1)

    def after_step(request: StopRequest) -> bool:
        if next(steps) == last:
            signal.raise_signal(number)
        return request.number is not None

    call = ["record", "--preset", name, "--steps", 1_000_000, "--corpus", text, *SMALL, "-o", path]
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", after_step)
        done = trajstore_cli(*call, "--set", "recording.checkpoint_every=40", rc=128 + number)
    assert done.stderr.startswith("Corpus: the text.txt")
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "interrupted"
    assert ds.step.values.tolist() == list(range(last + 1))
    assert f"Interrupted after step {last}; {last + 1} rows are committed." in done.stderr
    resume = done.stderr.partition("Resume with: ")[2].strip()
    assert resume == f"trajstore record --resume -o '{path}'"
    trajstore_cli(*shlex.split(resume)[1:], "--steps", last + 4)
    same_values(straight(name, last + 4), path)
    assert [file.name for file in (tmp_path / "a run.ckpt").iterdir()] == [
        f"step-{last + 4:08d}.safetensors"
    ]


def test_the_steps_of_a_preset_are_not_those_of_a_run_that_continues(
    text: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    path = tmp_path / "run.zarr"
    config = preset("gatsby").with_values([*FIELDS, "training.steps=6"])
    (tmp_path / "run.toml").write_text(preset("gatsby").with_values(FIELDS).to_toml())
    steps = iter(range(4))
    record(config, path, corpus=text, stop=lambda: next(steps) == 3)
    again = ["--corpus", text, "-o", path, "--resume"]
    trajstore_cli("record", "--preset", "gatsby", *again, *SMALL)
    ds = xr.open_zarr(path)
    assert ds.step.values[-1] == 6
    assert ds.attrs["config"]["training"]["steps"] == 6
    done = trajstore_cli("record", "--config", tmp_path / "run.toml", *again)
    assert "has all 6 steps already" in " ".join(done.stderr.split())
    trajstore_cli("record", "--preset", "gatsby", *again, *SMALL, "--set", "training.steps=8")
    assert xr.open_zarr(path).step.values[-1] == 8


@pytest.mark.parametrize("resume", [False, True])
def test_a_signal_before_the_training_says_what_is_there(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    path = tmp_path / "run.zarr"
    if resume:
        config = preset("gatsby").with_values([*FIELDS, "training.steps=5"])
        record(config, path, corpus=text)

    def interrupt(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("trajstore.trainers.runs.record.load_corpus", interrupt)
    call = ["--resume", "--steps", "9"] if resume else ["--preset", "gatsby"]
    done = CliRunner().invoke(main, ["record", *call, "-o", str(path)])
    assert done.exit_code == 128 + signal.SIGINT
    left = f"{path} is unchanged" if resume else "nothing was recorded"
    said = " ".join(done.stderr.split())
    assert said.endswith(f"Stopped before the training started; {left}.")


@pytest.fixture(scope="module")
def queued(text: Path) -> list[str]:
    """A command line that begins a run, and goes on with it."""
    return ["record", "--preset", "gatsby", "--corpus", str(text), *SMALL, "--resume"]


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_one_command_line_begins_proves_and_is_done(queued: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    line = [*queued, "--set", "schedule.steps=20", "-o", path, "--steps"]
    assert call(*line, 3).exit_code == 0
    shutil.rmtree(tmp_path / "run.ckpt")
    done = call(*line, 5)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "its 3 steps are trained again" in said
    assert "comparing step 1 of 3 with the recorded rows comparing step 3 of 3" in said
    assert "Recorded 6 rows" in done.stdout
    done = call(*line, 5)
    assert done.exit_code == 0
    assert "has all 5 steps already" in " ".join(done.stderr.split())


def test_a_fork_and_where_it_parts(queued: list[str], tmp_path: Path) -> None:
    path, other = tmp_path / "run.zarr", tmp_path / "other.zarr"
    assert call(*queued, "--steps", 5, "-o", path).exit_code == 0
    fork = ["fork", path, "--at", 3, "--corpus", queued[4], "-o", other]
    done = call(*fork, "--set", "optimizer.lr=3e-3")
    assert done.exit_code == 0, done.stderr
    assert "comparing step 3 of 3" in done.stderr
    assert "first differing step" in (said := call("compare", path, other).stdout)
    assert "config.optimizer.lr" in said
    assert xr.open_zarr(other).attrs["provenance"]["fork"]["settings"] == {"optimizer.lr": 0.003}
    assert "fork.step = 3" in call("info", other).stdout
    for arguments, rc, sentence in (
        (fork, 2, "other.zarr already exists"),
        (["record", "--resume"], 2, "no run to resume; name it"),
        (["record", "--resume", "-o", tmp_path / "no.zarr"], 2, "to start one, name a preset"),
    ):  # fmt: skip
        done = call(*arguments)
        assert done.exit_code == rc, done.stderr
        assert sentence in " ".join(done.stderr.split())
        assert done.stderr.startswith("trajstore: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.ckpt", "other.zarr", "run.ckpt", "run.zarr",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    return record(preset("gatsby").with_values([*FIELDS, "training.steps=6"]), path, corpus=text)


def test_without_settings_the_result_equals_the_run(
    run: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    said = trajstore_cli("what-if", run, "-o", tmp_path / "same.zarr").output
    assert "7 rows, steps 0 to 6" in said
    assert "Note: no setting was changed; the result equals the recorded run, bit for bit" in said
    compared = json.loads(trajstore_cli("compare", "--json", run, tmp_path / "same.zarr").stdout)
    assert compared["only_first"] == compared["only_second"] == []
    assert {v["differing_steps"] for v in compared["variables"].values()} == {0}
    assert (
        trajstore_cli("verify", "--replay", tmp_path / "same.zarr").output.count(
            "Replayed 6 of 6 steps"
        )
        == 1
    )


def test_a_run_that_was_changed_is_not_said_to_be_the_same_again(
    run: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    changed = tmp_path / "changed.zarr"
    shutil.copytree(run, changed)
    root = changed / "zarr.json"
    assert '"maximize": false' in root.read_text()
    root.write_text(root.read_text().replace('"maximize": false', '"maximize": true'))
    said = trajstore_cli("what-if", changed, "-o", tmp_path / "other.zarr").output
    assert "W or a moment differs from the recorded run from step 1 on" in said


def test_output_info_and_summary_name_the_run_as_what_if(
    run: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    other = tmp_path / "other.zarr"
    options = ("--set", "optimizer.state_dtype=float32", "--at", 4, "--tokens", "dead")
    said = trajstore_cli("what-if", run, *options, "-o", other).output
    assert "3 rows, steps 4 to 6, from the gradients of" in said
    shown = trajstore_cli("info", other).stdout
    assert "provenance" in shown
    assert "what_if.settings = ['optimizer.state_dtype=float32']" in shown
    assert "what_if.caveat = the gradients are those of the recorded run" in shown
    assert "displacement" in trajstore_cli("summary", other).stdout.lower()


def begin(path: Path, text: Path, *settings: str, **options: Any) -> None:
    config = small_config(["gatsby", "recording.every=2", *settings], steps=6)
    record(config, path, corpus=text, **options)


def extend(path: Path, steps: int, *settings: str) -> None:
    longer = recorded_config(path).with_values([f"training.steps={steps}", *settings])
    record(longer, path, resume=True)


def extended(path: Path, text: Path) -> Path:
    begin(path, text, "training.threads=2")
    extend(path, 9)
    extend(path, 12, "training.threads=3")
    return path


def stopped_and_extended(path: Path, text: Path) -> Path:
    begin(path, text, stop=stop_after(3))
    extend(path, 8)
    return path


def forked(path: Path, text: Path) -> Path:
    source = stopped_and_extended(path.with_name("source.zarr"), text)
    settings = ["optimizer.lr=3e-3", "optimizer.betas=[0.8,0.99]", "model.dtype=float32"]
    fork(source, path, at=6, settings=settings)
    extend(path, 11)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "verbs"),
    [
        (extended, ["--config", "--resume", "--resume"]),
        (forked, ["--config", "fork", "fork", "fork"]),  # from a run that was stopped and extended
    ],
)
def test_the_commands_of_a_report_make_the_run_again(
    make: Callable[[Path, Path], Path],
    verbs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "the text.txt"
    text.write_bytes(TEXT)
    run = make(tmp_path / "run.zarr", text)
    found = reproduction(run.name, information(run))
    (tmp_path / "run.toml").write_text(found["settings"])
    commands = [shlex.split(line)[1:] for line in found["commands"].splitlines()]
    assert [words[words[0] == "record"] for words in commands[:-1]] == verbs
    for command in commands:
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    one, other = (xr.open_zarr(path, chunks=None).load() for path in (run, commands[-1][-1]))
    assert one.step.equals(other.step)
    for name in one.data_vars:
        assert one[name].values.tobytes() == other[name].values.tobytes(), name
