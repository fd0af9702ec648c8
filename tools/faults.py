"""Have the system refuse the n-th call of each kind to each command, and see what it leaves.

Linux, with a C compiler: `make faults`. The number of tries is TRAJSTORE_FAULTS (by default 600).
"""

from __future__ import annotations

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
    """Start again with the shim in front of the C library; where it has been, its path."""
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
    """Try, and print a table."""
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
        said = folder.with_name("said").read_text()
        row = table[name]
        row["tries"] += 1
        row["failed"] += code != 0
        wrong = {
            "tracebacks": ["Traceback" in said or "Exception ignored" in said],
            "silent": [code != 0 and not said.strip()],
            "leftovers": _avoidable(kind, folder, forked_trials.leftovers_of(folder)),
            "lost": forked_trials.apart(lambda: forked_trials.faults_of(folder), folder),
        }
        for what, found in wrong.items():
            if any(found):
                row[what] += 1
                shown = found if what != "tracebacks" else said.strip()[-300:]
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
    """What a command could have removed although all calls of a kind fail from some time on."""
    if kind in ("rename", "create"):
        return []
    # A folder cannot be emptied when none can be opened; the next command removes it.
    return [name for name in leftovers if not (kind == "open" and (folder / name).is_dir())]


if __name__ == "__main__":
    sys.exit(main())
