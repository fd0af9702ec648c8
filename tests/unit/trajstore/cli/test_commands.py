"""Options that commands share, `export` and `import`, and what `info` prints."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from bits_and_calls import Cli
from click.testing import CliRunner
from compact_runs import sample_part, scheduled_run
from exchange_runs import stored, truth, write, write_run
from growing_runs import begin, extend
from safetensors.numpy import load_file

from trajstore import open_run
from trajstore.cli.command_options import SELECT, file_stem, runs_and_names
from trajstore.cli.main import main
from trajstore.cli.run_commands import print_information
from trajstore.errors import InvalidArgument
from trajstore.exchange.layouts import NAMES
from trajstore.store.reading.run_info import information


def test_a_quantity_before_the_run_is_called_so() -> None:
    with pytest.raises(InvalidArgument, match=r"got freeze before the run; .*: a\.zarr freeze sky"):
        runs_and_names(["freeze", "a.zarr", "sky"], {"freeze", "sky"})


@pytest.mark.parametrize(
    ("given", "runs", "stem"),
    [
        (["one.zarr"], ["one.zarr"], "one"),
        (["dir/pair.zarr"], ["dir/pair.E.zarr", "dir/pair.W.zarr"], "pair"),
        (["sweep/"], ["sweep/a.zarr", "sweep/b.zarr"], "runs"),
        (["*.zarr"], ["a.zarr", "b.zarr"], "runs"),
        (["*.zarr"], ["a.zarr"], "a"),
        (["a.zarr", "b.zarr"], ["a.zarr", "b.zarr"], "runs"),
    ],
)
def test_the_name_of_an_output_file(
    given: list[str], runs: list[str], stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    assert file_stem(given, runs) == stem


@SELECT("step", "token")
@click.command()
def part(selected: dict[str, str]) -> None:
    click.echo(f"{selected}")


def test_a_selection_becomes_keywords() -> None:
    done = CliRunner().invoke(part, ["--select", "step=0:9:3,5", "--select", " token = dead"])
    assert done.stdout == "{'steps': '0:9:3,5', 'tokens': 'dead'}\n"
    assert CliRunner().invoke(part, []).stdout == "{}\n"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("tokens=dead", "names no dimension of this command (did you mean 'token'?); expected "
         "DIM=VALUES with step or token, such as step=0:500"),
        ("0:9", "got --select '0:9', which names no dimension"),
        ("step=", "got --select 'step=' without values"),
        ("step=1 step=2", "got --select step twice"),
    ],
)  # fmt: skip
def test_a_selection_that_is_refused(given: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        part([word for one in given.split() for word in ("--select", one)], standalone_mode=False)
    assert sentence in str(error.value)


TRAINERS = "trajstore.trainers"
OPTIONS: list[Any] = [
    (
        "export {run} -o o.zarr --block-rows 64 --encoding compact --memory 2MiB --overwrite",
        "trajstore.exchange.export.export",
        {"block_rows": 64, "encoding": "compact", "memory": "2MiB", "overwrite": True},
    ),
    (
        "export {run} -o o.H5 --select step=0:9:3 --select token=dead --variables W,loss",
        "trajstore.exchange.export.export",
        {"format": "hdf5", "steps": "0:9:3", "tokens": "dead", "variables": "W,loss"},
    ),
    (
        "report {run} --select step=0:3 --within --min-unchanged 2 --overwrite --verify",
        "trajstore.analysis.results.report_page.write_report",
        {"steps": "0:3", "within": True, "min_unchanged": 2, "overwrite": True, "check": True},
    ),
    (
        "analyze {run} {other} freeze --common-steps",
        "trajstore.store.reading.open_run.open_runs",
        {"join": "inner"},
    ),
    (
        "plot {run} heatmap --color hop",
        "trajstore.analysis.figures.figure.Options",
        {"color": "hop"},
    ),
    (
        "evaluate {run} f.py:g -o o --select step=0:9 --constructor m.py:make",
        f"{TRAINERS}.evaluate",
        {"steps": "0:9", "constructor": "m.py:make"},
    ),
    (
        "fork {run} --at 3 -o o.zarr --no-fsync --overwrite --threads 2",
        f"{TRAINERS}.fork",
        {"at": 3, "fsync": False, "overwrite": True, "settings": ["training.threads=2"]},
    ),
    ("fork {run} --at 3 -o o.zarr --fsync", f"{TRAINERS}.fork", {"fsync": True}),
    (
        "record --preset gatsby --dry-run --corpus a.txt --tokenizer b/",
        f"{TRAINERS}.plan",
        {"corpus": "a.txt", "tokenizer": "b/"},
    ),
    ("what-if {run} -o o.zarr --overwrite", f"{TRAINERS}.what_if", {"overwrite": True}),
    ("fetch gatsby --source b --sha256 a1", f"{TRAINERS}.fetch", {"source": "b", "sha256": "a1"}),
]


class Called(Exception):
    """The function was called, with these arguments."""


def _arguments(line: str, function: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments with which a command calls a function."""

    def call(*arguments: Any, **given: Any) -> None:
        raise Called(arguments, given)

    replaced: dict[str, Any] = {function: call}
    if line.startswith("fork"):  # no preset made the run
        forked = SimpleNamespace(training=SimpleNamespace(steps=9))
        replaced[f"{TRAINERS}.commands.training_commands._forked"] = lambda *given: forked
    for name, replacement in replaced.items():
        monkeypatch.setattr(name, replacement, raising=False)
    done = CliRunner().invoke(main, line.split())
    assert isinstance(done.exception, Called), done.output + repr(done.exception)
    return done.exception.args


@pytest.mark.parametrize(
    ("line", "function", "options"),
    [pytest.param(*one, marks=[pytest.mark.torch] * (TRAINERS in one[1])) for one in OPTIONS],
)
def test_an_option_reaches_the_function(
    line: str, function: str, options: dict[str, Any], sample: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.zarr").symlink_to(sample)
    line = line.format(run=sample, other="other.zarr")
    _, given = _arguments(line, function, monkeypatch)
    assert options.items() <= given.items()


@pytest.mark.torch
def test_options_of_the_configuration_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "record --preset gatsby --encoding compact --every 2 --seed 3"
    (config, *_), _ = _arguments(line, f"{TRAINERS}.record", monkeypatch)
    assert (config.recording.encoding, config.recording.every) == ("compact", 2)
    assert config.training.seed == 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    known = truth()
    arrays = {"x": stored(known.values["W"], "uint16"), "nll": stored(known.values["loss"], "f4"),
              "centroid": np.zeros((6, 3)), "dead_ids": np.flatnonzero(known.dead)}  # fmt: skip
    return write(tmp_path / "mine.npz", "npz", arrays)


def test_without_a_file_it_lists_what_it_understands(trajstore_cli: Cli) -> None:
    printed = trajstore_cli("import").stdout
    for word in ("safetensors", "embedding_matrix", "untrained_mask", "adam_beta1", *NAMES):
        assert word in printed
    facts = json.loads(trajstore_cli("import", "--json").stdout)
    assert "w" in facts["kinds"]["W"]["names"]
    assert facts["scalars"]["seed"]["goes_to"] == "config.training.seed"


def test_a_dry_run_prints_the_table_and_writes_nothing(file: Path, trajstore_cli: Cli) -> None:
    call = partial(trajstore_cli, "import", file)
    options = "--map W=x --labels steps=0:60:10 --bits W=bfloat16".split()
    printed = call("--dry-run", *options, "--map", "loss=nll").stdout
    lines = {line.split()[0]: line for line in reversed(printed.splitlines()) if line.split()}
    assert re.search("uint16.*bits of bfloat16", lines["x"])
    assert re.search("omitted.*unknown name", lines["centroid"])
    assert "steps 0 to 50, 7 tokens, 2 of them dead" in lines["Run:"]
    assert [path.name for path in file.parent.iterdir()] == ["mine.npz"]
    facts = json.loads(call("--dry-run", "--json", *options).stdout)
    assert {line["name"]: line["kind"] for line in facts["table"]}["x"] == "W"
    assert (facts["path"], facts["tokens"], facts["others"]) == (None, 7, [])
    printed = call("-o", file.with_name("run.zarr"), *options, "--map", "ignore=nll").stdout
    assert f"Imported {file.with_name('run.zarr')}: 6 rows" in printed


def test_the_printed_layout_is_edited_and_passed(file: Path, trajstore_cli: Cli) -> None:
    """It says what the options said, so the edited text replaces them."""
    options = "--map W=x --labels steps=0:60:10 --bits W=float16".split()
    printed = trajstore_cli("import", file, "--dry-run", *options).stdout
    layout = file.with_name("mine.toml")
    layout.write_text(printed.partition("FILE.toml:\n")[2] + 'nll = "loss"\n')
    run = file.with_name("run.zarr")
    trajstore_cli("import", file, "--layout", layout, "-o", run)
    ds = open_run(run)
    assert ds.step.values.tolist() == [0, 10, 20, 30, 40, 50]
    assert (ds.W.attrs["native_dtype"], "loss" in ds) == ("float16", True)
    assert np.flatnonzero(ds.is_dead.values).tolist() == np.load(file)["dead_ids"].tolist()


def test_runs_of_a_folder_go_into_one_file(tmp_path: Path, trajstore_cli: Cli) -> None:
    folder, types = tmp_path / "runs", {"W": "bfloat16"}
    for number in (10, 2):
        write_run(folder / f"{number}.zarr", types, rows=2, tokens=3, hidden=number)
    call = partial(trajstore_cli, "export", folder, "-o", tmp_path / "f.csv")
    assert "unknown extension .csv of" in call(rc=2).stderr
    done = call("--layout", "flannel-3")
    assert re.search(r"^Wrote .*f\.csv: .*B, layout flannel-3, 2 rows, 3 tokens\.", done.stdout)
    held = load_file(tmp_path / "f.csv")
    assert [held[f"run_{at}_embeddings"].shape[-1] for at in (0, 1)] == [2, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no output given"),
        ("--dry-run --map W", "expected KIND=NAME"),
        ("--dry-run --bits bfloat16 --bits float16", "and float16 for one variable"),
        ("--dry-run --first-row 2", "got --first-row 2, expected 0 or 1"),
    ],
)
def test_wrong_calls_are_one_sentence(
    file: Path, arguments: str, message: str, trajstore_cli: Cli
) -> None:
    (line,) = trajstore_cli("import", file, *arguments.split(), rc=2).stderr.strip().splitlines()
    assert message in line


def test_the_runs_of_a_folder_are_a_table(tmp_path: Path, trajstore_cli: Cli) -> None:
    info = partial(trajstore_cli, "info")
    for seed in (1, 2):
        with begin(tmp_path / f"{seed}.zarr", config={"training": {"seed": seed}}) as run:
            extend(run, range(4))
    printed = info(tmp_path).stdout
    assert "final loss" in printed
    assert printed.count("4.7000") == 2
    (tmp_path / "none.zarr").mkdir()
    done = info(f"{tmp_path}/*.zarr", "--json", rc=1)  # one of them is no run
    assert "none.zarr" in done.stderr
    first, second = json.loads(done.stdout)
    assert second["differing_settings"] == {"config.training.seed": 2}
    assert first["committed_rows"] == 4
    done = info(tmp_path / "1.zarr", tmp_path / "3.zarr", rc=1)
    assert f"no run at {tmp_path / '3.zarr'}; runs in {tmp_path}: 1.zarr, 2.zarr\n" in done.stderr
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


def test_computed_arrays_are_named(sample: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    def printed(command: str, path: Path) -> str:
        return " ".join(trajstore_cli(command, path).stdout.split())

    path = sample_part(sample, tmp_path / "run.zarr")
    assert "encoding compact" in printed("info", path)
    assert "Computed from the gradient: W, exp_avg, exp_avg_sq." in printed("info", path)
    notes: list[str] = []
    unknown = scheduled_run(tmp_path / "unknown.zarr", recorded=False, on_note=notes.append)
    stored = information(unknown)["arrays"]
    shares = ", ".join(f"{1 / stored[name]['ratio']:.0%}" for name in ("W", "exp_avg"))
    (note,) = notes
    assert note.startswith("not all rows of W, exp_avg could be computed")
    assert f"{shares} of their uncompressed bytes; the run does not hold hyperparameters" in note
    for command in ("info", "summary"):
        assert f"Note: {note}." in printed(command, unknown)
    without = begin(tmp_path / "without.zarr", encoding="compact")
    without.close()
    assert "Computed from the gradient: nothing." in printed("info", without.path)
    some = sample_part(path, tmp_path / "some.zarr", steps="0:22:2")
    assert "uncompressed bytes; its steps are not consecutive." in printed("info", some)
