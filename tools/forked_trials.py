"""Commands that write, each in a forked process, and the conditions that must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from trajstore import RunWriter, open_run, verify
from trajstore.cli.main import main

ROWS = 10
VARIABLES = {"W": "bfloat16", "grad": "float32", "loss": "float32"}


def _row(step: int) -> dict[str, Any]:
    values = np.full((6, 4), step % 128, "f4")
    return {"step": step, "W": values, "grad": values, "loss": np.float32(step)}


def create(path: str, *, overwrite: bool = False, rows: int = ROWS) -> None:
    """Record a run, in blocks of 4 rows."""
    with RunWriter.create(
        path, token=np.arange(6), hidden=4, variables=VARIABLES, block_rows=4,
        overwrite=overwrite, commit_every=None,
    ) as run:  # fmt: skip
        for step in range(rows):
            run.append(**_row(step))


def resume() -> None:
    """Resume the run."""
    with RunWriter.resume("run.zarr", commit_every=None) as run:
        for step in range(run.rows, run.rows + 5):
            run.append(**_row(step))


def _command(*arguments: str) -> Callable[[], None]:
    return lambda: main([*arguments], prog_name="trajstore", standalone_mode=True)


WRITING: dict[str, Callable[[], None]] = {
    "create": lambda: create("new.zarr"),
    "overwrite": lambda: create("run.zarr", overwrite=True),
    "resume": resume,
    "export safetensors": _command("export", "run.zarr", "-o", "x.safetensors", "--overwrite"),
    "export hdf5": _command("export", "run.zarr", "-o", "x.h5", "--overwrite"),
    "export zarr": _command("export", "run.zarr", "-o", "x.zarr", "--overwrite"),
    "import": _command("import", "run.safetensors", "-o", "y.zarr", "--overwrite"),
    "annotate": _command("annotate", "run.zarr", "--masks", "dead_mask.npy", "--overwrite"),
    "repair": _command("repair", "cut.zarr"),
    "analyze": _command("analyze", "run.zarr", "speed", "-o", "z.zarr", "--overwrite"),
}

READING: dict[str, Callable[[], None]] = {
    "info": _command("info", "run.zarr"),
    "verify": _command("verify", "run.zarr"),
    "compare": _command("compare", "run.zarr", "other.zarr"),
}


def prepare(folder: Path) -> None:
    """Create the inputs of the commands."""
    folder.mkdir(parents=True)
    wrong = in_fork(lambda: _prepare(folder), folder)
    if wrong:
        raise RuntimeError(wrong[0])


def _prepare(folder: Path) -> list[str]:
    create(str(folder / "run.zarr"))
    create(str(folder / "other.zarr"))
    create(str(folder / "cut.zarr"))
    (folder / "cut.zarr" / "W" / "c.2.0.0").unlink()
    np.save(folder / "dead_mask.npy", np.arange(6) < 2)
    with contextlib.chdir(folder):
        from trajstore import export

        export("run.zarr", "run.safetensors")
    return []


def forked(
    work: Callable[[], None], folder: Path, before: Callable[[], None], *, output: str = "output"
) -> int:
    """Start a process that works in a folder; its output goes to a file next to the folder."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        file = os.open(folder.with_name(output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        before()
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except OSError as error:  # scripts get the errors of the library
        os.write(2, f"OSError: {error}\n".encode())
        code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def faults_of(folder: Path, *, lost: int = ROWS) -> list[str]:
    """Return the errors of the runs in a folder: missing or changed rows."""
    wrong = []
    for name in ("run.zarr", "other.zarr"):
        found = verify(folder / name)
        if not found.clean:
            wrong.append(f"{name}: {found.problems[0]}")
        elif found.rows < lost and name != "run.zarr":
            wrong.append(f"{name} has {found.rows} rows")
        else:
            values = open_run(folder / name, chunks=None).W.values[:, 0, 0]
            if (values != np.arange(len(values)) % 128).any():
                wrong.append(f"{name} has other values")
    for name in ("new.zarr", "y.zarr"):
        if (folder / name).exists() and not verify(folder / name).clean:
            wrong.append(f"{name} is damaged")
    exported = folder / "x.zarr"  # ordinary Zarr
    if exported.exists():
        values = xr.open_zarr(exported).W.values[:, 0, 0]
        if (values != np.arange(len(values)) % 128).any():
            wrong.append("x.zarr has other values")
    return wrong


def leftovers_of(folder: Path) -> list[str]:
    """Return the hidden files that remain."""
    return sorted(path.name for path in folder.rglob(".*"))


def in_fork(work: Callable[[], list[str]], folder: Path) -> list[str]:
    """Return the result of a function in a forked process, because threads end at a fork."""
    result = folder.with_name("result")

    def write() -> None:
        result.write_text(json.dumps(work()))

    child = forked(write, folder, lambda: None, output="checked")
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return [folder.with_name("checked").read_text().strip()[-300:]]
    found: list[str] = json.loads(result.read_text())
    return found


def fresh(source: Path, folder: Path) -> None:
    """Replace a folder by a fresh copy."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
