"""One command after the other on runs with damaged metadata files, in a process of its own.

``python tests/metadata_fuzz.py COMMAND TRIES [FIRST]`` prints what came of it as JSON: tries,
errors by class, raw exceptions, hangs, and the peak of the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from golden_runs import unpack
from metadata_damage import damage_metadata

from trajstore import RunWriter, open_run, repair, verify
from trajstore.cli.main import main as command
from trajstore.errors import TrajstoreError
from trajstore.store.writing.create import annotate_run

MOST_SECONDS = 10
MOST_SPACE = 3 << 30
"""Bytes of addresses that a try may take; each thread takes many and uses few."""

RUNS = ("delta.zarr", "parts.zarr")


class Hang(BaseException):
    """A try has taken too long."""


def _opened(run: Path) -> None:
    ds = open_run(run)
    assert ds.sizes["step"] == len(ds["step"])
    ds.isel(step=slice(-1, None)).load()


def _resumed(run: Path) -> None:
    with RunWriter.resume(run, commit_every=None) as writer:
        rows = writer.rows
    assert rows == open_run(run, chunks=None).sizes["step"]
    # Own metadata files that say other things than the root are replaced with the next row only.
    lost = [problem for problem in verify(run).problems if problem.remedy == "cut"]
    assert not lost, f"resumed, and not sound: {lost[0]}"


def _annotated(run: Path) -> None:
    annotate_run(run, token_text=["v", "w", "x", "y"], overwrite=True)
    open_run(run, chunks=None).load()


def _repaired(run: Path) -> None:
    _command("repair", str(run))
    found = verify(run)
    if found.clean:
        open_run(run, chunks=None).load()
    else:
        # What the fingerprint finds it finds once all else is sound.
        assert repair(run, dry_run=True).unrepaired, f"repaired, and not sound: {found.problems[0]}"


def _command(*arguments: str) -> None:
    with contextlib.suppress(SystemExit):
        command(["--debug", *arguments], prog_name="trajstore", standalone_mode=False)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "open_run": _opened,
    "resume": _resumed,
    "verify": lambda run: _command("verify", str(run)),
    "repair": _repaired,
    "annotate": _annotated,
    "info": lambda run: _command("info", str(run)),
}


def fuzz(name: str, tries: int, first: int = 0) -> dict[str, Any]:
    """Try a command on so many damaged runs; what it came to."""
    run = Path(tempfile.mkdtemp(prefix="metadata files-")) / "run.zarr"
    classes: Counter[str] = Counter()
    raw: dict[str, str] = {}
    hangs = 0
    slowest = 0.0
    folder = unpack(run.parent)
    sound = {each: folder / each for each in RUNS}
    for place in sound.values():
        COMMANDS[name](_fresh(place, run))  # what is loaded is no memory of a try
    start = _memory("VmRSS")
    space = _memory("VmSize") + MOST_SPACE
    Path("/proc/self/clear_refs").write_text("5")
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
    for number in range(first, first + tries):
        rng = random.Random(f"{name} {number}")
        damage_metadata(_fresh(sound[RUNS[number % 2]], run), rng)
        begun = time.monotonic()
        try:
            with _limited():
                COMMANDS[name](run)
            classes["done"] += 1
        except TrajstoreError as error:
            classes[type(error).__name__] += 1
        except Hang:
            hangs += 1
            raw.setdefault(f"hang: {_where()}", f"{number}")
        except Exception as error:
            classes["raw"] += 1
            text = f"{type(error).__name__} at {_where()}: {str(error)[:200]}"
            raw.setdefault(text, f"{number}")
        slowest = max(slowest, time.monotonic() - begun)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = _memory("VmHWM") - start
    shutil.rmtree(run.parent)
    return {"command": name, "tries": tries, "classes": dict(classes), "hangs": hangs,
            "raw": raw, "peak": peak, "seconds": usage.ru_utime + usage.ru_stime,
            "slowest": slowest}  # fmt: skip


def _where() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if "trajstore" in frame.filename] or list(frames)
    last = [own[-1], frames[-1]]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise Hang


def _fresh(sound: Path, run: Path) -> Path:
    """Copy of a run, whose shards are links: a writer replaces objects, and writes into none."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(sound, run, copy_function=os.link)
    for metadata in run.rglob("zarr.json"):
        data = metadata.read_bytes()
        metadata.unlink()
        metadata.write_bytes(data)
    return run


def _memory(of: str) -> int:
    """Bytes that this process has (VmRSS, VmSize), or had at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{of}:")[2].split()[0]) << 10


def main() -> None:
    """Try, and print what it came to."""
    signal.signal(signal.SIGALRM, _too_long)
    os.fsync = lambda descriptor: None  # no try loses its power
    result = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2) if "-v" not in sys.argv else None
    found = fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    os.write(result, json.dumps(found, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
