"""Check the recorder on a GPU or a Mac, and print tables to paste into an issue of the project.

python tools/device.py [--device cuda|mps|cpu] [--preset NAME …] [--steps N] [--corpus PATH]
                       [--tokenizer PATH]

It runs the tests marked `device`. Then it records some steps of each preset, verifies every byte,
and replays each step. With ``--device cpu``
it tries itself on a machine without a device.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from trajstore.installation import __version__
from trajstore.trainers import PRESETS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "unit" / "trainers" / "recording"
TRAJSTORE = str(Path(sys.executable).with_name("trajstore"))


def find_device(wanted: str | None) -> str:
    """Return the kind of the device to check; end the program if torch does not find it."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    devices = [name for name in found if found[name] and wanted in (None, name)]
    if wanted == "cpu":
        print("This table tries the script on the CPU. It says nothing about a device.\n")
        return "cpu"
    if not devices:
        raise SystemExit(
            f"torch finds no {wanted or 'CUDA or MPS'} device on this machine; run this on one "
            "that has it, or try the script with --device cpu"
        )
    return devices[0]


def last_line(*command: str, **environment: str) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and its last line."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).splitlines()
    return done.returncode == 0, lines[-1].replace("|", r"\|") if lines else "no output"


def check(name: str, device: str, arguments: argparse.Namespace, folder: str) -> list[str]:
    """Return a row of the table: results of recording, verify and replay."""
    run = str(Path(folder) / f"{name}.zarr")
    texts = {key: getattr(arguments, key) for key in ("corpus", "tokenizer")}
    if name.startswith("gatsby"):
        texts = {}  # its text is embedded
    options = [part for key, value in texts.items() if value for part in (f"--{key}", value)]
    options += ["--set", f"training.device={device}", "--steps", str(arguments.steps)]
    row = [name]
    for command in (
        ("record", "--preset", name, *options, "-o", run),
        ("verify", run),
        ("verify", run, "--replay"),
    ):
        success, line = last_line(TRAJSTORE, *command)
        row.append("yes" if success else line)
        if not success:
            return [*row, *["not run"] * (4 - len(row))]
    return row


def main() -> None:
    """Print the tables; the exit code is 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "mps", "cpu"))
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--corpus", help="text for the presets without an embedded one")
    parser.add_argument("--tokenizer")
    arguments = parser.parse_args()
    device = find_device(arguments.device)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print("| fact | value |\n| --- | --- |")
    print(f"| device | {device}, {name or platform.machine()} |")
    print(f"| system | {platform.platform()}, Python {platform.python_version()} |")
    print(f"| versions | trajstore {__version__}, torch {torch.__version__} |")
    passed, line = last_line(
        sys.executable, "-m", "pytest", "-q", "-m", "device", str(TESTS), TRAJSTORE_DEVICE=device
    )
    print(f"| tests marked `device` | {line} |\n")
    print("| preset | recorded | verified | replayed |")
    print("|" + " --- |" * 4)
    with tempfile.TemporaryDirectory() as folder:
        for one in arguments.preset:
            row = check(one, device, arguments, folder)
            passed &= row[3] == "yes"
            print(f"| {' | '.join(row)} |", flush=True)
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
