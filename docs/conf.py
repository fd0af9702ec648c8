"""Sphinx configuration of the site: `make docs`.

The pages are plain Markdown, which a forge shows as well. Neither the build nor the pages fetch
anything from the network.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

from trajstore.version import __version__

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
autodoc_typehints = "none"  # the docstrings describe more than the annotations
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
html_sidebars = {"index": []}


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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", split_attributes, priority=400)  # napoleon's is 500
    app.connect("sphinx-click-process-description", set_examples)
