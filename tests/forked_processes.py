"""Processes that begin with what is slow to import; and the command line in one of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["processes", "run_command"]

_SECONDS = 300

processes = multiprocessing.get_context("forkserver")
# What is slow to import, where it is installed. No module of the tests: Python 3.11 does not tell
# the server where they are.
processes.set_forkserver_preload(
    [
        "xarray",
        "zarr",
        "h5py",
        "dask.array",
        "matplotlib.figure",
        "trajstore.analysis.figures",
        "trajstore.analysis.functions",
        "trajstore.analysis.results.write_results",
        "trajstore.cli.main",
        "trajstore.exchange.exporting.export",
        "trajstore.exchange.importing.import_file",
        "trajstore.integrity.repair",
        "trajstore.store.reading.open_runs",
        "trajstore.trainers.commands.record",
        "trajstore.trainers.runs.record",
        "transformers.models.gpt2.modeling_gpt2",
    ]
)


def run_command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What `trajstore` does with these arguments, in a folder; as if it had been started anew.

    Raises
    ------
    TimeoutError
        If it does not end.
    """
    written = [folder / f".{name}-{os.getpid()}" for name in ("stdout", "stderr")]
    process = processes.Process(target=_command, args=(arguments, folder, written))
    process.start()
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"trajstore {' '.join(arguments)} did not end in {_SECONDS} s")
    out, err = (path.read_text() for path in written)
    for path in written:
        path.unlink()
    return subprocess.CompletedProcess(["trajstore", *arguments], process.exitcode, out, err)


def _command(arguments: list[str], folder: Path, written: list[Path]) -> None:
    os.chdir(folder)
    for number, path in zip((1, 2), written, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["trajstore", *arguments]
    with (
        open(1, "w", closefd=False) as out,
        open(2, "w", buffering=1, closefd=False) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        from trajstore.cli.main import main

        main()
