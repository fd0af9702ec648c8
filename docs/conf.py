"""Sphinx configuration of the site: `make docs`.

The pages are plain Markdown, which a forge shows as well; `make reference` writes the parts of
docs/reference that come from the code. Neither the build nor the pages fetch anything from the
network.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

from trajstore.installation import __version__

project = "trajstore"
author = "The trajstore developers"
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4  # links into pages are made as on a forge
highlight_language = "text"
smartquotes = False  # options begin with two hyphens

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
