"""What the commands about the files of others print: what was taken for what, what is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from trajstore.cli.tables import out, print_json, print_table, table

if TYPE_CHECKING:
    from trajstore.exchange.guessing.array_roles import Taken

__all__ = ["print_taken", "print_understood"]


def print_taken(lines: Iterable[Taken]) -> None:
    """Print what each array and number of a file was taken for."""
    printed = table("", "in the file", "type", "shape", "taken as", "")
    for column in printed.columns[1:]:
        column.justify = "left"
    for line in lines:
        shape = "×".join(map(str, line.shape)) or "—"
        taken = Text(line.role) if line.role else Text("left out", style="dim")
        printed.add_row(Text(line.name), line.dtype, shape, taken, Text(line.why))
    print_table(printed)


def print_understood(*, as_json: bool) -> None:
    """Print what an import understands: formats, roles with the names in use, and layouts."""
    from trajstore.exchange.guessing.role_table import ROLES, SCALARS
    from trajstore.exchange.layouts import EXPORT_LAYOUTS
    from trajstore.formats.open_file import FORMATS

    if as_json:
        roles = {
            role.name: {"names": list(role.names), "dims": list(role.dims), "kind": role.kind}
            for role in ROLES.values()
        }
        scalars = {
            scalar.name: {"names": list(scalar.names), "goes_to": ".".join(scalar.paths[0])}
            for scalar in SCALARS.values()
        }
        facts = {"formats": FORMATS, "roles": roles, "scalars": scalars}
        print_json(facts | {"layouts": list(EXPORT_LAYOUTS)})
        return
    out.print("Read are", style="bold")
    for name, what in FORMATS.items():
        out.print(Text(f"  {name}: {what}"))
    printed = table("Arrays", "taken as", "dimensions", "names in use")
    for role in ROLES.values():
        names = [name for name in role.names if name != "steps_of_the_names"]
        printed.add_row(role.name, ", ".join(role.dims), Text(", ".join(names)))
    for column in printed.columns[1:]:
        column.justify = "left"
    print_table(printed)
    out.print(
        Text(
            "Case does not matter; run_0_… before a name, and _history, _bits, _E, _W or _U behind "
            "it, and dead_… or live_… for the rows of some tokens, are understood. An array of "
            "(step, token, hidden) that is alone needs no name; uint16 are the bits of bfloat16."
        )
    )
    printed = table("Numbers", "name", "names in use", "goes to")
    for scalar in SCALARS.values():
        printed.add_row(scalar.name, ", ".join(scalar.names), ".".join(scalar.paths[0]))
    for column in printed.columns[1:]:
        column.justify = "left"
    print_table(printed)
    out.print(Text(f"Layouts, of exports and imports: {', '.join(EXPORT_LAYOUTS)}"))
