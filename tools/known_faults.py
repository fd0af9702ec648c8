"""Put known faults into the code, one at a time, and see which test finds each.

``python tools/known_faults.py [--only TEXT] [--tests FOLDER…] [--jobs N] [--limit SECONDS]``

``known_faults.toml`` lists the faults. The name of a fault says what goes wrong; `right` is text
that its file holds once, and `wrong` takes its place. The `source` is ``changelog`` if the fault
undoes what an entry says, ``test`` if it breaks what the name of a test says, and ``drawn`` if
cosmic-ray drew it at random.

The faults go into copies of the committed tree in a temporary folder; the checkout stays as it is.
Tests run until one fails: those in the file of the same name, then those in files that import the
module, the others of the same folder of ``tests/unit/`` or, if there is none, of that above it;
``integration/``, ``property/`` and ``loops/``; then all others, the nightly ones last. A test that
takes longer than the limit has found the fault. At the end, the tests that have failed run without
a fault: one that fails again has found none.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
LONGEST = 3600
"""Seconds of one run of pytest; one that takes longer, perhaps at its exit, has found the fault."""

Fault = dict[str, str]


def main() -> None:
    """Try the faults, print a line for each and the sum; exit with 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="text in the name or file of a fault")
    parser.add_argument("--tests", nargs="+", default=[], metavar="FOLDER", help="only these tests")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument("--limit", type=int, default=300, help="seconds of a test")
    options = parser.parse_args()
    listed: list[Fault] = tomllib.loads(LIST.read_text())["fault"]
    faults = [fault for fault in listed if options.only in fault["name"] + fault["file"]]
    if not faults:
        sys.exit(f"--only: no name or file of a fault holds {options.only!r}; see {LIST.name}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = [_copy(Path(folder, str(number))) for number in range(options.jobs)]
        for fault in faults:
            _text_with(fault, copies[0])
        if problem := _failures(["--collect-only", "-m", ""], copies[0], options.limit):
            sys.exit(f"without a fault the tests cannot be collected:\n{problem[0]}")
        free: queue.Queue[Path] = queue.Queue()
        for copy in copies:
            free.put(copy)

        def tried(fault: Fault) -> str:
            copy = free.get()
            try:
                return _tried(fault, copy, options.tests, options.limit)
            finally:
                free.put(copy)

        found = []
        for fault, test in zip(faults, pool.map(tried, faults), strict=True):
            print(_line(fault, test or "NOT FOUND"), flush=True)
            found.append(test)
        broken = _failing({test for test in found if "::" in test}, copies[0], options.limit)
    for fault, test in zip(faults, found, strict=True):
        if test in broken:
            print(_line(fault, f"NOT FOUND: without the fault, this fails, too: {test}"))
    number = sum(bool(test) and test not in broken for test in found)
    print(f"{number} of {len(faults)} faults found")
    sys.exit(number < len(faults))


def _line(fault: Fault, result: str) -> str:
    return f"{fault['source']:9} {fault['file']}: {fault['name']}: {result}"


def _copy(folder: Path) -> Path:
    """Write the committed tree into a folder."""
    folder.mkdir()
    tree = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=tree.stdout, check=True)
    return folder


def _text_with(fault: Fault, copy: Path) -> str:
    """The text of a file with its fault; an error if the right text is not there once."""
    file = copy / fault["file"]
    text = file.read_text() if file.exists() else ""
    if (count := text.count(fault["right"])) != 1:
        sys.exit(
            f"{fault['file']}: expected the right text of {fault['name']!r} once, found it {count} "
            f"times; update {LIST.name}"
        )
    wrong = text.replace(fault["right"], fault["wrong"])
    compile(wrong, fault["file"], "exec")
    return wrong


def _tried(fault: Fault, copy: Path, folders: list[str], limit: int) -> str:
    """Name the first test that fails with a fault; empty if none does."""
    file = copy / fault["file"]
    text = file.read_text()
    try:
        file.write_text(_text_with(fault, copy))
        for stage in [[folder] for folder in folders] or _stages(fault["file"], copy):
            if found := next(iter(_failures(["-x", *stage], copy, limit)), ""):
                return found
    finally:
        file.write_text(text)
    return ""


def _stages(file: str, copy: Path) -> list[list[str]]:
    """Arguments of pytest, the tests nearest to a file first, none twice."""
    mirrored = next(at for at in Path("tests/unit", file).parents if (copy / at).is_dir())
    module = ".".join(Path("trajstore", file.removeprefix("trajstore/")).with_suffix("").parts)
    alike = re.compile(rf"test_{Path(file).stem}.*\.py")
    named, importing = [], []
    for test in sorted((copy / "tests").rglob("test_*.py")):
        if test.parent == copy / mirrored and alike.fullmatch(test.name):
            named.append(str(test.relative_to(copy)))
        elif re.search(rf"\b{re.escape(module)}\b", test.read_text()):
            importing.append(str(test.relative_to(copy)))
    others = ["tests/integration", "tests/property", "tests/loops"]
    stages: list[list[str]] = []
    begun: list[str] = []
    for group in filter(None, (named, importing, [str(mirrored)], others, ["tests", "trajstore"])):
        stages.append([*group, *(f"--ignore={path}" for path in begun)])
        begun += group
    return [*stages, ["-m", "nightly", *stages[0]], ["-m", "nightly", "tests"]]


def _failures(arguments: list[str], copy: Path, limit: int) -> list[str]:
    """Run tests of a copy, and return the names of those that fail or do not end."""
    pytest = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=no", "--hypothesis-seed=0"]
    pytest += ["-p", "no:cacheprovider", "-o", f"faulthandler_timeout={limit}"]
    pytest += ["-o", "faulthandler_exit_on_timeout=true"]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as output:
        # numba takes a compiled loop from its cache, though a function that it calls has changed.
        variables = {"PYTHONPATH": str(copy / "src"), "NUMBA_CACHE_DIR": cache}
        running = subprocess.Popen(
            [*pytest, *arguments],
            cwd=copy,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = running.wait(LONGEST)
        except subprocess.TimeoutExpired:
            return [f"no end within {LONGEST} s"]
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        output.seek(0)
        printed = output.read()
    if code in (0, 5):  # 5: no test was chosen
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if failed:
        return failed
    begun = re.findall(r"^tests/\S+::.*?(?= *$| PASSED| SKIPPED)", printed, re.MULTILINE)
    return [f"{begun[-1]} does not end" if begun else printed[-300:]]


def _failing(tests: set[str], copy: Path, limit: int) -> set[str]:
    """Those of some tests that fail without a fault."""
    if not tests:
        return set()
    listed = copy / "failed-tests.txt"
    listed.write_text("\n".join(sorted(tests)))
    return tests.intersection(_failures(["-m", "", f"@{listed}"], copy, limit))


if __name__ == "__main__":
    main()
