"""The command trajstore: help, names, commands of other packages, signals and terminals."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from bits_and_calls import Cli
from click.testing import CliRunner, Result
from rich.text import Text

import trajstore
from trajstore.cli import start, stop_signals
from trajstore.cli.main import main
from trajstore.cli.output import (
    AnalysisProgress,
    BytesProgress,
    PlainConsole,
    PlainTable,
    in_command,
    print_json,
)
from trajstore.cli.stop_signals import StopRequest
from trajstore.errors import InvalidArgument
from trajstore.schema import RECORDED, TIERS

ROOT = Path(__file__).parents[4]

_CONTEXT = click.Context(main)
COMMANDS = {name: main.get_command(_CONTEXT, name) for name in main.list_commands(_CONTEXT)}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert f"trajstore {name}" in result.output
    assert "\n  Example:\n    trajstore" in result.output  # on separate lines
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option) and parameter.name not in ("help", "format_name"):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"
    assert f"`trajstore {name}`" in (ROOT / "docs" / "index.md").read_text()


def test_alone_it_says_what_to_type_first() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 0
    for line in result.output.splitlines():
        if line.startswith("  trajstore "):
            assert line.split()[1] in COMMANDS
    assert "trajstore record --preset gatsby" in result.output


MISTYPED = {
    "what_if gatsby.zarr": "what-if",
    # options
    "record --prest gatsby": "--preset",
    "report gatsby.zarr --out r.html": "--output",
    # presets, texts
    "record --preset gatsbi": "gatsby",
    "fetch gpt-2": "gpt2",
    # fields, and what is in them
    "record --dry-run --preset gatsby --set optimizer.weigth_decay=1": "weight_decay",
    "record --dry-run --preset gatsby --set lr=3": "optimizer.lr",
    "record --dry-run --preset gatsby --set schedule.name=cosin": "cosine",
    "record --preset gatsby --device gpu": "cuda",
    # variables, tokens
    "export gatsby.zarr --variables W,gard -o g.safetensors": "grad",
    "export gatsby.zarr --select token=ded -o g.safetensors": "dead",
    # runs
    "verify gatsy.zarr": "gatsby.zarr",
    # quantities, their options, lattices, populations
    "analyze gatsby.zarr frezee": "freeze",
    "analyze gatsby.zarr freeze --set latice=bfloat16": "lattice",
    "analyze gatsby.zarr freeze --lattice bflaot16": "bfloat16",
    "analyze gatsby.zarr freeze --population 'rare=token_cout < 3'": "token_count",
    # figures, formats, layouts
    "plot gatsby.zarr heatmpa -o g.png": "heatmap",
    "export gatsby.zarr --format hdf -o g.h5": "hdf5",
}


@pytest.mark.torch
@pytest.mark.parametrize("call", MISTYPED)
def test_a_mistyped_name_of_any_kind_gets_a_suggestion(
    call: str, example_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example_run.parent)
    done = CliRunner().invoke(main, shlex.split(call), prog_name="trajstore")
    assert done.exit_code == 2
    _, asked, told = done.stderr.lower().partition("did you mean")
    assert asked
    assert f"'{MISTYPED[call]}'" in told
    assert [entry.name for entry in example_run.parent.iterdir()] == [example_run.name]


def test_an_unlike_command_gets_no_suggestion() -> None:
    assert "did you mean" not in CliRunner().invoke(main, ["xyz"]).stderr
    assert CliRunner().invoke(main, ["--no-such-option"]).exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    words = {"COMP_WORDS": "trajstore fet", "COMP_CWORD": "fet" if shell == "fish" else "1"}
    environment = words | {"_TRAJSTORE_COMPLETE": f"{shell}_complete"}
    done = CliRunner().invoke(main, [], prog_name="trajstore", env=environment)
    assert "fetch" in done.output
    assert "verify" not in done.output


def test_a_missing_run_is_one_sentence_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["info", str(tmp_path / "nothing.zarr")])
    assert result.exit_code == 2
    assert result.output.startswith("trajstore: there is no run at ")
    assert result.output.count("\n") == 1
    result = CliRunner().invoke(main, ["--debug", "info", str(tmp_path / "nothing.zarr")])
    assert isinstance(result.exception, FileNotFoundError)


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5], "b": float("inf")})
    assert capsys.readouterr().out == '{\n  "a": [\n    null,\n    1.5\n  ],\n  "b": null\n}\n'


def test_the_promised_names_are_there() -> None:
    """Scripts rely on these: options may be added, but none removed."""
    for line in (ROOT / "tests/data/promised_options.txt").read_text().splitlines():
        name, *flags = line.split()
        known = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
        assert {*flags} <= known, name


def test_each_of_at_most_150_options_is_used_by_a_test() -> None:
    tests = (ROOT / "tests").rglob("test_*.py")
    texts = [{*re.findall(r"[\w-]+", file.read_text())} for file in tests]
    options = [
        (name, {*option.opts, *option.secondary_opts})
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option)
    ]
    assert len(options) + sum(isinstance(one, click.Option) for one in main.params) <= 150
    untested = [
        f"{name} {spelled}"
        for name, spelled in options
        if not any(name in words and spelled & words for words in texts)
    ]
    assert untested == []


def test_an_address_is_refused_and_no_folder_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["record", "--preset", "gatsby", "-o", "ftp://b/run.zarr"])
    assert result.exit_code == 2
    assert "an unknown kind of address" in result.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_the_help_names_every_variable_that_can_be_recorded() -> None:
    (option,) = (one for one in COMMANDS["record"].params if "--variables" in one.opts)
    assert isinstance(option, click.Option)
    words = set(re.findall(r"[\w+]+", option.help or ""))
    assert {*RECORDED, *TIERS} <= words
    assert "delta" not in words


PAGE = (Path(__file__).parents[4] / "docs" / "howto" / "extend.md").read_text()


def block(language: str) -> str:
    """First code block of the language on the page."""
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the installed package."""
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "loudest.py").write_text(block("python"))
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def call(*arguments: str) -> Result:
    """What a process prints that starts now, and so finds the package."""
    commands = type(main)("trajstore", no_args_is_help=True)
    return CliRunner().invoke(commands, arguments)


@pytest.mark.nightly
def test_another_package_adds_a_command_and_an_accessor(site: Path, example_run: Path) -> None:
    """In a process of its own: where xarray finds accessors is decided once."""
    code = (
        "import sys, xarray\n"
        "from trajstore.cli.main import main\n"
        "main(['loudest', sys.argv[1], '--step', '3'], standalone_mode=False)\n"
        "print(xarray.open_dataset(sys.argv[1]).loud.tokens(3))\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    words, env = [sys.executable, "-c", code, str(example_run)], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    shown, again = done.stdout.splitlines(keepends=True)
    assert f"$ trajstore loudest gatsby.zarr --step 3\n{shown}" in PAGE
    assert again == shown


def test_a_command_that_cannot_be_imported_leaves_the_others_and_none_is_replaced(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with next(site.glob("*.dist-info/entry_points.txt")).open("a") as file:
        file.write("\n[trajstore.commands]\nverify = loudest:loudest\n")
    with (site / "loudest.py").open("a") as file:
        file.write("\nimport a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(site)
    shown = call("--help").stdout
    assert re.search(r"^  loudest +Cannot be imported from loudest\.$", shown, re.M)
    assert re.search(r"^  verify +Read", shown, re.M)
    done = call("loudest", "gatsby.zarr", "--step", "3")
    assert done.exit_code == 1
    assert "loudest cannot be imported: No module named 'a_package_that" in done.stderr


HOSTILE = "\x1b[31mred\x1b]0;t [bold]<é>[/bold] :smile: \u202e\ud800\x9b\u200b漢"
ESCAPED = r"\x1b[31mred\x1b]0;t [bold]<é>[/bold] :smile: \u202e\ud800\x9b\u200b漢"


@pytest.mark.parametrize("shown", [HOSTILE, Text(HOSTILE), Text(HOSTILE, "bold")])
def test_what_a_terminal_would_obey_is_escaped_and_the_rest_stays(shown: str | Text) -> None:
    written = io.StringIO()
    console = PlainConsole(file=written, width=200)
    table = PlainTable("name")
    table.add_row(shown)
    console.print(shown)
    console.print(table)
    assert written.getvalue().count(ESCAPED) == 2
    assert "\x1b" not in written.getvalue()


def test_a_closed_standard_error_does_not_end_the_command() -> None:
    code = """
import sys
from trajstore.cli.output import err, out
for number in range(3):
    err.print("x" * 100_000)
print("still heard by nobody", file=sys.stderr, flush=True)
out.print("done")
"""
    words = [sys.executable, "-c", code]
    readable, writable = os.pipe()
    os.close(readable)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=writable, timeout=60)
    os.close(writable)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_a_command_prints_options_in_place_of_arguments() -> None:
    named = "got every=0; overwrite=True (at=…), map='W=a b'. Or training.device=cpu, data.x=3e-4"
    given = "got --every 0; --overwrite (--at …), --map 'W=a b'. Or --device cpu, --set data.x=3e-4"
    assert in_command(f"{named}, lr=1, join='inner'") == f"{given}, lr=1, --common-steps"
    others = "f(run, at=STEP), 'at=3', --set at=3, at=-1, at=Path('a'), config.training.steps=9"
    assert in_command(others) == others


def test_an_address_without_a_scheduler_is_reported() -> None:
    with pytest.raises(InvalidArgument, match="no dask scheduler answers at tcp://"):
        AnalysisProgress("tcp://127.0.0.1:1", timeout=0.1)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_imports_is_a_sentence_and_little_is_imported_before() -> None:
    code = f"""
import sys, signal
sys.path.insert(0, {str(Path(trajstore.__file__).parents[1])!r})
import trajstore.cli.start
print([name for name in ("typing", "contextlib", "threading", "click") if name in sys.modules])
class Interrupted:
    def __getattr__(self, name):
        sys.stdout.flush()
        signal.raise_signal(signal.SIGINT)
sys.modules["trajstore.cli.main"] = Interrupted()
trajstore.cli.start.main()
"""
    bare = [sys.executable, "-S", "-E", "-c", code]  # without what the environment imports
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60)
    printed = (done.returncode, done.stdout, done.stderr)
    assert printed == (130, "[]\n", "trajstore: stopped by Ctrl-C\n")


Run = tuple[Path, dict[str, np.ndarray]]


def printed(words: str, encoding: str, monkeypatch: pytest.MonkeyPatch, rc: int = 2) -> str:
    """Run a command whose output has that encoding; return standard output and error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "argv", ["trajstore", *shlex.split(words)])
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code in (0, rc)
    written: Any = [stream.detach().getvalue() for stream in (out, err)]
    return b"".join(written).decode(encoding)


@pytest.mark.parametrize(
    ("before", "during"),
    [
        (signal.default_int_handler, [stop_signals._stop, signal.default_int_handler]),
        (signal.SIG_IGN, [signal.SIG_IGN, signal.SIG_IGN]),  # it stays ignored
    ],
)
def test_a_working_command_gets_a_keyboard_interrupt(
    before: Any, during: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def work() -> None:
        seen.append(signal.getsignal(signal.SIGINT))
        stop_signals.working()
        seen.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, before)
    command = SimpleNamespace(load=lambda: click.Command("work", callback=work))
    monkeypatch.setitem(main._entry_points, "work", command)  # type: ignore[attr-defined]
    assert printed("work", "ascii", monkeypatch, 130) == "trajstore: stopped by Ctrl-C\n"
    assert seen == during


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_results_helps_and_errors_can_be_printed(
    encoding: str, small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small_run
    for name in main._entry_points:  # type: ignore[attr-defined]
        assert printed(f"{name} --help", encoding, monkeypatch).startswith("Usage: trajstore")
    np.save(path.parent / "W.npy", np.zeros((3, 4, 2), "float32"))
    shown = {
        words: printed(words.format(path), encoding, monkeypatch)
        for words in (
            "info {0}", "info {0} {0}", "info --json {0}", "verify {0}",
            "summary {0}", "analyze {0} norm", "import {0}/../W.npy --dry-run", "info no-漢.zarr",
        )
    }  # fmt: skip
    times = "x" if encoding == "ascii" else "×"
    assert f"11 {times} 10 {times} 6" in shown["info {0}"]
    assert f"3{times}4{times}2" in shown["import {0}/../W.npy --dry-run"]
    assert r"there is no run at no-\u6f22.zarr" in shown["info no-漢.zarr"]
    one, other = "漢…▁█—é".encode(encoding, "trajstore.similar"), r"\u6f22~_#-"
    assert one == (other + r"\xe9" if encoding == "ascii" else other + "é").encode(encoding)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_ends_the_process(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {other: signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)}
    with StopRequest(), pytest.raises(SystemExit) as error:  # nothing is done yet
        signal.raise_signal(number)
    assert error.value.code == 128 + number
    with StopRequest() as stop:
        stop.begin()
        assert not stop()
        assert stop.number is None
        signal.raise_signal(number)
        assert stop()
        assert stop.number == number
        assert stop.exit_code == 128 + number
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert {other: signal.getsignal(other) for other in before} == before
    assert "a second signal stops at once" in capfd.readouterr().err


def test_sigterm_leaves_nothing(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, trajstore_cli: Cli
) -> None:
    """The signal comes when the file is half written, within a callback that loses exceptions."""
    show = BytesProgress.show

    def interrupted(bar: BytesProgress, done: int, total: int) -> None:
        class Gone:
            pass

        gone = Gone()
        weakref.finalize(gone, signal.raise_signal, signal.SIGTERM)
        del gone
        show(bar, done, total)

    monkeypatch.setattr(BytesProgress, "show", interrupted)
    run, _ = small_run
    trajstore_cli("export", run, "-o", run.with_name("f.h5"), rc=128 + signal.SIGTERM)
    assert list(run.parent.iterdir()) == [run]
