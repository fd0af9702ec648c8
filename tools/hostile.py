"""Run commands on malicious inputs: measure the time and memory, and check the messages.

`make hostile`; Linux.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import forked_trials
from hostile_inputs import FILES, STORES

from trajstore.cli.main import main as command

MOST_SECONDS = 10
MOST_MEMORY = 300 << 20
TIMEOUT = 60

ON_STORES = (
    ("info", "run.zarr"),
    ("verify", "run.zarr"),
    ("repair", "run.zarr"),
    ("summary", "run.zarr"),
    ("export", "run.zarr", "-o", "y.safetensors"),
)
ON_TEXTS = (
    ("info", "run.zarr"),
    ("summary", "run.zarr"),
    ("analyze", "run.zarr", "freeze"),
    ("report", "run.zarr", "-o", "page.html"),
    ("compare", "run.zarr", "run.zarr"),
)
NEVER_PRINTED = ("\x1b[31m", "\x1b[2J", "\u202e", "\x07")


def main() -> int:
    """Run all tries, and print a table."""
    for module in ("h5py", "xarray", "dask.array", "zarr", "trajstore.analysis.figures",
                   "trajstore.analysis.accessor", "trajstore.exchange.import_file",
                   "trajstore.exchange.export"):  # fmt: skip
        __import__(module)  # so that imports do not count as memory of the command
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    harm = []
    print(f"{'input':34}{'command':10}{'seconds':>8}{'of CPU':>8}{'MB':>6}  message")
    for name, make in STORES.items():
        if wanted not in name:
            continue
        for arguments in ON_TEXTS if name == "texts with escapes" else ON_STORES:
            harm += _row(root, name, make, arguments)
    for name, make in FILES.items():
        if wanted in name:
            harm += _row(root, name, make, ("import", "x", "-o", "y.zarr"))
    shutil.rmtree(root)
    print(*harm, sep="\n")
    return 1 if harm else 0


def _row(
    root: Path, name: str, make: Callable[[Path], None], arguments: tuple[str, ...]
) -> list[str]:
    """Run a command, print a row of the table, and return the harm done."""
    folder = root / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    forked_trials.in_fork(lambda: _made(make, folder), folder)
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = forked_trials.forked(lambda: _measured(arguments, folder), folder, _reset_peak)
    code = _ended(child, begun + TIMEOUT)
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    output = folder.with_name("output").read_text(errors="surrogateescape")
    memory = int(folder.with_name("peak").read_text()) if code != -signal.SIGKILL else 0
    lines = [line.strip() for line in output.replace(f"{folder}/", "").splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("trajstore:")), (lines or ["…"])[-1])
    print(f"{name:34}{arguments[0]:10}{seconds:8.1f}{processor:8.1f}{memory / 1e6:6.0f}  {message}",
          flush=True)  # fmt: skip
    wrong = {
        f"took {processor:.1f} s": processor > MOST_SECONDS,
        f"took {memory >> 20} MiB": memory > MOST_MEMORY,
        "was killed": code == -signal.SIGKILL,
        "has a traceback": "Traceback" in output or code == 70,
        "printed nothing": not lines,
        "printed terminal escapes": any(text in output for text in NEVER_PRINTED),
        "changed files of others": _is_touched(folder),
    }
    return [f"{name}, {arguments[0]}: {what}" for what, is_so in wrong.items() if is_so]


def _ended(child: int, end: float) -> int:
    """Return the exit code of a process, which is killed after a time limit."""
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.02)  # waitpid has no time limit


def _made(make: Callable[[Path], None], folder: Path) -> list[str]:
    make(folder)
    return []


def _measured(arguments: tuple[str, ...], folder: Path) -> None:
    start = _memory("VmRSS")
    try:
        command([*arguments], prog_name="trajstore", standalone_mode=True)
    finally:
        folder.with_name("peak").write_text(str(_memory("VmHWM") - start))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(of: str) -> int:
    """Return the memory of this process in bytes: now (VmRSS), or the maximum (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{of}:")[2].split()[0]) << 10


def _is_touched(folder: Path) -> bool:
    elsewhere = folder / "elsewhere"
    names = ("c.9.0.0", ".mine.1.partial")
    return elsewhere.exists() and not all((elsewhere / name).exists() for name in names)


if __name__ == "__main__":
    sys.exit(main())
