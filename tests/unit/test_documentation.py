"""What README and the pages of docs/ show: code runs, commands have the options they are given.

Blocks of Python run in the order of their page, in one namespace, in a folder that holds the run
of the examples as ``gatsby.zarr``, ``other.zarr`` and ``run.zarr``. So do the lines of shell that
begin with ``trajstore`` and neither train nor take long. All are held against the options that
there are. A comment ``<!-- not run: why -->`` before a block leaves it at being read: Python is
parsed, and the names that it imports of these packages must be there. ``<!-- run: name -->`` is for
other tests. Parts that `make reference` writes are held against the code, and pytest runs the
examples of docstrings. The cells of the notebook run in their order, in an empty folder.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from packaging.version import Version

from trajstore import analysis, errors, schema
from trajstore.cli.command_options import runs_and_names
from trajstore.cli.main import main
from trajstore.installation import __version__

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
TOOL = ROOT / "tools" / "reference.py"
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if path.name != "changelog.md" and "_build" not in path.parts
)
CODE = ("trajstore", "trainers", "analysis")
FOLDERS = "|".join([*CODE, "tests", "benchmarks", "tools", "docs"])
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>(?:not )?run): .+? -->\n)?```(?P<language>python|sh)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
READ = {"record", "what-if", "presets", "fetch", "explore", "report"}
"""Commands that train, need the network or another process, or take long; others test them."""

PUBLIC = {
    "trajstore": {"analysis", "trainers"},
    "trajstore.analysis": {"figures"},
    "trajstore.analysis.figures": set(),
    "trajstore.errors": set(),
    "trajstore.trainers": set(),
}
"""Packages whose names scripts import, and their subpackages among these."""

SECONDS = {
    *(f"docs/howto/{name}.md" for name in (
        "develop", "export", "monitor", "own-model", "plot", "token-groups", "verify-repair"
    )),
    "docs/reference/quantities.md",
    "docs/start/tutorial.md",
}  # fmt: skip
"""Pages that take long; tests of the functions and commands compute and draw the same."""

LONG = ("model.zarr", "short.zarr", "thousand.zarr")
"""The runs that the gallery shows. Tests of the figures draw each kind."""


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: Path
    line: int
    language: str
    code: str
    mark: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """Words of each trajstore command."""
        for line in self.code.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            for _, group in itertools.groupby(lexer, lambda word: word in (";", "&&", "|")):
                words = [*itertools.dropwhile(lambda word: word in ("do", "exec"), group)]
                if words and words[0] in ("trajstore", ".venv/bin/trajstore"):
                    yield words[1:]


def by_hand(page: Path) -> str:
    """Text of a page, with empty lines in place of the parts that `make reference` writes."""
    part = re.compile(r"^<!-- make reference: .*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
    return part.sub(lambda found: "\n" * found[0].count("\n"), (ROOT / page).read_text())


def blocks(page: Path) -> list[Block]:
    text = by_hand(page)
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, **found.groupdict())
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def test_every_block_and_every_comment_is_of_a_page() -> None:
    text = "".join(map(by_hand, PAGES))
    assert len(BLOCKS) == len(re.findall(r"^ *```(?:python|sh)\b", text, re.MULTILINE))
    assert len(BLOCKS) > 100
    assert text.count("<!--") == sum(block.mark is not None for block in BLOCKS)


def test_the_gallery_has_every_figure() -> None:
    from trajstore.analysis.figures import FIGURES

    page = (ROOT / "docs" / "reference" / "figures.md").read_text()
    shown = rf"^trajstore plot (?:{'|'.join(LONG)})(?: \S+\.zarr)? (\w+)(?: --.+)?\n```\n\n!\["
    assert {*FIGURES} - {*re.findall(shown, page, re.MULTILINE)} == set()


def test_links_and_paths_lead_to_files() -> None:
    """Links within docs/ are held against headings too, when the site is built."""
    for page in (*PAGES, Path("CONTRIBUTING.md")):
        text = by_hand(page)
        links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text)
        links = [str((ROOT / page).parent.joinpath(link)) for link in links]
        links += re.findall(rf"\b(?:{FOLDERS})/[\w/]*(?:\.py|(?=`))", text)
        assert [link for link in links if not (ROOT / link).exists()] == [], page


def test_contributing_names_every_package_and_modules_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for package in CODE:
        for path in (ROOT / package).glob("*/__init__.py"):
            name = f"`{package}/{path.parent.name}/`"
            assert f"| {name} |" in text or path.parent.is_symlink(), name
    folders = [ROOT / name for name in FOLDERS.split("|")]
    there = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert {*re.findall(r"`(?:\w+/)*(\w+\.py)`", text)} <= there


def test_dotted_names_lead_to_something() -> None:
    groups = {"trajstore.commands", "trajstore.accessors", "trajstore.replays", "trajstore.readers"}
    known = {point.name for point in entry_points(group="zarr.codecs")} | groups
    missing = {
        name
        for page in [*PAGES, Path("CONTRIBUTING.md")]
        for name in re.findall(r"`(trajstore(?:\.\w+)+)\b", (ROOT / page).read_text())
        if name not in known and not is_there(name)
    }
    assert missing == set()


def is_there(name: str) -> bool:
    """Whether a module, or something in one, has this name; nothing heavy is imported."""
    owner, _, last = name.rpartition(".")
    if owner in PUBLIC and last in importlib.import_module(owner).__all__:
        return True
    module = find_spec(owner)
    if module is None or module.origin is None:
        return False
    if module.submodule_search_locations and find_spec(name):
        return True
    return re.search(rf"\b{last}\b", Path(module.origin).read_text()) is not None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_of_a_page_could_run(page: Path) -> None:
    """Commands have the options they are given; Python imports public names."""
    for block in blocks(page):
        if block.language == "sh":
            for words in block.commands():
                check_command(words, block.where)
            continue
        tree = ast.parse(block.code, filename=block.where)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trajstore"):
                assert node.module in PUBLIC, f"{block.where}: {node.module} is not public"
                known = {*importlib.import_module(node.module).__all__, *PUBLIC[node.module]}
                if find_spec("lightning") is None:  # then `__all__` leaves its callback out
                    known.add("LightningCallback")
                assert {alias.name for alias in node.names} <= known, block.where


def _marked(pages: list[Path]) -> list[object]:
    """Pages with something to run; those that need torch are marked so."""
    chosen = []
    for page in pages:
        code = "".join(block.code for block in blocks(page) if block.mark is None)
        if not code:
            continue
        needs_torch = re.search(r"\btorch\b|\btrainers\b|to_torch|--replay", code) is not None
        marks = [pytest.mark.torch] * needs_torch + [pytest.mark.nightly] * (str(page) in SECONDS)
        chosen.append(pytest.param(page, marks=marks, id=str(page)))
    return chosen


@pytest.mark.parametrize("page", _marked(PAGES))
def test_a_page_runs(
    page: Path,
    example_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if request.node.get_closest_marker("torch"):
        pytest.importorskip("torch")
    for name in ("gatsby.zarr", "other.zarr", "run.zarr"):
        shutil.copytree(example_run, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    import trajstore

    names = {"trajstore": trajstore, "ds": trajstore.open_run("gatsby.zarr")}
    for block in blocks(page):
        if block.mark is not None:
            continue
        if block.language == "python":
            padding = "\n" * (block.line - 1)
            with contextlib.redirect_stdout(None):
                exec(compile(padding + block.code, str(page), "exec"), names)
            continue
        for words in block.commands():
            if words[0] not in READ and not {"all", *LONG} & {*words}:
                done = CliRunner().invoke(main, words)
                assert done.exit_code == 0, f"{block.where}: {shlex.join(words)}: {done.output}"


@pytest.mark.nightly
@pytest.mark.torch
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "notebooks" / "first-freeze.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    sources = ["".join(cell["source"]) for cell in cells]
    printed = '"training.steps=300"'
    assert printed in sources[0]
    narrow = '"model.hidden=8", "model.layers=1", "model.context=16", "training.batch_size=4"'
    smaller = f"{printed}, {narrow}"
    sources[0] = sources[0].replace(printed, smaller)
    names: dict[str, object] = {"__name__": "__main__"}
    for cell, source in zip(cells, sources, strict=True):
        exec(compile(source, cell["id"], "exec"), names)
    assert Path("gatsby.safetensors").stat().st_size > 0


def check_command(words: list[str], where: str) -> None:
    """Fail where a command, an option, a choice, or a name of trajstore's own is not there."""
    line = f"{where}: trajstore {shlex.join(words)}"
    if not words or words[0].startswith("-"):
        return
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, f"{line}: no command"
    words = words[: words.index(">")] if ">" in words else words
    values = [re.sub(r"\$\{?\w+\}?", "1", word) for word in words]  # of a shell's variables
    try:
        given = command.make_context(values[0], values[1:]).params
    except click.exceptions.Exit:  # of --help or --list
        return
    except click.ClickException as error:
        raise AssertionError(f"{line}: {error.format_message()}") from error
    for name, known in known_names(words[0]).items():
        value = given.get(name)
        several = value if isinstance(value, (tuple, list)) else [value]
        if name == "words":
            several = runs_and_names([one for one in several if isinstance(one, str)], known)[1]
        for one in several:
            assert one in known or not isinstance(one, str), f"{line}: {one}"


def known_names(command: str) -> dict[str, set[str]]:
    """What the arguments of a command can be, beyond what click knows."""
    from trajstore.analysis import QUANTITIES
    from trajstore.analysis.figures import FIGURES
    from trajstore.analysis.several_quantities import ACROSS_RUNS, ALONE
    from trajstore.exchange.layouts import EXPORT_LAYOUTS
    from trajstore.schema import RECORDED

    text = (ROOT / "trainers" / "presets.py").read_text()  # its import would need torch
    presets = re.findall(r"^def (\w+)\(\) -> RunConfig", text, re.MULTILINE)
    named = {name.replace("_", "-") for name in presets}
    return {
        "plot": {"words": {*FIGURES, "all", "film", "text_loss", "attention_entropy"}},
        "analyze": {"words": {*QUANTITIES, *ALONE, *ACROSS_RUNS, *RECORDED}},
        "record": {"preset_name": named},
        "export": {"layout": {*EXPORT_LAYOUTS}},
    }.get(command, {})


def test_the_changelog_and_the_citation_name_the_last_release() -> None:
    """It is this version, or this is a development version of a later one."""
    titles = re.findall(r"^## \[(.+?)\](?: – (\d{4}-\d{2}-\d{2}))?$", _text("CHANGELOG.md"), re.M)
    assert titles[0] == ("Unreleased", "")
    version, date = titles[1]
    here = Version(__version__)
    assert here == Version(version) or (here.is_devrelease and here > Version(version))
    cited = yaml.safe_load(_text("CITATION.cff"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == version
    assert str(cited["date-released"]) == date


def test_what_other_programs_read_can_be_read() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), *ROOT.glob(".*.yaml")]
    assert len(files) > 5
    for path in files:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_the_workflow_runs_what_there_is_to_run() -> None:
    jobs = yaml.safe_load(_text(".github/workflows/check.yml"))["jobs"]
    targets = set(re.findall(r"^(\w+):.*##", _text("Makefile"), re.M))
    versions = {entry["versions"] for entry in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert versions <= targets
    assert any(step.get("run") == "bash .ci/run" for step in jobs["whole"]["steps"])


def _text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.torch
@pytest.mark.skipif(not TOOL.exists(), reason="needs a clone")
def test_the_parts_from_the_code_are_up_to_date() -> None:
    for needed in ("torch", "lightning"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("reference_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.files().items():
        assert path.read_text("utf-8") == text, f"{path} is old; run make reference"


def rows(page: str, heading: str | None = None) -> list[list[str]]:
    """Cells of the first table of a page, or of the section with this heading, after its head."""
    text = (REFERENCE / page).read_text()
    if heading is not None:
        assert f"## {heading}\n" in text, heading
        text = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = re.search(r"^\|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, (page, heading)
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table[1].splitlines()
    ]


def test_every_coordinate_and_tier_is_described() -> None:
    described = {row[0].strip("`") for row in rows("variables.md", "Coordinates")}
    assert described == {"step", "is_NAME", *schema.COORDINATES}
    tiers = {row[0].split("`")[1] for row in rows("variables.md", "Tiers")}
    assert tiers == set(schema.TIERS)


def test_every_exception_is_described() -> None:
    described = {row[0].strip("`"): row for row in rows("exceptions.md")}
    assert set(described) == set(errors.__all__)
    for name, row in described.items():
        error = getattr(errors, name)
        assert row[1].strip("`") in {one.__name__ for one in error.__mro__[1:]}, name
        assert error.exit_code == int(row[4]), name


def test_every_function_has_a_question_and_a_page() -> None:
    names = {name for name in analysis.__all__ if name.islower()}
    pages = "".join(page.read_text() for page in (REFERENCE / "analysis").glob("*.md"))
    assert names - {*re.findall(r"^## `(\w+)`$", pages, re.MULTILINE)} == set()
    asked = {name for row in rows("quantities.md") for name in re.findall(r"\w+", row[1])}
    helpers = {"by_population", "compute", "each_run", "over_runs", "with_populations"}
    assert names - asked == helpers


@pytest.mark.torch
def test_every_section_and_field_of_the_configuration_is_described() -> None:
    pytest.importorskip("pydantic")
    from trajstore.trainers.config import RunConfig

    page = (REFERENCE / "configuration.md").read_text()
    assert re.findall(r"^<!-- make reference: fields (\w+) -->$", page, re.MULTILINE) == [
        *RunConfig.model_fields
    ]
    for section, entry in RunConfig.model_fields.items():
        for name, field in entry.annotation.model_fields.items():
            assert field.description, (section, name)


@pytest.mark.torch
def test_every_preset_is_described() -> None:
    pytest.importorskip("pydantic")
    from trajstore.trainers.presets import PRESETS, preset

    assert [row[0].strip("`") for row in rows("presets.md")] == list(PRESETS)
    for _, name, changes in rows("presets.md", "Flannel, Thimble and Crucible"):
        config = preset(name.strip("`"))
        assert "`" not in changes or config.with_values(re.findall("`(.+?)`", changes)) != config


@pytest.mark.torch
def test_every_public_function_has_an_example() -> None:
    pytest.importorskip("torch")
    for package in ("trajstore", "trajstore.analysis", "trajstore.trainers"):
        facade = importlib.import_module(package)
        named = [getattr(facade, name) for name in facade.__all__]
        functions = [one for one in named if inspect.isfunction(one)]
        assert functions
        assert [one for one in functions if ">>>" not in (one.__doc__ or "")] == []


def test_no_example_is_skipped() -> None:
    files = [path for name in CODE for path in (ROOT / name).rglob("*.py")]
    skipped = [path for path in files if "doctest: +SKIP" in path.read_text()]
    assert skipped == []
