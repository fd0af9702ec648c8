"""The commands `export` and `import`, for files of other programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from trajstore.cli.command_options import ENCODING, JSON, RUNS, SELECT
from trajstore.cli.output import (
    BytesProgress,
    in_command,
    out,
    print_json,
    print_notes,
    print_table,
)
from trajstore.cli.stop_signals import StopRequest
from trajstore.defaults import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument
from trajstore.units import format_bytes

if TYPE_CHECKING:
    from trajstore.exchange.export import Format
    from trajstore.exchange.imported_run import TableLine


@click.command()
@RUNS
@click.option(
    "--format",
    "format_name",
    help="safetensors, hdf5, zarr (for any reader of Zarr v3) or run. Default: that of the layout "
    "or of the extension of the output, otherwise safetensors.",
)
@click.option(
    "--layout",
    default="native",
    show_default=True,
    help="native, a notebook whose scripts read the file (14.1a, 15.1a, thimble-7, ...), or a TOML "
    "file of a layout. `trajstore import` lists all names.",
)
@click.option("-o", "--output", type=click.Path(), required=True, help="File to write.")
@SELECT("step", "token")
@click.option(
    "--variables", "variables", metavar="W,grad,...", help="Variables to write; default: all."
)
@click.option("--block-rows", type=int, help="Rows per chunk (zarr) or per block (run).")
@ENCODING(help="Encoding of the run to write, delta or compact; default: that of RUN.")
@click.option(
    "--fill-damaged",
    is_flag=True,
    help="With --format run: write NaN in place of damaged values, and list them.",
)
@click.option(
    "--memory",
    default=EXCHANGE_MEMORY,
    show_default=True,
    metavar="SIZE",
    help="Memory of the row buffer, for zarr, run and compressed HDF5.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def export(
    runs: tuple[str, ...],
    format_name: Format | None,
    output: str,
    selected: dict[str, Any],
    **options: Any,
) -> None:
    """Export a run, or a part of it, for other programs. Memory does not grow with the run.

    The layouts flannel-3 and flannel-5 hold several runs in one file. The layout flannel-2 holds
    both matrices of an untied model: give the run of E, then that of W.

    \b
    Example:
      trajstore export gatsby.zarr --format safetensors --layout 15.1a -o gatsby.safetensors
      trajstore export gatsby.zarr --format hdf5 --select step=0:1000:10 -o tenth.h5
      trajstore export gatsby.zarr --select token=dead -o dead.safetensors
      trajstore export gatsby.zarr --layout thimble-7 -o thimble.h5
      trajstore export gatsby.zarr --layout mine.toml -o mine.safetensors
      trajstore export runs/*.zarr --layout flannel-5 -o runs.safetensors
      trajstore export gatsby.zarr --format zarr -o anywhere.zarr
      trajstore export gatsby.zarr --format run --block-rows 64 -o rechunked.zarr
      trajstore export gatsby.zarr --encoding compact -o small.zarr
      trajstore export damaged.zarr --format run --variables W,loss -o undamaged.zarr
      trajstore export damaged.zarr --format run --fill-damaged -o filled.zarr
    """
    from trajstore.exchange.export import export as write
    from trajstore.store.reading.run_info import run_paths

    if options["layout"] == "native" and options["encoding"] is None:
        format_name = format_name or _format_of(output)
    with StopRequest() as stop, BytesProgress("exporting", stop) as progress:
        done = write(
            run_paths(runs),
            output,
            format=format_name,
            on_progress=progress.show,
            **selected,
            **options,
        )
    what = f"layout {done.layout}"
    if done.layout == "native" and done.format != "safetensors":
        what = done.format
    out.print(
        f"Wrote {done.path}: {format_bytes(done.bytes)}, {what}, {done.rows} rows, "
        f"{done.tokens} tokens."
    )
    print_notes(done.notes)


def _format_of(output: str) -> Format:
    """Format for the extension of a file name."""
    from trajstore.exchange.export import ENDINGS

    suffix = Path(output).suffix.lower()
    if suffix and suffix not in ENDINGS:
        raise InvalidArgument(
            f"unknown extension {suffix} of {output}; use "
            f"{', '.join(ENDINGS)}, or --format safetensors, hdf5, zarr or run; for "
            "the weights of one step: trajstore checkout RUN --at STEP -o NAME.pt"
        )
    return ENDINGS.get(suffix, "safetensors")


@click.command(name="import")
@click.argument("file", type=click.Path(), required=False)
@click.option("-o", "--output", type=click.Path(), help="Run to create.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print how FILE would be imported, and its layout as TOML; write nothing.",
)
@click.option(
    "--map",
    metavar="KIND=NAME",
    multiple=True,
    help="Array to use for a variable, such as W=embedding_history; ignore=NAME skips an array. "
    "Repeatable.",
)
@click.option(
    "--bits",
    metavar="TYPE",
    multiple=True,
    help="Type of 16-bit values: bfloat16 or float16; for one variable W=bfloat16. Repeatable.",
)
@click.option(
    "--labels",
    metavar="steps=...",
    help="Steps of the rows: an array name, 0:2001:50, or 0,10,50.",
)
@click.option(
    "--first-row",
    type=int,
    metavar="0|1",
    help="Step of the first row if the file labels none; default: 0.",
)
@click.option(
    "--layout", help="Layout of FILE, such as native or hdf5, or a TOML file; default: by names."
)
@click.option(
    "--masks",
    type=click.Path(),
    help="File that labels dead tokens: masks, lists of ids, or token counts.",
)
@click.option(
    "--memory",
    default=EXCHANGE_MEMORY,
    show_default=True,
    metavar="SIZE",
    help="Memory of the row buffer, and for large compressed chunks of HDF5.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing run.")
@JSON
def import_(
    file: str | None, output: str | None, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Import a file as a run, or as several if it holds several. Without FILE, list the formats.

    FILE is safetensors, HDF5, .npz, .npy, a torch .pt file, or a folder with one file per step.

    \b
    Example:
      trajstore import
      trajstore import comprehensive_training_data.safetensors -o gatsby.zarr
      trajstore import wordybird.safetensors --masks fineweb_token_masks.safetensors -o w.zarr
      trajstore import mine.npz --dry-run --map W=weights_0 --labels steps=0:2001:50
      trajstore import mine.npz --layout mine.toml -o mine.zarr
    """
    if file is None:
        _print_importable(as_json=as_json)
        return
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, name in map(_assignment, options.pop("map")):
        kinds[kind] = (*kinds.get(kind, ()), name)
    labels = options.pop("labels")
    labelled = dict([_assignment(labels, "steps=0:2001:50")]) if labels else None
    overwrite = options.pop("overwrite")
    given = options | {"map": kinds, "labels": labelled, "bits": _bits(options["bits"])}
    if output is None and not dry_run:
        raise InvalidArgument("no output given; add -o NAME.zarr or --dry-run")
    from trajstore.exchange.import_file import import_file, preview_import

    if output is None or dry_run:
        done = preview_import(file, **given)
    else:
        with StopRequest() as stop, BytesProgress("importing", stop) as progress:
            given |= {"overwrite": overwrite, "on_progress": progress.show}
            done = import_file(file, output, **given)
    runs = (done, *done.others)
    if as_json:
        facts = [dataclasses.asdict(run) | {"others": []} for run in runs]
        print_json(facts[0] | {"others": facts[1:]})
        return
    _print_matches(done.table)
    for run in runs:
        what = f"Imported {run.path}" if run.path else f"Run {run.label}".rstrip()
        dead = "" if run.dead is None else f", {run.dead} of them dead"
        types = ", ".join(f"{name} ({dtype})" for name, dtype in run.variables.items())
        out.print(
            f"{what}: {run.rows} rows, steps {run.first_step} to {run.last_step}, {run.tokens} "
            f"tokens{dead}, {run.hidden} hidden, {types}; read as layout {run.layout}."
        )
        print_notes(run.notes)
    if done.toml and not done.path:
        out.print("Layout, to save as a file, to edit, and to pass as --layout FILE.toml:")
        out.print(done.toml)


def _assignment(text: str, example: str = "W=embedding_history") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InvalidArgument(f"got {text!r}, expected KIND=NAME, such as {example}")
    return name, value


def _bits(texts: tuple[str, ...]) -> dict[str, str]:
    """Type of 16-bit values by variable; ``*`` is the default."""
    types: dict[str, str] = {}
    for text in texts:
        name, type = _assignment(text) if "=" in text else ("*", text)
        if types.setdefault(name, type) != type:
            raise InvalidArgument(f"got --bits {types[name]} and {type} for one variable; give one")
    return types


def _print_matches(lines: Iterable[TableLine]) -> None:
    """Print how each array and number of a file is imported."""
    rows = [
        [
            line.name,
            line.dtype,
            "×".join(map(str, line.shape)) or "—",
            line.kind or Text("omitted", style="dim"),
            in_command(line.why),
        ]
        for line in lines
    ]
    columns = ("in the file", "type", "shape", "imported as", "reason")
    print_table("", columns, rows, words=range(5))


def _print_importable(*, as_json: bool) -> None:
    """Print what `import` can read: formats, variables with known names, and layouts."""
    from trajstore.exchange.layouts import EXPORT_LAYOUTS, MASKS
    from trajstore.exchange.usual_names import ARRAY_KINDS, SCALARS
    from trajstore.formats.open_file import FORMATS

    if as_json:
        kinds = {
            kind.name: {"names": list(kind.names), "dims": list(kind.dims), "values": kind.values}
            for kind in ARRAY_KINDS.values()
        }
        scalars = {
            scalar.name: {"names": list(scalar.names), "goes_to": ".".join(scalar.paths[0])}
            for scalar in SCALARS.values()
        }
        facts = {"formats": FORMATS, "kinds": kinds, "scalars": scalars}
        print_json(facts | {"layouts": list(EXPORT_LAYOUTS)})
        return
    out.print("Formats", style="bold")
    for name, what in FORMATS.items():
        out.print(f"  {name}: {what}")
    columns = ("variable", "dimensions", "known names")
    rows = [
        (
            kind.name,
            ", ".join(kind.dims),
            ", ".join(name for name in kind.names if name != "steps_of_the_names"),
        )
        for kind in ARRAY_KINDS.values()
    ]
    print_table("Arrays", columns, rows, words=range(3))
    out.print(
        "Names ignore case. They may have the prefix run_0_, dead_ or live_ (rows of some "
        "tokens), and the suffix _history, _bits, _E, _W or _U. Other names need --map KIND=NAME. "
        "uint16 values are read as bfloat16 bits."
    )
    rows = [
        (number.name, ", ".join(number.names), ".".join(number.paths[0]))
        for number in SCALARS.values()
    ]
    print_table("Numbers", ("name", "known names", "stored as"), rows, words=range(3))
    of_runs = [name for name in EXPORT_LAYOUTS if name not in MASKS]
    out.print(f"Layouts for export and import: {', '.join(of_runs)}")
    out.print(f"Layouts of masks, for export and --masks: {', '.join(MASKS)}")
