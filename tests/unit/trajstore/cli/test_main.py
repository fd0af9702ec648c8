"""The command trajstore: help, names, and commands of other packages."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result
from rich.text import Text

from trajstore.cli.main import main
from trajstore.cli.output import (
    AnalysisProgress,
    PlainConsole,
    PlainTable,
    in_command,
    print_json,
    printable,
)
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


def test_a_mistyped_command_gets_the_nearest_name() -> None:
    result = CliRunner().invoke(main, ["what_if", "gatsby.zarr"])
    assert result.exit_code == 2
    assert "There is no command 'what_if' (did you mean 'what-if'?)." in result.stderr
    assert "did you mean" not in CliRunner().invoke(main, ["xyz"]).stderr
    assert CliRunner().invoke(main, ["--no-such-option"]).exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    words = {"COMP_WORDS": "trajstore fet", "COMP_CWORD": "fet" if shell == "fish" else "1"}
    environment = words | {"_TRAJSTORE_COMPLETE": f"{shell}_complete"}
    done = CliRunner().invoke(main, [], prog_name="trajstore", env=environment)
    assert "fetch" in done.output
    assert "verify" not in done.output


def test_ctrl_c_is_a_sentence_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    command = SimpleNamespace(load=lambda: click.Command("work", callback=interrupted))
    monkeypatch.setitem(main._entry_points, "work", command)  # type: ignore[attr-defined]
    result = CliRunner().invoke(main, ["work"])
    assert (result.exit_code, result.stderr) == (130, "trajstore: stopped by Ctrl-C\n")


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
    promised = {
        "record": "--preset --config --set --steps --corpus --tokenizer --device --seed "
        "--variables --every --tokens --memory --dry-run --resume --overwrite --fsync --output",
        "fork": "--at --set --steps --output",
        "info": "--json",
        "summary": "--json",
        "analyze": "--output --scheduler --json",
        "export": "--format --layout --output --select --variables",
        "import": "--output",
        "verify": "--replay --json",
        "repair": "--dry-run",
        "compare": "--json",
        "fetch": "",
    }
    assert promised.keys() <= COMMANDS.keys()
    for name, flags in promised.items():
        known = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
        assert set(flags.split()) <= known, name


def test_each_of_at_most_150_options_is_used_by_a_test() -> None:
    tests = [file for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
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


def test_a_command_that_cannot_be_imported_leaves_the_others(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (site / "loudest.py").open("a") as file:
        file.write("\nimport a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(site)
    shown = call("--help").stdout
    assert re.search(r"^  loudest +Cannot be imported from loudest\.$", shown, re.M)
    assert re.search(r"^  verify +Read", shown, re.M)
    done = call("loudest", "gatsby.zarr", "--step", "3")
    assert done.exit_code == 1
    assert "loudest cannot be imported: No module named 'a_package_that" in done.stderr


def test_no_package_replaces_a_command_of_trajstore(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info,) = site.glob("*.dist-info")
    (info / "entry_points.txt").write_text("[trajstore.commands]\nverify = loudest:loudest\n")
    monkeypatch.syspath_prepend(site)
    assert re.search(r"^  verify +Read", call("--help").stdout, re.M)


HOSTILE = "\x1b[31mred\x1b]0;t [bold]<b>[/bold] :smile: \u202e\ud800\x9b"


def test_what_a_terminal_would_obey_is_escaped_and_the_rest_stays() -> None:
    assert printable("plain <é> 漢 ›") == "plain <é> 漢 ›"
    assert printable("\x07\x9b\u202e\u200b\ud800") == r"\x07\x9b\u202e\u200b\ud800"
    assert printable("a\nb\r") == r"a\nb\r"


@pytest.mark.parametrize("shown", [HOSTILE, Text(HOSTILE), Text(HOSTILE, "bold")])
def test_a_console_and_its_tables_show_texts_as_they_are(shown: str | Text) -> None:
    written = io.StringIO()
    console = PlainConsole(file=written, width=200)
    table = PlainTable("name")
    table.add_row(shown)
    console.print(shown)
    console.print(table)
    assert written.getvalue().count(printable(HOSTILE)) == 2
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
    pytest.importorskip("distributed")
    with pytest.raises(InvalidArgument, match="no dask scheduler answers at tcp://"):
        AnalysisProgress("tcp://127.0.0.1:1", timeout=0.1)
