"""Kill commands that write, at random times, while four readers look on; then count what was lost.

`make soak`; the minutes are TRAJSTORE_MINUTES (by default 5).
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
    """Open the runs again and again; every value that is seen must be what was written."""
    import numpy as np

    from trajstore import TrajstoreError, open_run

    looks = wrong = gone = 0
    until = folder.with_name("stop")
    while not until.exists():
        for name in ("run.zarr", "new.zarr", "other.zarr"):
            try:
                values = open_run(folder / name, chunks=None).W.values[:, 0, 0]
                wrong += bool((values != np.arange(len(values)) % 128).any())
                looks += 1
            except (TrajstoreError, OSError):
                gone += 1  # not there yet, or replaced by a shorter one meanwhile
    print(f"{looks} {wrong} {gone}")


def main() -> int:
    """Kill, and print a table."""
    minutes = float(os.environ.get("TRAJSTORE_MINUTES", "5"))
    chance = random.Random()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    base, folder = root / "base", root / "work"
    forked_trials.prepare(base)
    forked_trials.fresh(base, folder)
    readers = [
        forked_trials.forked(
            lambda: _read_on(folder), folder, lambda: None, said=f"reader-{number}"
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
        time.sleep(chance.uniform(0, LONGEST))  # any moment of its life may be its last
        killed = os.waitpid(child, os.WNOHANG)[0] == 0
        if killed:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        row["tries"] += 1
        row["killed"] += killed
        row["left"] += bool(forked_trials.leftovers_of(folder))
        # The same command again, to its end, removes what the killed one has left.
        again = forked_trials.forked(_repeated(name), folder, lambda: None)
        code = os.waitstatus_to_exitcode(os.waitpid(again, 0)[1])
        said = folder.with_name("said").read_text()
        wrong = {
            "tracebacks": ["Traceback" in said],
            "failed": [f"{code}: {said.strip()[-300:]}"] if code else [],
            "leftovers": forked_trials.leftovers_of(folder),
            "lost": forked_trials.apart(lambda: forked_trials.faults_of(folder), folder),
        }
        for what, found in wrong.items():
            if any(found):
                row[what] += 1
                examples.append(f"{name}: {what}: {found}")
        if wrong["leftovers"] or chance.random() < 1 / 20:
            _begin_anew(base, folder)
    folder.with_name("stop").touch()
    for reader in readers:
        os.waitpid(reader, 0)
    columns = ("tries", "killed", "left", "tracebacks", "failed", "leftovers", "lost")
    print(f"{'command':20}", *(f"{name:>10}" for name in columns))
    for name, row in table.items():
        print(f"{name:20}", *(f"{row[column]:>10}" for column in columns))
    for number in range(READERS):
        said = root / f"reader-{number}"
        looks, wrong_looks, gone = said.read_text().split()[-3:]
        print(f"reader {number}: {looks} looks, {wrong_looks} of them wrong, {gone} refused")
        examples += [f"reader {number} saw other values"] if wrong_looks != "0" else []
    print(*examples[:20], sep="\n")
    return 1 if examples else 0


def _repeated(name: str) -> Callable[[], None]:
    if name == "create":
        return lambda: forked_trials.create("new.zarr", overwrite=True)
    return forked_trials.WRITING[name]


def _begin_anew(base: Path, folder: Path) -> None:
    """Put the runs back to what they were, in place of the others, while the readers look on."""
    import shutil

    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(base, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
