"""Print the import layers of the packages of each package: each package imports only lower layers.

A package is a folder of modules, or a module at the top of its package. ``--modules`` prints every
module instead. ``--arrows`` lists the imports. A cycle, or an import from a higher package, gives
exit code 1.
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
"""Folder of each package, the lowest first; the other two may only import the first one."""

Arrows = dict[str, set[str]]


def modules_of(package: str) -> dict[str, Path]:
    """Return the file of each module, except facades and the init files of packages."""
    root = Path(FOLDERS[package])
    return {
        ".".join((package, *path.relative_to(root).with_suffix("").parts)): path
        for path in sorted(root.rglob("*.py"))  # rglob follows no links
        if path.name != "__init__.py"
    }


def package_of(module: str) -> str:
    """Return the folder of a module; a module at the top of its package is its own package."""
    folder = module.rpartition(".")[0]
    return module if folder in FOLDERS else folder


def arrows_between(modules: dict[str, Path], graph: grimp.ImportGraph, *, packages: bool) -> Arrows:
    """Return the imports between packages or modules."""
    name = package_of if packages else str
    arrows: Arrows = {name(module): set() for module in modules}
    for module in modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if imported in modules and name(imported) != name(module):
                arrows[name(module)].add(name(imported))
    return arrows


def layers_of(arrows: Arrows) -> list[list[str]]:
    """Return the names by layer, the lowest first.

    Raises
    ------
    CycleError
        If there is a cycle.
    """
    layer: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        layer[name] = max((layer[below] + 1 for below in arrows[name]), default=0)
    return [
        sorted(name for name in layer if layer[name] == number)
        for number in range(max(layer.values(), default=-1) + 1)
    ]


def print_map(package: str, graph: grimp.ImportGraph, *, packages: bool, arrows_too: bool) -> bool:
    """Print one package; return True if its imports have no cycle."""
    modules = modules_of(package)
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    arrows = arrows_between(modules, graph, packages=packages)
    count = sum(map(len, arrows.values()))
    head = f"{package}: {len(modules)} modules, {sum(lines.values()):,} lines"
    unit = "packages" if packages else "modules"
    try:
        layers = layers_of(arrows)
    except CycleError as error:
        cycle = " → ".join(error.args[1])
        print(f"{head}; {len(arrows)} {unit}, {count} arrows, a cycle: {cycle}")
        return False
    print(f"{head}; {len(arrows)} {unit} on {len(layers)} layers, {count} arrows, no cycle")
    for number, names in reversed(list(enumerate(layers, 1))):
        shown = []
        for name in names:
            inside = [module for module in modules if module.startswith(f"{name}.")]
            size = f"({len(inside)})" if packages and inside else ""
            shown.append(name.removeprefix(f"{package}.") + size)
        print(f"  {number:>2}  {'  '.join(shown)}")
    if arrows_too:
        for name, below in sorted(arrows.items()):
            short = ", ".join(sorted(other.removeprefix(f"{package}.") for other in below))
            print(f"      {name.removeprefix(f'{package}.')} → {short or '—'}")
    print()
    return True


def upward(graph: grimp.ImportGraph) -> list[str]:
    """Return the imports from a package that is not lower."""
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
    parser.add_argument("--modules", action="store_true", help="print modules instead of packages")
    parser.add_argument("--arrows", action="store_true", help="list the imports of each package")
    chosen = parser.parse_args()
    graph = grimp.build_graph("trajstore", cache_dir=None)
    sound = [
        print_map(package, graph, packages=not chosen.modules, arrows_too=chosen.arrows)
        for package in FOLDERS
    ]
    arrows = upward(graph)
    print("\n".join(arrows) or "No package imports a higher package.")
    return int(bool(arrows) or not all(sound))


if __name__ == "__main__":
    sys.exit(main())
