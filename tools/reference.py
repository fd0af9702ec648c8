"""Write the parts of docs/reference that come from the code, in plain Markdown.

A part begins with ``<!-- make reference: KIND WORDS -->`` and ends with ``<!-- end -->``. The kinds
are `TABLES`, ``module`` and ``members``. A test compares the pages with what this program writes.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import click

import trajstore.exchange.layouts
from trajstore.cli.main import main
from trajstore.exchange.layouts import LAYOUTS, MARKS, NAMES, Column, Layout
from trajstore.schema import VARIABLES
from trajstore.trainers.config import RunConfig, allowed, literal

PAGES = Path(__file__).parents[1] / "docs" / "reference"
PART = re.compile(r"^<!-- make reference: (.+?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
TITLES = ("Parameters", "Attributes", "Yields", "Returns", "Raises", "Notes", "Examples")

SECTION_OF: dict[str, tuple[Path, str]] = {}
"""Page and anchor of each function, class and method."""


def files() -> dict[Path, str]:
    """Path and text of each page with a part from the code."""
    texts = {page: page.read_text("utf-8") for page in sorted(PAGES.rglob("*.md"))}
    for page, text in texts.items():
        for kind, *words in map(str.split, PART.findall(text)):
            if kind in ("module", "members"):
                for name in members(*words):
                    has_section = not isinstance(attribute(words[0], name), property)
                    heading = name if has_section else name.partition(".")[0]
                    SECTION_OF[f"{words[0]}.{name}"] = page, heading.lower().replace(".", "")
    return {page: written(page, text) for page, text in texts.items() if PART.search(text)}


def written(page: Path, text: str) -> str:
    """A page with new parts."""

    def part(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        if kind in TABLES:
            lines = TABLES[kind](*words)
        else:
            by_hand = PART.sub("", text[: found.start()])
            level = len(re.findall(r"^#+(?= )", by_hand, re.MULTILINE)[-1]) + 1
            lines = sections(page, level, *words, with_text=kind == "module")
        content = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        return f"<!-- make reference: {found[1]} -->\n\n{content}\n\n<!-- end -->"

    return PART.sub(part, text)


def fields(section: str) -> Iterable[str]:
    """Fields of a section of the configuration, as `trajstore presets NAME` prints them."""
    kind: Any = RunConfig.model_fields[section].annotation
    yield "| field | default | values | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, value in kind().model_dump(mode="json").items():
        field = kind.model_fields[name]
        default = "not set" if value is None else f"`{literal(value)}`"
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {default} | {', '.join(allowed(field))} | {meaning} |"


def variables() -> Iterable[str]:
    """All variables that a run can hold."""
    yield "| variable | meaning | dims | row 0 | units |"
    yield "| --- | --- | --- | --- | --- |"
    for one in VARIABLES.values():
        row0 = {"nan": "NaN", "zero": "0"}.get(one.row0, one.row0)
        cells = (f"`{one.name}`", one.long_name, ", ".join(one.dims), row0, one.units)
        yield f"| {' | '.join(cells)} |"


def layouts() -> Iterable[str]:
    """The layouts of the notebooks. Comments of layouts.toml tell whose files each describes."""
    source = Path(trajstore.exchange.layouts.__file__).with_name("layouts.toml").read_text("utf-8")
    found = re.findall(r'^# (.+)\n\["(.+?)"\]$', source, re.MULTILINE)
    origin = {name: text for text, name in found}
    for name, layout in LAYOUTS.items():
        others = ", ".join(f"`{also}`" for also, of in NAMES.items() if of == name != also)
        yield f"**`{name}`**{others and f', also {others}'}: {origin.get(name, '')}"
        yield ""
        yield from (f"- {line}" for line in contents(layout))
        yield ""


def contents(layout: Layout) -> Iterable[str]:
    """Lines on what the files of a layout hold."""
    if layout.columns:
        yield f"{layout.format}: {'; '.join(map(described, layout.columns))}"
    runs = {
        "axis": "several runs, along a first axis",
        "keys": "several runs, each under keys that begin with `run_0_`, `run_1_`, …",
        "matrices": "two runs, the matrices of an untied model: keys end with `_E` and `_W`",
    }
    if layout.runs:
        yield runs[layout.runs]
    if layout.steps:
        yield f"steps of the rows: `{layout.steps}`"
    for title, names in (
        ("marks", layout.marks),
        ("numbers", layout.numbers),
        ("texts in the metadata", layout.texts),
    ):
        if names:
            yield f"{title}: {', '.join(f'`{name}`' for name in names)}"


def described(column: Column) -> str:
    """An array of a layout."""
    name = f"`{column.variable}`"
    value = {
        "after": name,
        "before": f"{name} before the step",
        "change": f"change of {name} since the row before",
        "ulps": f"change of {name} since the row before, in ulps",
        "initial": f"{name} of step 0",
        "centroid": f"centroid of {name}",
        "last_motion": f"step of the last motion of {name}",
    }[column.time]
    parts = [value, f"bits of {column.type}" if column.bits else column.file_type]
    if column.tokens != "all":
        parts.append(f"{column.tokens} tokens only")
    if column.first_row:
        parts.append("without row 0")
    elif column.time in ("change", "ulps") or VARIABLES[column.variable].row0 == "nan":
        parts.append("NaN in row 0" if column.row0 == "nan" else "0 in row 0")
    return f"`{column.key}` = {', '.join(parts)}"


def marks() -> Iterable[str]:
    """Names of arrays that mark or count tokens."""
    titles = {
        "dead_mask": "mask of dead tokens",
        "live_mask": "mask of live tokens",
        "dead_ids": "ids of dead tokens",
        "live_ids": "ids of live tokens",
        "token_count": "occurrences of each token",
    }
    yield "| mark | names |"
    yield "| --- | --- |"
    for kind, title in titles.items():
        names = [f"`{name}`" for name, its in MARKS.items() if its == kind]
        yield f"| {title} | {', '.join(names)} |"


def constants(module: str, *names: str) -> Iterable[str]:
    """Tuples of words."""
    yield "| name | values |"
    yield "| --- | --- |"
    for name in names:
        values = ", ".join(f"`{value}`" for value in getattr(import_module(module), name))
        yield f"| `{name}` | {values} |"


def commands() -> Iterable[str]:
    """Usage, description, options and examples of each command."""
    top = click.Context(main, info_name="trajstore")
    for name in ("", *main.list_commands(top)):
        command = main.get_command(top, name) or main
        context = click.Context(command, top, name) if name else top
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExample:\n")
        yield from (f"## {context.command_path}", "", "```text", usage, "```", "", escaped(text))
        yield from ("", "```sh", textwrap.dedent(examples).strip(), "```", "")
        for option in command.params:
            if isinstance(option, click.Option) and (record := option.get_help_record(context)):
                yield f"- `{record[0]}`: {escaped(record[1]).replace('  [', ' [')}"
        yield ""


def escaped(text: str) -> str:
    """Markdown of a help, which marks nothing but code."""
    return re.sub(r"`[^`]+`|\*|<(?=\w)", lambda one: "\\" * (len(one[0]) == 1) + one[0], text)


TABLES = {
    "commands": commands,
    "constants": constants,
    "fields": fields,
    "layouts": layouts,
    "marks": marks,
    "variables": variables,
}


def members(module: str, *names: str) -> Iterator[str]:
    """The functions and classes with these names, or all; and methods and properties of classes.

    If methods of a class are among the names, its others are left out.
    """
    for name in names or import_module(module).__all__:
        found = attribute(module, name)
        if not isinstance(found, type | FunctionType | property):
            continue
        yield name
        if isinstance(found, type) and not any(one.startswith(f"{name}.") for one in names):
            for inner, one in vars(found).items():
                function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
                own = getattr(function, "__qualname__", "") == f"{found.__qualname__}.{inner}"
                if own and function.__doc__ and not inner.startswith("_"):
                    yield f"{name}.{inner}"


def attribute(module: str, name: str) -> Any:
    """A function, a class, or a method or property of a class."""
    owner, _, inner = name.partition(".")
    found = getattr(import_module(module), owner)
    return inspect.getattr_static(found, inner) if inner else found


def sections(page: Path, level: int, module: str, *names: str, with_text: bool) -> Iterator[str]:
    """A section for each function, class and method, after the text of the module."""
    if with_text:
        yield marked(prose(inspect.getdoc(import_module(module)) or ""), page, module)
    names = (*members(module, *names),)
    for name in names:
        found = attribute(module, name)
        if isinstance(found, property):
            continue  # it is among the attributes of its class
        title = rf"^({'|'.join(TITLES)})\n-+\n"
        text, *parts = re.split(title, inspect.getdoc(found) or "", flags=re.MULTILINE)
        content = dict(zip(parts[::2], parts[1::2], strict=True))
        if properties := [*properties_of(module, name, names)]:
            content["Attributes"] = "\n".join([content.get("Attributes", ""), *properties])
        yield from ("", f"{'#' * (level + name.count('.'))} `{name}`", "")
        if not (isinstance(found, type) and issubclass(found, Exception)):
            call = signature(module, name, with_result=not {"Returns", "Yields"} & {*content})
            yield from ("```python", call, "```", "")
        written = [prose(text)]
        for title in TITLES:
            if title in content:
                part = content[title]
                part = prose(part) if title in ("Notes", "Examples") else listed(title, part)
                written.append(f"**{title}**\n\n{part}")
        yield marked("\n\n".join(written), page, f"{module}.{name}")


def properties_of(module: str, owner: str, names: Iterable[str]) -> Iterator[str]:
    """Properties of a class among the names, as its docstring would describe attributes."""
    for name in names:
        if name.startswith(f"{owner}.") and isinstance(found := attribute(module, name), property):
            yield f"{name.partition('.')[2]} : {found.fget.__annotations__['return']}"
            yield textwrap.indent(inspect.getdoc(found), "    ")


def prose(text: str) -> str:
    """Text of a docstring, with fences around its examples and literal blocks."""

    def fenced(found: re.Match[str]) -> str:
        return f":\n\n```text\n{textwrap.dedent(found[1]).strip()}\n```\n"

    text = re.sub(r"::\n\n((?: .*(?:\n+|\Z))+)", fenced, text)
    return re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)


def listed(title: str, text: str) -> str:
    """List of the parameters, attributes, results or errors in a part of a docstring."""
    lines = []
    for entry in re.split(r"\n+(?=\S)", text.strip()):
        head, _, body = entry.partition("\n")
        names, has_kind, kind = head.partition(" : ")
        if title == "Raises":
            head = re.sub(r"\w+", r"`\g<0>`", head)
        elif has_kind or title in ("Parameters", "Attributes"):
            head = re.sub(r"[*\w]+", r"``\g<0>``", names) + (f" (*{kind}*)" if kind else "")
        else:
            head = f"*{head}*"
        body = prose(textwrap.dedent(body)).strip()
        lines.append(textwrap.indent(f"- {head}: {body}" if body else f"- {head}", "  ")[2:])
    return "\n".join(lines)


class Source(str):
    """Text that a signature shows without quotes."""

    __repr__ = str.__str__


def signature(module: str, name: str, with_result: bool) -> str:
    """How a function or class is called."""
    owner, _, inner = name.partition(".")
    found = getattr(import_module(module), owner)
    found = getattr(found, inner) if inner else found
    known = inspect.signature(found)
    shown = [one.replace(annotation=one.empty) for one in known.parameters.values()]
    for place, one in enumerate(shown):
        if one.default is not one.empty and re.search(r"^<|\w\(", repr(one.default)):
            shown[place] = one.replace(default=Source("..."))
    if inner and inspect.isfunction(found):
        del shown[0]  # self
    result = known.return_annotation
    end = f" -> {result}" if with_result and result not in ("None", None, known.empty) else ""
    text = f"{name}{inspect.Signature(shown)}{end}".replace("'", '"')
    return textwrap.fill(text, 88, subsequent_indent="    ")


def marked(text: str, page: Path, owner: str) -> str:
    """Markdown in which the names of the reference are links."""

    def code(found: re.Match[str]) -> str:
        fence, literal, name = found.groups()
        if not name or f"``{name}``" in text:  # a parameter
            return fence or f"`{literal or name}`"
        scopes = [owner.rsplit(".", dots)[0] for dots in range(owner.count(".") + 1)]
        for whole in (*(f"{one}.{name}" for one in (*scopes, "trajstore.errors")), name):
            if whole in SECTION_OF and whole != owner:
                target, anchor = SECTION_OF[whole]
                path = "" if target == page else os.path.relpath(target, page.parent)
                return f"[`{name}`]({path}#{anchor})"
        return f"`{name}`"

    return re.sub(
        r"(^ *```.*?^ *```)|``(.+?)``|`(.+?)`", code, text, flags=re.DOTALL | re.MULTILINE
    )


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
