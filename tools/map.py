"""Print the rooms of each package, by floors: what a module imports lies on a floor below it.

A room is a folder of modules, or a module at the top of its package. ``--modules`` prints every
module instead, ``--arrows`` lists who imports whom. An import from a lower package of one above it,
or a circle, ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

FOLDERS = {
    "trajstore": "trajstore",
    "trajstore.trainers": "trainers",
    "trajstore.analysis": "analysis",
}
"""Folder of each package, the lowest first; the other two may import the first one only."""

Arrows = dict[str, set[str]]


def modules_of(package: str) -> dict[str, Path]:
    """File of each module, facades and the init files of rooms left out."""
    root = Path(FOLDERS[package])
    return {
        ".".join((package, *path.relative_to(root).with_suffix("").parts)): path
        for path in sorted(root.rglob("*.py"))  # which follows no links
        if path.name != "__init__.py"
    }


def room_of(module: str) -> str:
    """Folder that a module lies in; itself where it lies at the top of its package."""
    folder = module.rpartition(".")[0]
    return module if folder in FOLDERS else folder


def arrows_between(modules: dict[str, Path], graph: grimp.ImportGraph, *, rooms: bool) -> Arrows:
    """Which of them imports which others."""
    name = room_of if rooms else str
    arrows: Arrows = {name(module): set() for module in modules}
    for module in modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if imported in modules and name(imported) != name(module):
                arrows[name(module)].add(name(imported))
    return arrows


def floors_of(arrows: Arrows) -> list[list[str]]:
    """Names by floor, the lowest first.

    Raises
    ------
    CycleError
        If there is a circle.
    """
    floor: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        floor[name] = max((floor[below] + 1 for below in arrows[name]), default=0)
    return [
        sorted(name for name in floor if floor[name] == number)
        for number in range(max(floor.values(), default=-1) + 1)
    ]


def print_map(package: str, graph: grimp.ImportGraph, *, rooms: bool, arrows_too: bool) -> bool:
    """Print one package; whether its imports have no circle."""
    modules = modules_of(package)
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    arrows = arrows_between(modules, graph, rooms=rooms)
    count = sum(map(len, arrows.values()))
    head = f"{package}: {len(modules)} modules, {sum(lines.values()):,} lines"
    unit = "rooms" if rooms else "modules"
    try:
        floors = floors_of(arrows)
    except CycleError as error:
        circle = " → ".join(error.args[1])
        print(f"{head}; {len(arrows)} {unit}, {count} arrows, a circle: {circle}")
        return False
    print(f"{head}; {len(arrows)} {unit} on {len(floors)} floors, {count} arrows, no circle")
    for number, names in reversed(list(enumerate(floors, 1))):
        shown = []
        for name in names:
            inside = [module for module in modules if module.startswith(f"{name}.")]
            size = f"({len(inside)})" if rooms and inside else ""
            shown.append(name.removeprefix(f"{package}.") + size)
        print(f"  {number:>2}  {'  '.join(shown)}")
    if arrows_too:
        for name, below in sorted(arrows.items()):
            short = ", ".join(sorted(other.removeprefix(f"{package}.") for other in below))
            print(f"      {name.removeprefix(f'{package}.')} → {short or '—'}")
    print()
    return True


def upward(graph: grimp.ImportGraph) -> list[str]:
    """Imports of one package by another that is not above it."""
    package_of = {module: package for package in FOLDERS for module in modules_of(package)}
    return [
        f"{module} → {imported}"
        for module, package in package_of.items()
        for imported in sorted(graph.find_modules_directly_imported_by(module))
        if package_of.get(imported, package) not in (package, "trajstore")
    ]


def main() -> int:
    """Print every package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", action="store_true", help="every module is a room")
    parser.add_argument("--arrows", action="store_true", help="list who imports whom")
    chosen = parser.parse_args()
    graph = grimp.build_graph("trajstore", cache_dir=None)
    sound = [
        print_map(package, graph, rooms=not chosen.modules, arrows_too=chosen.arrows)
        for package in FOLDERS
    ]
    arrows = upward(graph)
    print("\n".join(arrows) or "No import leads from a package to one above or beside it.")
    return int(bool(arrows) or not all(sound))


if __name__ == "__main__":
    sys.exit(main())
