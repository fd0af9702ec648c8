"""Sphinx configuration of the site: `make docs`.

The pages are plain Markdown, which a forge shows as well. Neither the build nor the pages fetch
anything from the network. Four directives write tables from the code: ``fields`` and a section of
the configuration, ``variables``, ``layouts`` and ``marks``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import stringify_annotation

import trajstore.exchange.layouts
from trajstore.exchange.layouts import LAYOUTS, MARKS, Column, Layout
from trajstore.installation import __version__
from trajstore.schema import VARIABLES
from trajstore.trainers.config import RunConfig, _allowed, _literal

project = "trajstore"
author = "The trajstore developers"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_heading_anchors = 4  # links into pages are made as on a forge
highlight_language = "text"
smartquotes = False  # options begin with two hyphens

autodoc_member_order = "groupwise"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer ones have one parameter a line
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# `name` in a docstring is a link if something has that name.
default_role = "py:obj"
nitpicky = True
# Names of other projects, and shapes next to a type, have no target.
nitpick_ignore_regex = [("py:.*", r"(?!trajstore\.).*")]

html_theme = "pydata_sphinx_theme"
html_title = "trajstore"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 8,
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}
# Pages without others below them.
html_sidebars = {"index": [], "start/*": []}


class Table(SphinxDirective):
    """Markdown that the code writes, in place of the directive."""

    optional_arguments = 1
    has_content = True  # a forge shows it in place of the table

    def run(self) -> list[nodes.Node]:
        """Return what the Markdown makes."""
        return self.parse_text_to_nodes("\n".join(TABLES[self.name](*self.arguments)))


def fields(section: str) -> Iterable[str]:
    """Fields of a section of the configuration, as `trajstore presets NAME` prints them."""
    kind: Any = RunConfig.model_fields[section].annotation
    yield "| field | default | values | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, value in kind().model_dump(mode="json").items():
        field = kind.model_fields[name]
        default = "not set" if value is None else f"`{_literal(value)}`"
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {default} | {', '.join(_allowed(field))} | {meaning} |"


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
        yield f"**`{name}`**: {origin.get(name, '')}"
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


TABLES = {"fields": fields, "variables": variables, "layouts": layouts, "marks": marks}


def set_examples(app: Sphinx, context: object, lines: list[str]) -> None:
    """Show the examples of a command as code; click's own mark for them is lost on the page."""
    text, code = [line for line in lines if not line.startswith("|")], []
    for line in lines:
        if line.startswith("|   "):
            code.append(f"   {line[4:]}")
    lines[:] = [*text, "", ".. code-block:: sh", "", *code, ""] if code else text


def split_attributes(
    app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]
) -> None:
    """Split a line of several attributes into one line each, as napoleon does for parameters."""
    section, written = "", []
    for number, line in enumerate(lines):
        if lines[number + 1 : number + 2] == ["-" * len(line)]:
            section = line
        several = re.fullmatch(r"(\w+(?:, \w+)+)( : .+)?", line)
        if section == "Attributes" and several:
            names, type = several.groups()
            written += [f"{one}{type or ''}" for one in names.split(", ")]
        else:
            written.append(line)
    lines[:] = written


def short_types(
    app: Sphinx, what: str, name: str, found: object, options: object, signature: str, result: str
) -> tuple[str, str] | None:
    """Show ``Annotated[int, …]`` as ``int``, and types of arrays by their names."""
    if not signature:
        return None
    short = {
        r"~?(?:typing\.)?Annotated\[(\w+), [^]]*\]": r"\1",
        re.escape(stringify_annotation(npt.ArrayLike, "smart")): "ArrayLike",
        r"~numpy\.ndarray\[tuple\[[^][]+\], ~numpy\.dtype\[[^][]+(\[[^][]+\])?\]\]": "ndarray",
    }
    for long, name in short.items():
        signature, result = re.sub(long, name, signature), re.sub(long, name, result or "")
    return signature, result


def public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element
) -> nodes.Node | None:
    """Link the type of an annotation, which has the name of its module, to its public name."""
    target = node["reftarget"]
    if node["reftype"] != "class" or target.count(".") < 2 or not target.startswith("trajstore."):
        return None
    module, _, name = target.rpartition(".")
    for package in ("trajstore", "trajstore.analysis", "trajstore.trainers"):
        one = getattr(importlib.import_module(package), name, None)
        if getattr(one, "__module__", None) == module:
            domain = env.domains.python_domain
            place = (env, node["refdoc"], app.builder, "obj", f"{package}.{name}", node, text)
            return domain.resolve_xref(*place) or text
    return text


def add_dark_variants(app: Sphinx, tree: nodes.document) -> None:
    """Show NAME-dark.png in place of NAME.png on dark pages, where there is one."""
    folder = Path(tree["source"]).parent
    for image in list(tree.findall(nodes.image)):
        file = Path(image["uri"])
        dark = file.with_stem(f"{file.stem}-dark")
        if (folder / dark).is_file():
            variant = image.deepcopy()
            variant["uri"] = str(dark)
            variant["classes"].append("only-dark")
            image["classes"].append("only-light")
            image.parent.insert(image.parent.index(image) + 1, variant)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", add_dark_variants, priority=400)  # Sphinx copies images at 500
    app.connect("autodoc-process-docstring", split_attributes, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-signature", short_types)
    app.connect("missing-reference", public_name)
    app.connect("sphinx-click-process-description", set_examples)
    for name in TABLES:
        app.add_directive(name, Table)
