"""Script: call every command and public function once in an environment without the extras.

It works in the current folder, which must be empty, and prints a JSON table of calls: what is
called, the extra that its error must name, or "" if it must work, and what happened.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

COMMANDS = {
    "analyze gatsby.zarr speed": "",
    "analyze gatsby.zarr speed -o speed.nc": "hdf5",
    "analyze gatsby.zarr speed --scheduler tcp://127.0.0.1:1": "cluster",
    "annotate gatsby.zarr --tokenizer ascii --overwrite": "",
    "annotate gatsby.zarr --tokenizer folder --overwrite": "train",
    "checkout gatsby.zarr --at 1 -o checkout": "torch",
    "develop gatsby.zarr --select step=1 -o part": "train",
    "compare gatsby.zarr gatsby.zarr": "",
    "evaluate gatsby.zarr loss --text text.txt -o loss.zarr": "torch",
    "explore gatsby.zarr": "explore",
    "export gatsby.zarr -o gatsby.safetensors": "",
    "export gatsby.zarr -o gatsby.h5": "hdf5",
    "fetch gatsby": "hub",
    "fetch fineweb": "hub",
    "fetch gpt2": "hub",
    "fork gatsby.zarr --at 1 --set optimizer.lr=0.1 -o fork.zarr": "train",
    "import gatsby.safetensors -o imported.zarr": "",
    "import file.h5 -o imported.zarr": "hdf5",
    "import file.pt -o imported.zarr": "torch",
    "info gatsby.zarr": "",
    "info s3://bucket/run.zarr": "s3",
    "plot gatsby.zarr loss -o loss.png": "plot",
    "presets": "train",
    "record --preset gatsby -o new.zarr": "train",
    "repair gatsby.zarr": "",
    "report gatsby.zarr": "report",
    "summary gatsby.zarr": "",
    "verify gatsby.zarr": "",
    "verify gatsby.zarr --replay": "torch",
    "verify gatsby.zarr --replay --gradients": "torch",
    "what-if gatsby.zarr -o new.zarr": "train",
}

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "compute": (["speed"],),
    "vectors": ("grad",),
}
"""Arguments of analyses after the Dataset."""

OTHERS = {
    "by_population", "compare", "divergence", "each_run", "explain_gradient", "layers", "over_runs",
}  # fmt: skip
"""Analyses of something else than one run with the default variables."""


OF_TORCH = {
    "RoundedAdam", "RoundedAdamW", "RoundedSGD", "attach", "capture", "checkout", "develop",
    "evaluate", "float32_products", "model_at", "models", "optimizer_state_at", "replay", "restore",
}  # fmt: skip
"""Parts of `trainers` that an own loop uses."""

NAMED = re.compile(r"needs the extra (\w+): pip install -c constraints\.txt '\.\[\1\]'")


def called(call: Callable[[], Any]) -> str:
    """The extra that the error of a call names, "" without an error, or another error."""
    from trajstore.errors import MissingExtra

    try:
        call()
    except Exception as error:
        found = NAMED.search(str(error))
        return found[1] if found and isinstance(error, MissingExtra) else repr(error)
    return ""


def command(line: str) -> str:
    """As `called`, for a command."""
    from click.testing import CliRunner

    from trajstore.cli.main import main

    done = CliRunner().invoke(main, shlex.split(line))
    found = NAMED.search(done.stderr)
    if done.exit_code == 2 and found and done.stderr.count("\n") == 1:
        return found[1]
    return "" if done.exit_code == 0 else f"{done.exception!r}: {done.output}"


def own_folders() -> None:
    """Have folders of a user that are named as those of the project, and a Dataset before it."""
    import xarray as xr

    with contextlib.suppress(FileNotFoundError):
        xr.open_dataset("nothing.zarr")
    assert not [name for name in sys.modules if name.startswith("trajstore.analysis")]
    assert type(xr.Dataset().traj).__name__ == "TrajAccessor"
    sys.path.insert(0, "")
    for name in ("analysis", "benchmarks", "tools", "trainers"):
        Path(name).mkdir()
        Path(name, "__init__.py").touch()
        Path(name, "mine.py").write_text("THEIRS = True\n")
        assert importlib.import_module(f"{name}.mine").THEIRS


def functions() -> Iterator[tuple[str, str, str]]:
    """Name, expected and found answer of each public function, and of what needs an extra."""
    import trajstore
    from trajstore import analysis, trainers
    from trajstore.analysis import figures

    ds = trajstore.open_run("gatsby.zarr").isel(step=slice(3))
    created: dict[str, Any] = {"token": [0], "hidden": 1, "variables": {"W": "float32"}}
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "open_run": (lambda: trajstore.open_run("gatsby.zarr"), ""),
        "open_runs": (lambda: trajstore.open_runs("gatsby.zarr"), ""),
        "export": (lambda: trajstore.export("gatsby.zarr", "a.safetensors"), ""),
        "import_file": (lambda: trajstore.import_file("a.safetensors", "a.zarr"), ""),
        "verify": (lambda: trajstore.verify("gatsby.zarr"), ""),
        "repair": (lambda: trajstore.repair("gatsby.zarr"), ""),
        "sample_run": (lambda: trajstore.sample_run("gatsby.zarr"), ""),
        "to_torch": (lambda: trajstore.to_torch("gatsby.zarr"), "torch"),
        "RunWriter": (lambda: trajstore.RunWriter.create("w.zarr", **created).close(), ""),
        "to_netcdf": (lambda: ds.traj.to_netcdf("a.nc"), "hdf5"),
        "trainers.fetch": (lambda: trainers.fetch("gatsby"), "hub"),
        "trainers.LightningCallback": (lambda: trainers.LightningCallback, "lightning"),
    }
    for name in {*trainers.__all__} - {"fetch", "LightningCallback"}:
        extra = "torch" if name in OF_TORCH else "train"
        calls[f"trainers.{name}"] = (lambda name=name: getattr(trainers, name), extra)
    for name in {name for name in analysis.__all__ if name.islower()}:
        if name in OTHERS:
            continue
        calls[f"analysis.{name}"] = (
            lambda name=name: getattr(analysis, name)(ds, *ARGUMENTS.get(name, ())).compute(),
            "graph" if name == "adjacency" else "",
        )
    for name, figure in figures.FIGURES.items():
        calls[f"plot.{name}"] = (lambda figure=figure: figure(ds), "plot")
    left = {*trajstore.__all__} - {"__version__", "errors", *calls}
    assert not left, left
    for name, (call, expected) in calls.items():
        yield name, expected, called(call)


def main() -> None:
    """Print the table."""
    own_folders()
    import trajstore

    trajstore.sample_run("gatsby.zarr")
    Path("text.txt").write_text("a text\n")
    Path("folder").mkdir()
    Path("file.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    with zipfile.ZipFile("file.pt", "w") as file:
        file.writestr("file/data.pkl", b"")
    table = [(f"trajstore {line}", extra, command(line)) for line, extra in COMMANDS.items()]
    table += functions()
    tried = {line.partition(" ")[0] for line in COMMANDS}
    for name in {point.name for point in entry_points(group="trajstore.commands")} - tried:
        table.append((f"trajstore {name}", "", "not called"))
    print(json.dumps(table))


if __name__ == "__main__":
    main()
