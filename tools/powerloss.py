"""Simulate a loss of power after each system call of every command that writes; count the losses.

`make powerloss`, or: python tools/powerloss.py [COMMAND …]. Linux, with a C compiler.

Each command runs once, on tiny inputs, in its own process. The shim `powerloss.c` records the calls
that change the folder. `disk_states.py` builds the states of the disk that a loss of power may
leave after each call; its docstring has the rules. `powerloss_trials.py` has the commands.

Promises that each state must keep:

- A run that gets rows has all rows whose commit was acknowledged: the call that commits had
  returned, or the command had ended. The run opens, its bits are those of the whole run, and
  `verify` finds no problem. A run that is cut or overwritten is the old or the new one.
- `repair` keeps these rows. `RunWriter.resume` appends the missing rows of the whole run, and
  `record --resume` trains those of a training run. Both end with the bits of the whole run.
- An output that is made or replaced as a whole is the old or the new one, byte for byte; after the
  end of the command it is the new one. The command runs again without error or leftovers. `repair`
  works in place: once the old is gone, the run opens with the rows and bits of the new one.
  A file that a command replaces several times is one of these versions until the command ends.
- Inputs do not change.

A run that was not flushed before the command has no promise until the command commits or ends.
`record --resume` and the second run of a command are tried in at most --most states of each
command, evenly spaced; all other checks run in each state. With --no-fsync, at most SAMPLE states
of each command are counted, evenly spaced, for comparison. --states sets another number for both.

Columns: states; states after an acknowledgement; rows lost (1 for an output without rows), summed
over all states; states that cannot be opened, that have wrong values, and that are unsound, at once
or after a resume or a repair.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import powerloss_trials as trials
from disk_states import UNREAD, Disk, Tree, calls_of, digest_of, tree_of

PROCESSES = 2
SAMPLE = 150
COLUMNS = ("states", "promised", "rows lost", "unreadable", "wrong", "unsound")


@dataclass
class Recorded:
    """A command that has run, and the states that it may leave."""

    name: str
    fsync: bool
    before: Path
    after: Path
    states: dict[tuple[bytes, Any], Tree] = field(default_factory=dict)
    versions: set[tuple[str, bytes]] = field(default_factory=set)

    @property
    def trial(self) -> trials.Trial:
        """The command."""
        return trials.TRIALS[self.name]

    def outputs(self, patterns: tuple[str, ...]) -> list[str]:
        """Paths of the outputs that match."""
        found = (str(path.relative_to(self.after)) for path in self.after.rglob("*"))
        return sorted(path for path in found if any(fnmatch(path, each) for each in patterns))


def main() -> int:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="by default all")
    parser.add_argument("--most", type=int, default=40, help="states from which commands run again")
    parser.add_argument("--no-fsync", action="store_true", help="also without flushes")
    parser.add_argument("--states", type=int, help="states to check, evenly spaced; by default all")
    parser.add_argument("--carry-out", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.carry_out:
        _carry_out(*arguments.carry_out)
        return 0
    names = arguments.commands or list(trials.TRIALS)
    for name in names:
        if name not in trials.TRIALS:
            parser.error(f"no command {name!r}; choose from {', '.join(trials.TRIALS)}")
    wrong = 0
    root = Path(tempfile.mkdtemp(prefix="powerloss-"))
    memory = tempfile.mkdtemp(
        prefix="powerloss-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    )
    try:
        shim = root / "powerloss.so"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl", "-pthread"], check=True
        )
        trials.prepare(
            root / "base", {each for name in names for each in trials.TRIALS[name].needs}
        )
        print(f"{'command':40}", *(f"{column:>10}" for column in COLUMNS), flush=True)
        with ProcessPoolExecutor(
            PROCESSES, multiprocessing.get_context("spawn"), _begin, (memory,)
        ) as pool:
            for name in names:
                for fsync in (True, False) if arguments.no_fsync else (True,):
                    if not (fsync or trials.TRIALS[name].has_option):
                        continue
                    recorded = _record(root, shim, name, fsync=fsync)
                    most = arguments.states or (len(recorded.states) if fsync else SAMPLE)
                    every = -(-len(recorded.states) // most)
                    recorded.states = dict(list(recorded.states.items())[::every])
                    counts, examples = _judged(pool, recorded, arguments.most)
                    title = name if fsync else f"{name} --no-fsync"
                    print(f"{title:40}", *(f"{counts[each]:>10}" for each in COLUMNS), flush=True)
                    if fsync:
                        wrong += len(examples)
                        for example in examples[:5]:
                            print("   ", example, flush=True)
    finally:
        shutil.rmtree(root)
        shutil.rmtree(memory)
    return 1 if wrong else 0


def _carry_out(name: str, folder: str, fsync: str) -> None:
    """Run a command in the process whose calls are recorded."""
    note = ctypes.CDLL(None).powerloss_note
    trials.carry_out(name, Path(folder), lambda text: note(text.encode()), fsync=fsync == "True")


def _record(root: Path, shim: Path, name: str, *, fsync: bool) -> Recorded:
    """Run a command, and build the states."""
    trial = trials.TRIALS[name]
    place = Path(tempfile.mkdtemp(dir=root))
    recorded = Recorded(name, fsync, place / "before", place / "after")
    recorded.before.mkdir()
    for entry in trial.needs:
        if (source := root / "base" / entry).is_dir():
            shutil.copytree(source, recorded.before / entry)
        elif source.is_file():
            shutil.copyfile(source, recorded.before / entry)
    shutil.copytree(recorded.before, recorded.after)
    log = place / "log"
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "POWERLOSS_FOLDER": str(recorded.after),
        "POWERLOSS_LOG": str(log),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--carry-out", name, str(recorded.after), str(fsync)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} has failed:\n{done.stdout}{done.stderr}")
    disk = Disk(tree_of(recorded.before), unflushed=trial.unflushed)
    promise: dict[str, int] = {}
    calls = calls_of(log, recorded.after)
    for call in calls:
        disk.carry_out(call)
        if call.name == "note":
            path, _, rows = call.path.partition("\t")
            if not UNREAD.fullmatch(path.partition("/")[0]):  # that is not yet in its place
                promise[path] = int(rows or 0)
        if call.name == "rename" and any(fnmatch(call.other, each) for each in trial.replaces):
            data = disk.tree()[call.other]
            if data is not None:
                recorded.versions.add((call.other, data))
        promised = tuple(sorted(promise.items()))
        for digest, tree in disk.states():
            if (digest, promised) not in recorded.states:
                recorded.states[digest, promised] = tree()
    if disk.tree() != tree_of(recorded.after):
        raise SystemExit(f"{name} has changed its folder by calls that were not written down")
    return recorded


def _judged(
    pool: ProcessPoolExecutor, recorded: Recorded, most: int
) -> tuple[Counter[str], list[str]]:
    """Count the broken promises of all states, with examples."""
    trial = recorded.trial
    before = tree_of(recorded.before)
    growing, replaced = recorded.outputs(trial.grows), recorded.outputs(trial.replaces)
    looks = _looks(pool, recorded, growing + replaced * trial.in_place, most)
    agains = {} if trial.grows else _agains(pool, recorded, replaced, most)
    counts: Counter[str] = Counter()
    examples: list[str] = []
    for (digest, promised), tree in recorded.states.items():
        promise = dict(promised)
        counts["states"] += 1
        counts["promised"] += bool(promise)
        if trial.unflushed and not promise:
            continue
        found: list[tuple[str, int, str]] = []
        for path in growing:
            part = _of_run(tree, path)
            look = looks[path, _digest(part)].result() if path in tree else None
            found += _grown(recorded, path, look, promise)
        for path in replaced:
            one = _replaced(recorded, path, tree, ended="end" in promise)
            if trial.in_place and one and one[0][0] == "wrong":
                one = _grown(recorded, path, looks[path, _digest(_of_run(tree, path))].result(), {})
            found += one
        if digest in agains and (message := agains[digest].result()):
            found.append(("unsound", 1, f"once more: {message}"))
        if not trial.unflushed:
            changed = [
                path
                for path in before
                if tree.get(path, b"gone") != before[path]
                and not any(_belongs(path, output) for output in growing + replaced)
            ]
            if changed:
                found.append(("wrong", 1, f"{changed[0]} is not as it was"))
        for column in {column for column, _, _ in found}:
            numbers = [number for each, number, _ in found if each == column]
            counts[column] += sum(numbers) if column == "rows lost" else 1
        examples += [f"{column}: {text}; promised {promise}" for column, _, text in found]
    return counts, list(dict.fromkeys(examples))


def _looks(
    pool: ProcessPoolExecutor, recorded: Recorded, growing: list[str], most: int
) -> dict[tuple[str, bytes], Future[dict[str, Any]]]:
    """Check each run that gets rows, in each state."""
    trial = recorded.trial
    found: dict[tuple[str, bytes], Tree] = {}
    for (_, promised), tree in recorded.states.items():
        if trial.unflushed and not promised:
            continue
        for path in growing:
            if path in tree:
                part = _of_run(tree, path)
                found.setdefault((path, _digest(part)), part)
    every = max(1, -(-len(found) // most))
    return {
        (path, digest): pool.submit(
            trials.inspect, recorded.name, path, part, recorded.before, recorded.after,
            trained=bool(trial.trains) and number % every == 0,
        )
        for number, ((path, digest), part) in enumerate(found.items())
    }  # fmt: skip


def _agains(
    pool: ProcessPoolExecutor, recorded: Recorded, replaced: list[str], most: int
) -> dict[bytes, Future[str | None]]:
    """Run the command again, in some states."""
    if recorded.trial.unflushed:
        return {}
    states = {digest: tree for (digest, _), tree in recorded.states.items()}
    every = max(1, -(-len(states) // most))
    return {
        digest: pool.submit(trials.again, recorded.name, replaced[0], tree, recorded.after)
        for digest, tree in list(states.items())[::every]
    }


def _grown(
    recorded: Recorded, path: str, look: dict[str, Any] | None, promise: dict[str, int]
) -> list[tuple[str, int, str]]:
    """Broken promises of a run that gets rows: columns, numbers, sentences."""
    trial = recorded.trial
    was_there = (recorded.before / path).exists() and not trial.unflushed
    rows = trials.rows_of(recorded.before / path) if was_there else 0
    if trial.may_cut_to is not None:
        rows = min(rows, trial.may_cut_to)
    begun = path in promise or "end" in promise
    rows = promise.get(path, rows)
    if "end" in promise:
        rows = trials.rows_of(recorded.after / path)
    if look is None:
        gone = was_there or begun
        return [("unreadable", 1, f"no {path}"), ("rows lost", rows, "all")] if gone else []
    if "unreadable" in look:
        lost = ("rows lost", rows, "all")
        return [("unreadable", 1, look["unreadable"]), *([lost] if rows else [])]
    found = []
    if look["version"] is None:
        found.append(("wrong", 1, f"{path} has other values"))
    missing = rows if begun and look["version"] == "old" else rows - look["rows"]
    if missing > 0:
        found.append(("rows lost", missing, f"{path} has {look['rows']} rows"))
    for kind in ("unsound", "repair", "resume", "train"):
        if kind in look:
            found.append(("unsound", 1, f"{kind}: {look[kind]}"))
    return found


def _replaced(
    recorded: Recorded, path: str, tree: Tree, *, ended: bool
) -> list[tuple[str, int, str]]:
    """Broken promises of an output that is replaced as a whole: columns, numbers, sentences."""
    held = _part(tree, path)
    if held == _part(tree_of(recorded.after), path):
        return []
    lost = trials.rows_of(recorded.after / path) if trials.is_run(recorded.after / path) else 1
    if held == _part(tree_of(recorded.before), path):
        return [("rows lost", lost, f"{path} is the old one")] if ended else []
    if not held:
        return [("unreadable", 1, f"no {path}"), ("rows lost", lost, "all")]
    if not ended and (path, held.get(path)) in recorded.versions:
        return []
    return [("wrong", 1, f"{path} is neither the old nor the new")]


def _belongs(path: str, output: str) -> bool:
    """Return True for a path of an output, or of its checkpoints."""
    checkpoints = output.removesuffix(".zarr") + ".ckpt"
    return any(path == each or path.startswith(each + "/") for each in (output, checkpoints))


def _part(tree: Tree, path: str) -> Tree:
    """Return one output of a tree, without leftovers."""
    return {
        each: data
        for each, data in tree.items()
        if (each == path or each.startswith(path + "/"))
        and not UNREAD.fullmatch(each.rpartition("/")[2])
    }


def _of_run(tree: Tree, path: str) -> Tree:
    """Return a run of a tree, with its checkpoints and the leftovers of dead writers."""
    above, _, name = path.rpartition("/")
    start = f"{above}/" if above else ""
    found = {start.rstrip("/"): None} if above else {}
    for each, data in tree.items():
        leftover = each.startswith(f"{start}.{name}.")
        if leftover or _belongs(each, path):
            found[each] = data
    return found


def _digest(tree: Tree) -> bytes:
    """Digest of a tree without leftovers."""
    return digest_of(
        (path, b"" if data is None else hashlib.sha256(data).digest())
        for path, data in sorted(tree.items())
    )


def _begin(memory: str) -> None:
    """Prepare a checking process: temporary folders in memory, and no flushes, for speed."""
    os.environ["TMPDIR"] = memory
    tempfile.tempdir = None
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
