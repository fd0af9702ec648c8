"""Write the names of the analysis, which the decorators of its functions and figures give.

``analysis/names.py`` says where each function and figure is, without importing it. Type checkers
and editors read ``analysis/typed.pyi``. A test compares both files with the decorators.
"""

from __future__ import annotations

import pkgutil
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import trajstore.analysis
from trajstore.analysis.figures.figure import LISTED
from trajstore.analysis.public import FUNCTIONS

FOLDER = Path(trajstore.analysis.__file__).parent
WITHOUT_NAMES = ("commands", "exploring", "figures", "names")

ABOUT = "Made by `make names` from the decorators of functions and figures; do not edit."


def public_names() -> dict[str, str]:
    """Module of each name of `trajstore.analysis`: constants, then classes, then functions."""
    modules = {}
    rooms = [
        room.name
        for room in pkgutil.walk_packages([str(FOLDER)], "trajstore.analysis.")
        if room.name.split(".")[2] not in WITHOUT_NAMES
    ]
    for room in map(import_module, rooms):
        for name, kind in vars(room).get("__annotations__", {}).items():
            if str(kind).startswith("Public["):
                modules[name] = room.__name__
    modules |= {name: each.function.__module__ for name, each in FUNCTIONS.items()}
    return dict(
        sorted(modules.items(), key=lambda item: (not item[0].isupper(), item[0].islower(), item))
    )


def index() -> str:
    """Text of ``names.py``."""
    rooms = [
        room.name
        for room in pkgutil.iter_modules([str(FOLDER / "figures")], "trajstore.analysis.figures.")
    ]
    for room in rooms:
        import_module(room)
    listed = sorted(LISTED, key=lambda each: each.place_in_list)
    figures = {each.figure.name: each.figure.draw.__module__ for each in listed}
    between = [each.figure.name for each in listed if each.figure.runs.between]
    return "\n".join(
        [
            f'"""Modules of the functions and figures, by name.\n\n{ABOUT}\n"""',
            "",
            "MODULES = {",
            *(f'    "{name}": "{module}",' for name, module in public_names().items()),
            "}",
            "",
            "FIGURE_MODULES = {",
            *(f'    "{name}": "{module}",' for name, module in figures.items()),
            "}",
            "",
            f"FIGURES_BETWEEN_RUNS = ({', '.join(map(repr, between))},)".replace("'", '"'),
            "",
        ]
    )


def stub() -> str:
    """Text of ``typed.pyi``."""
    names = public_names()
    of_modules = defaultdict(list)
    for name, module in sorted(names.items()):
        of_modules[module].append(name)
    return "\n".join(
        [
            f"# {ABOUT}",
            "",
            "from trajstore.analysis.figures.figure import Drawing",
            "from trajstore.analysis.several_runs import as_method",
            *(
                f"from {module} import {name} as {name}"
                for module, of_module in sorted(of_modules.items())
                for name in of_module
            ),
            "",
            "__all__ = [",
            *(f'    "{name}",' for name in names),
            "]",
            "",
            "class Methods:",
            *(
                f"    {name} = as_method({name}{'' if each.each_run else ', each=False'})"
                for name, each in sorted(FUNCTIONS.items())
                if each.is_method
            ),
            "",
            "class Drawings:",
            *(f"    {name}: Drawing" for name in sorted(each.figure.name for each in LISTED)),
            "",
        ]
    )


def files() -> dict[Path, str]:
    """Path and text of each file."""
    return {FOLDER / "names.py": index(), FOLDER / "typed.pyi": stub()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
    sys.exit()
