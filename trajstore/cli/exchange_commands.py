"""Commands that write and read the files of others, and old formats: export, import, upgrade."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from trajstore.byte_sizes import EXCHANGE_MEMORY, format_bytes
from trajstore.cli.options import JSON, RUN, sentences
from trajstore.cli.progress import BytesProgress, stopped_by_signals
from trajstore.cli.tables import out, print_json, print_notes

__all__ = ["export", "import_", "upgrade"]


@click.command()
@RUN
@click.option(
    "--format",
    "format_name",
    help="safetensors, hdf5 or zarr; default: as the ending of the output says, or safetensors.",
)
@click.option(
    "--layout",
    default="native",
    show_default=True,
    help="native, or the notebook whose scripts are to read it: 14.1a, 15.1a, 1.12a, 1.12f.",
)
@click.option("-o", "--output", type=click.Path(), required=True, help="The file to write.")
@click.option(
    "--steps", metavar="STEPS", help="Step numbers: 0:200:10 (200 not included), 5,10,20:."
)
@click.option("--tokens", metavar="TOKENS", help="all, dead, live, ids such as 1,2,3, or a FILE.")
@click.option("--vars", "variables", metavar="W,grad,…", help="Variables; default: all.")
@click.option("--block-rows", type=int, help="Rows of a block of zarr; default: planned.")
@click.option("--encoding", default="portable", show_default=True, help="Of zarr.")
@click.option(
    "--memory",
    default=EXCHANGE_MEMORY,
    show_default=True,
    metavar="SIZE",
    help="For the buffer of zarr.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@JSON
@sentences
def export(run: str, format_name: str | None, output: str, as_json: bool, **options: Any) -> None:
    """Write a run, or part of it, for other programs. Memory stays flat, whatever the size.

    \b
    Example:
      trajstore export gatsby.zarr --format safetensors --layout 15.1a -o gatsby.safetensors
      trajstore export gatsby.zarr --format hdf5 --steps 0:1000:10 --tokens dead -o dead.h5
      trajstore export gatsby.zarr --format zarr --block-rows 64 -o portable.zarr
    """
    from trajstore.exchange.export_run import export as write

    endings = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
    format_name = format_name or endings.get(Path(output).suffix, "safetensors")
    with stopped_by_signals(), BytesProgress("exporting") as progress:
        done = write(run, output, format=format_name, on_progress=progress.show, **options)
    if as_json:
        print_json(dataclasses.asdict(done) | {"path": str(done.path)})
        return
    what = f"layout {done.layout}" if format_name == "safetensors" else format_name
    out.print(
        f"Wrote {done.path}: {format_bytes(done.bytes)}, {what}, {done.rows} rows, "
        f"{done.tokens} tokens."
    )
    print_notes(done.notes)


@click.command(name="import")
@click.argument("file", type=click.Path())
@click.option("-o", "--output", type=click.Path(), required=True, help="The run to make.")
@click.option("--layout", help="native, 14.1a, 15.1a, 1.12a, 1.12f, hdf5; default: recognised.")
@click.option(
    "--masks",
    type=click.Path(),
    help="A safetensors file with untrained_mask or untrained_indices, where FILE tells no dead "
    "tokens.",
)
@click.option("--encoding", help="Of the run; default: as it is recorded.")
@click.option("--block-rows", type=int, help="Rows of a block; default: planned from the memory.")
@click.option(
    "--memory",
    default=EXCHANGE_MEMORY,
    show_default=True,
    metavar="SIZE",
    help="For the buffer of the writer.",
)
@click.option("--overwrite", is_flag=True, help="Replace a run that is there.")
@JSON
@sentences
def import_(file: str, output: str, as_json: bool, **options: Any) -> None:
    """Make a run of a safetensors or HDF5 file.

    \b
    Example:
      trajstore import comprehensive_training_data.safetensors -o gatsby.zarr
      trajstore import wordybird.safetensors --masks fineweb_token_masks.safetensors -o w.zarr
    """
    from trajstore.exchange.import_file import import_file

    with stopped_by_signals(), BytesProgress("importing") as progress:
        done = import_file(file, output, on_progress=progress.show, **options)
    if as_json:
        print_json(dataclasses.asdict(done) | {"path": str(done.path)})
        return
    held = ", ".join(f"{name} ({dtype})" for name, dtype in done.variables.items())
    out.print(
        f"Imported {done.path}: {done.rows} rows, steps {done.first_step} to {done.last_step}, "
        f"{done.tokens} tokens, {held}; read as layout {done.layout}."
    )
    print_notes(done.notes)


@click.command()
@RUN
@click.option("-o", "--output", type=click.Path(), required=True, help="The run to make.")
@click.option(
    "--memory",
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="For a block of the run, and what encoding it takes.",
)
@click.option("--overwrite", is_flag=True, help="Replace a run, and checkpoints, that are there.")
@JSON
@sentences
def upgrade(run: str, output: str, as_json: bool, **options: Any) -> None:
    """Make a run of the present store format of one of format 1: the same rows, bit for bit.

    The old run stays as it is. It keeps being read; the new one is read faster by plain
    xr.open_zarr, and knows of each block where it belongs.

    \b
    Example:
      trajstore upgrade gatsby.zarr -o gatsby2.zarr
    """
    from trajstore.exchange.upgrade_run import upgrade as make

    with stopped_by_signals(), BytesProgress("upgrading") as progress:
        done = make(run, output, on_progress=progress.show, **options)
    if as_json:
        print_json(dataclasses.asdict(done) | {"path": str(done.path)})
        return
    out.print(
        f"Upgraded to {done.path}: format {done.to_format} of {done.from_format}, "
        f"{done.rows} rows, {format_bytes(done.bytes)}, {done.checkpoints} checkpoints, "
        f"{done.status}."
    )
    print_notes(done.notes)
