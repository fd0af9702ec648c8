"""Let the system refuse the n-th call of each kind to each command, and check what remains.

Linux, with a C compiler: `make faults`. TRAJSTORE_FAULTS is the number of tries (default: 600).
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

KINDS = {
    "write": (errno.EIO, errno.ENOSPC),
    "read": (errno.EIO,),
    "open": (errno.EIO, errno.EMFILE),
    "create": (errno.ENOSPC, errno.EMFILE, errno.EROFS),
    "rename": (errno.EIO, errno.ENOSPC),
    "mkdir": (errno.EROFS, errno.ENOSPC),
}
DEEPEST = 60


def preloaded() -> Path:
    """Restart with the shim in front of the C library; after the restart, return its path."""
    shim = os.environ.get("TRAJSTORE_SHIM")
    if shim:
        return Path(shim)
    folder = tempfile.mkdtemp(prefix="faults-")
    shim = os.path.join(folder, "faults.so")
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    os.environ |= {"LD_PRELOAD": shim, "TRAJSTORE_SHIM": shim}
    os.execv(sys.executable, [sys.executable, *sys.argv])
    raise AssertionError("execv does not return")


def main() -> int:
    """Run all tries, and print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    shim = ctypes.CDLL(str(preloaded()))
    import forked_trials

    tries = int(os.environ.get("TRAJSTORE_FAULTS", "600"))
    chance = random.Random(0)
    commands = forked_trials.WRITING | forked_trials.READING
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    base, folder = root / "base", root / "work"
    forked_trials.prepare(base)
    table: dict[str, Counter[str]] = {name: Counter() for name in commands}
    examples: list[str] = []
    for at in range(tries):
        name = list(commands)[at % len(commands)]
        kind = chance.choice(list(KINDS))
        number = chance.choice(KINDS[kind])
        call = chance.randint(1, DEEPEST)
        forked_trials.fresh(base, folder)

        def arm(kind: str = kind, number: int = number, call: int = call) -> None:
            shim.faults_arm(kind.encode(), str(folder).encode(), number, call)

        child = forked_trials.forked(commands[name], folder, arm)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output = folder.with_name("output").read_text()
        row = table[name]
        row["tries"] += 1
        row["failed"] += code != 0
        wrong = {
            "tracebacks": ["Traceback" in output or "Exception ignored" in output],
            "silent": [code != 0 and not output.strip()],
            "leftovers": _avoidable(kind, folder, forked_trials.leftovers_of(folder)),
            "lost": forked_trials.in_fork(lambda: forked_trials.faults_of(folder), folder),
        }
        for what, found in wrong.items():
            if any(found):
                row[what] += 1
                shown = found if what != "tracebacks" else output.strip()[-300:]
                examples.append(
                    f"{name}, {errno.errorcode[number]} of {kind} {call}: {what}: {shown}"
                )
    columns = ("tries", "failed", "tracebacks", "silent", "leftovers", "lost")
    print(f"{'command':20}", *(f"{name:>10}" for name in columns))
    for name, row in table.items():
        print(f"{name:20}", *(f"{row[column]:>10}" for column in columns))
    print(*examples[:20], sep="\n")
    return 1 if examples else 0


def _avoidable(kind: str, folder: Path, leftovers: list[str]) -> list[str]:
    """Return the leftovers that a command could remove while all calls of a kind fail."""
    if kind in ("rename", "create"):
        return []
    # A folder cannot be emptied if none can be opened; the next command removes it.
    return [name for name in leftovers if not (kind == "open" and (folder / name).is_dir())]


if __name__ == "__main__":
    sys.exit(main())
