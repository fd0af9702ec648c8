"""Kill writing commands at random times while four readers read; then count the lost rows.

`make soak`; TRAJSTORE_MINUTES is the duration (default: 5).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import forked_trials

READERS = 4
LONGEST = 1.5


def _read_on(folder: Path) -> None:
    """Open the runs repeatedly; every value must be the written one."""
    import numpy as np

    from trajstore import open_run
    from trajstore.errors import TrajstoreError

    looks = wrong = gone = 0
    until = folder.with_name("stop")
    while not until.exists():
        for name in ("run.zarr", "new.zarr", "other.zarr"):
            try:
                values = open_run(folder / name, chunks=None).W.values[:, 0, 0]
                wrong += bool((values != np.arange(len(values)) % 128).any())
                looks += 1
            except (TrajstoreError, OSError):
                gone += 1  # it does not exist yet, or was replaced by a shorter one
    print(f"{looks} {wrong} {gone}")


def main() -> int:
    """Kill commands, and print a table."""
    minutes = float(os.environ.get("TRAJSTORE_MINUTES", "5"))
    chance = random.Random()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    base, folder = root / "base", root / "work"
    forked_trials.prepare(base)
    forked_trials.fresh(base, folder)
    readers = [
        forked_trials.forked(
            lambda: _read_on(folder), folder, lambda: None, output=f"reader-{number}"
        )
        for number in range(READERS)
    ]
    table: dict[str, Counter[str]] = {name: Counter() for name in forked_trials.WRITING}
    examples: list[str] = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        name = chance.choice(list(forked_trials.WRITING))
        row = table[name]
        child = forked_trials.forked(forked_trials.WRITING[name], folder, lambda: None)
        time.sleep(chance.uniform(0, LONGEST))  # a random moment for the kill
        killed = os.waitpid(child, os.WNOHANG)[0] == 0
        if killed:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        row["tries"] += 1
        row["killed"] += killed
        row["left"] += bool(forked_trials.leftovers_of(folder))
        # The same command, run to its end, removes the leftovers of the killed one.
        again = forked_trials.forked(_repeated(name), folder, lambda: None)
        code = os.waitstatus_to_exitcode(os.waitpid(again, 0)[1])
        output = folder.with_name("output").read_text()
        wrong = {
            "tracebacks": ["Traceback" in output],
            "failed": [f"{code}: {output.strip()[-300:]}"] if code else [],
            "leftovers": forked_trials.leftovers_of(folder),
            "lost": forked_trials.in_fork(lambda: forked_trials.faults_of(folder), folder),
        }
        for what, found in wrong.items():
            if any(found):
                row[what] += 1
                examples.append(f"{name}: {what}: {found}")
        if wrong["leftovers"] or chance.random() < 1 / 20:
            _restore(base, folder)
    folder.with_name("stop").touch()
    for reader in readers:
        os.waitpid(reader, 0)
    columns = ("tries", "killed", "left", "tracebacks", "failed", "leftovers", "lost")
    print(f"{'command':20}", *(f"{name:>10}" for name in columns))
    for name, row in table.items():
        print(f"{name:20}", *(f"{row[column]:>10}" for column in columns))
    for number in range(READERS):
        output = root / f"reader-{number}"
        looks, wrong_looks, gone = output.read_text().split()[-3:]
        print(f"reader {number}: {looks} reads, {wrong_looks} of them wrong, {gone} refused")
        examples += [f"reader {number} read wrong values"] if wrong_looks != "0" else []
    print(*examples[:20], sep="\n")
    return 1 if examples else 0


def _repeated(name: str) -> Callable[[], None]:
    if name == "create":
        return lambda: forked_trials.create("new.zarr", overwrite=True)
    return forked_trials.WRITING[name]


def _restore(base: Path, folder: Path) -> None:
    """Replace the runs by the original ones while the readers read."""
    import shutil

    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(base, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
