"""Commands that write, for `powerloss.py`: their inputs and outputs, and the checks of a state."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trajstore import RunWriter, export, open_run, repair, verify
from trajstore.cli.main import main
from trajstore.errors import TrajstoreError

ROWS = 6
CUT = 3
TRAINING = (
    "--steps", "5", "--set", 'recording.variables="W,grad,lr,clip_coef"',
    "--set", "recording.block_rows=4", "--set", "recording.commit_every=0.001",
    "--set", "recording.checkpoint_every=3", "--set", "model.context=16",
    "--set", "model.hidden=8", "--set", "model.layers=1", "--set", "model.heads=1",
    "--set", "training.batch_size=2", "--threads", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A command, and its outputs.

    Attributes
    ----------
    work : callable
        The command; takes True to flush.
    needs : tuple of str
        Inputs: entries of the prepared folder.
    grows, replaces : tuple of str
        Patterns of the runs that get rows, and of the outputs that are replaced as a whole.
    may_cut_to : int
        Rows to which an existing run may be cut.
    in_place : bool
        The output is replaced metadata file by metadata file, the root first.
    unflushed : bool
        The inputs were not flushed.
    has_option : bool
        Whether flushing can be turned off.
    trains : tuple of str
        The command that resumes a training run.
    """

    work: Callable[[bool], None]
    needs: tuple[str, ...] = ()
    grows: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    may_cut_to: int | None = None
    in_place: bool = False
    unflushed: bool = False
    has_option: bool = False
    trains: tuple[str, ...] = ()


def _row(step: int, version: int) -> dict[str, Any]:
    values = np.random.default_rng((step, version)).integers(-99, 99, (6, 4)).astype("f4")
    return {"step": step, "W": values, "loss": np.float32(values.sum())}


def _create(
    path: str, *, version: int = 0, rows: int = ROWS, fsync: bool = True, overwrite: bool = False
) -> None:
    with RunWriter.create(
        path, token=np.arange(6), hidden=4, commit_every=0.001, fsync=fsync, overwrite=overwrite,
        variables={"W": "bfloat16", "loss": "float32"}, block_rows=4,
    ) as run:  # fmt: skip
        _append(run, range(rows), version)


def _append(run: RunWriter, steps: range, version: int) -> None:
    """Append rows; wait twice until an unfinished block is committed."""
    for step in steps:
        run.append(**_row(step, version))
        while step % 3 == 1 and run.committed_rows < run.rows:
            time.sleep(0.001)  # the writer commits by time, and reports nothing


def _resume(*, rows: int | None = None, version: int = 0, fsync: bool = True) -> None:
    with RunWriter.resume("run.zarr", rows=rows, commit_every=0.001, fsync=fsync) as run:
        _append(run, range(run.rows, run.rows + 5), version)


def _command(*arguments: str) -> Callable[[bool], None]:
    def work(fsync: bool) -> None:
        more = () if fsync else ("--no-fsync",)
        main([*arguments, *more], prog_name="trajstore", standalone_mode=False)

    return work


def _export(name: str, *options: str) -> Trial:
    given = ("export", "run.zarr", "-o", name, "--overwrite", *options)
    return Trial(_command(*given), needs=("run.zarr", name), replaces=(name,))


def _record(preset: str) -> Trial:
    begun = ("record", "--preset", preset, *TRAINING, "-o", "new.zarr")
    return Trial(
        _command(*begun), grows=("new.zarr",), has_option=True, trains=(*begun, "--resume")
    )


def _resumed_training(*, unflushed: bool = False) -> Trial:
    resumed = ("record", "--resume", "--steps", "7", "-o", "part.zarr")
    needs = ("part.zarr", "part.ckpt")
    return Trial(
        _command(*resumed), needs, grows=("part.zarr",), unflushed=unflushed, has_option=True,
        trains=resumed,
    )  # fmt: skip


_ANNOTATE = _command("annotate", "run.zarr", "--masks", "dead_mask.npy", "--overwrite")
_FORK = ("fork", "part.zarr", "--at", "4", "--set", "optimizer.lr=0.01")

TRIALS: dict[str, Trial] = {
    "create": Trial(
        lambda fsync: _create("new.zarr", fsync=fsync), grows=("new.zarr",), has_option=True
    ),
    "create --overwrite": Trial(
        lambda fsync: _create("run.zarr", version=1, overwrite=True, fsync=fsync),
        needs=("run.zarr",), grows=("run.zarr",), may_cut_to=0, has_option=True,
    ),
    "resume": Trial(
        lambda fsync: _resume(fsync=fsync), ("run.zarr",), ("run.zarr",), has_option=True
    ),
    "resume, run not flushed": Trial(
        lambda fsync: _resume(), ("run.zarr",), ("run.zarr",), unflushed=True
    ),
    "cut": Trial(
        lambda fsync: _resume(rows=CUT, version=1, fsync=fsync), ("run.zarr",), ("run.zarr",),
        may_cut_to=CUT, has_option=True,
    ),
    "cut, run not flushed": Trial(
        lambda fsync: _resume(rows=CUT, version=1), ("run.zarr",), ("run.zarr",),
        may_cut_to=CUT, unflushed=True,
    ),
    "annotate": Trial(_ANNOTATE, ("run.zarr", "dead_mask.npy"), replaces=("run.zarr",)),
    "annotate, run not flushed": Trial(
        _ANNOTATE, ("run.zarr", "dead_mask.npy"), replaces=("run.zarr",), unflushed=True
    ),
    "repair": Trial(
        _command("repair", "cut.zarr"), ("cut.zarr",), replaces=("cut.zarr",),
        in_place=True, may_cut_to=4,
    ),
    "repair, run not flushed": Trial(
        _command("repair", "cut.zarr"), ("cut.zarr",), replaces=("cut.zarr",),
        in_place=True, may_cut_to=4, unflushed=True,
    ),
    "import": Trial(
        _command("import", "run.safetensors", "-o", "y.zarr", "--overwrite"),
        ("run.safetensors",), replaces=("y.zarr",),
    ),
    "import --overwrite": Trial(
        _command("import", "run.safetensors", "-o", "x.run.zarr", "--overwrite"),
        ("run.safetensors", "x.run.zarr"), replaces=("x.run.zarr",),
    ),
    "export safetensors": _export("x.safetensors"),
    "export zarr": _export("x.zarr", "--format", "zarr"),
    "export run": _export("x.run.zarr", "--format", "run"),
    "analyze -o": Trial(
        _command("analyze", "run.zarr", "speed", "-o", "z.zarr", "--overwrite"),
        ("run.zarr", "z.zarr"), replaces=("z.zarr",),
    ),
}  # fmt: skip
if importlib.util.find_spec("h5py"):
    TRIALS["export hdf5"] = _export("x.h5", "--format", "hdf5")
    TRIALS["analyze -o x.nc"] = Trial(
        _command("analyze", "run.zarr", "speed", "-o", "z.nc", "--overwrite"),
        ("run.zarr",), replaces=("z.nc",),
    )  # fmt: skip
if importlib.util.find_spec("torch"):
    TRIALS |= {
        "record": _record("gatsby"),
        "record, plain loop": _record("gatsby-adam"),
        "record --resume": _resumed_training(),
        "record --resume, run not flushed": _resumed_training(unflushed=True),
        "fork": Trial(
            _command(*_FORK, "-o", "fork.zarr"), ("part.zarr", "part.ckpt"), grows=("fork.zarr",),
            has_option=True, trains=("record", "--resume", "-o", "fork.zarr"),
        ),
        "fork, run not flushed": Trial(
            _command(*_FORK, "-o", "fork.zarr"), ("part.zarr", "part.ckpt"), grows=("fork.zarr",),
            unflushed=True, trains=("record", "--resume", "-o", "fork.zarr"),
        ),
        "what-if": Trial(
            _command(
                "what-if", "part.zarr", "--set", "optimizer.lr=0.01", "-o", "w.zarr", "--overwrite"
            ),
            ("part.zarr",), replaces=("w.zarr",),
        ),
    }  # fmt: skip


def prepare(folder: Path, needs: set[str]) -> None:
    """Make the inputs of commands; those that take long only if they are needed."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder), _quiet():
        _create("run.zarr")
        _create("cut.zarr")
        Path("cut.zarr/W/c.1.0.0").unlink()
        np.save("dead_mask.npy", np.arange(6) < 2)
        if needs <= {"run.zarr", "cut.zarr", "dead_mask.npy"}:
            return
        export("run.zarr", "run.safetensors")
        _create("other.zarr", version=1, rows=3)
        export("other.zarr", "x.safetensors")
        export("other.zarr", "x.zarr", format="zarr")
        export("other.zarr", "x.run.zarr", format="run")
        _command("analyze", "other.zarr", "speed", "-o", "z.zarr")(True)
        if importlib.util.find_spec("h5py"):
            export("other.zarr", "x.h5", format="hdf5")
        if "part.zarr" in needs:
            _command("record", "--preset", "gatsby", *TRAINING, "-o", "part.zarr")(True)


def carry_out(name: str, folder: Path, note: Callable[[str], object], *, fsync: bool) -> None:
    """Run a command, and note each commit when the call that commits has returned."""
    from trajstore.store.writing.commit import Committer

    root = folder.resolve()

    def noted(call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(self: Committer, *arguments: Any) -> None:
            call(self, *arguments)
            note(f"{os.path.relpath(self._path, root)}\t{self.rows}")  # type: ignore[arg-type]

        return wrapped

    for method in ("commit", "cut"):
        setattr(Committer, method, noted(getattr(Committer, method)))
    with contextlib.chdir(folder):
        TRIALS[name].work(fsync)
    note("end")


def is_run(path: Path) -> bool:
    """Return True if a folder is a run, neither an export nor results."""
    metadata = path / "zarr.json"
    if not metadata.is_file():
        return False
    return "trajstore_format" in json.loads(metadata.read_text())["attributes"]


Values = dict[str, tuple[Any, ...]]


def _values(run: Path) -> Values:
    """Types and bits of all variables of a run."""
    ds = open_run(run, chunks=None)
    found = {}
    for name, array in ds.variables.items():
        values = np.ascontiguousarray(array.values)
        if values.dtype.hasobject:
            found[str(name)] = (array.dims, str(values.dtype), values.tolist())
        else:
            found[str(name)] = (array.dims, str(values.dtype), values.view(np.uint8))
    return found


def rows_of(run: Path) -> int:
    """Rows that are committed."""
    return int(open_run(run, chunks=None).sizes["step"])


def _same(found: Values, whole: Values) -> bool:
    """Return True if a run has the first rows of another one, to the bit."""
    if found.keys() != whole.keys():
        return False
    for name, (dims, native, values) in found.items():
        dims_of_whole, native_of_whole, others = whole[name]
        if (dims, native) != (dims_of_whole, native_of_whole):
            return False
        if "step" in dims:
            others = others[: len(values)]
        if not np.array_equal(values, others):
            return False
    return True


@cache
def _kept(run: Path) -> Values:
    return _values(run)


def _count(values: Values) -> int:
    """Rows."""
    return len(values["step"][2]) // 8


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the output of commands."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


@contextlib.contextmanager
def _there(tree: dict[str, bytes | None]) -> Iterator[None]:
    """Work in a folder with the state of the disk after a loss of power."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for path, data in sorted(tree.items()):
            if data is None:
                Path(path).mkdir()
            else:
                Path(path).write_bytes(data)
        yield


def inspect(
    name: str,
    path: str,
    tree: dict[str, bytes | None],
    before: Path,
    after: Path,
    *,
    trained: bool,
) -> dict[str, Any]:
    """Check a run after a loss of power, and after a resume and a repair of it.

    Parameters
    ----------
    name : str
        The command.
    path : str
        Of the run, below the folder.
    tree : Tree
        Of the run, its checkpoints and the leftovers in the folder.
    before, after : Path
        The folder before and after the command.
    trained : bool
        Resume the training, too.

    Returns
    -------
    dict
        ``rows``; ``version``: ``old`` or ``new``, the run whose rows they are, else None; and a
        sentence for each problem: ``unreadable``, ``unsound``, ``resume``, ``repair``, ``train``.
    """
    trial = TRIALS[name]
    found: dict[str, Any] = {}
    wholes = {"new": after / path}
    if (before / path).is_dir() and not trial.unflushed and path != "cut.zarr":
        wholes["old"] = before / path
    with _there(tree):
        run = Path(path)
        try:
            values = _values(run)
            found["rows"] = _count(values)
            found["version"] = _version(values, wholes)
        except (TrajstoreError, OSError, ValueError, KeyError, TypeError) as error:
            found["unreadable"] = f"{type(error).__name__}: {error}"
        try:
            if problems := verify(run).problems:
                found["unsound"] = str(problems[0])
        except (TrajstoreError, OSError) as error:
            found["unsound"] = f"{type(error).__name__}: {error}"
    rows = found.get("rows", 0)
    for kind, action in {
        "repair": lambda: _repaired(run, rows, wholes),
        "resume": lambda: _resumed(run, after / path),
        **({"train": lambda: _trained(trial, run, after / path)} if trained else {}),
    }.items():
        with _there(tree):
            try:
                wrong = action()
            except BaseException as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                found[kind] = wrong
    return found


def _version(values: Values, wholes: dict[str, Path]) -> str | None:
    for version, whole in wholes.items():
        if _same(values, _kept(whole)):
            return version
    return None


def _repaired(run: Path, rows: int, wholes: dict[str, Path]) -> str | None:
    done = repair(run)
    if done.unrepaired:
        return f"repair leaves: {done.unrepaired[0]}"
    return _fault(run, wholes, at_least=rows)


def _resumed(run: Path, whole: Path) -> str | None:
    """Append the missing rows of the whole run; to another version, one more row."""
    ds = open_run(whole, chunks=None)
    own = open_run(run, chunks=None)
    version = _version(_values(run), {"new": whole})
    start = own.sizes["step"]
    steps = range(start, ds.sizes["step"]) if version else range(start - 1, start)
    source = ds if version else own
    with RunWriter.resume(run, commit_every=None) as writer:
        last = int(own.step.values[-1]) if start else -1
        for at in steps:
            row = {
                str(name): array.isel(step=at).values
                for name, array in source.data_vars.items()
                if "step" in array.dims
            }
            writer.append(step=int(source.step.values[at]) if version else last + 1, **row)
    if not version:
        problems = verify(run).problems
        return str(problems[0]) if problems else None
    return _fault(run, {"new": whole}, at_least=ds.sizes["step"])


def _trained(trial: Trial, run: Path, whole: Path) -> str | None:
    """Resume the training."""
    if not run.exists() and trial.needs:
        return None  # a fork is begun anew
    with _quiet():
        main([*trial.trains], prog_name="trajstore", standalone_mode=False)
    return _fault(run, {"new": whole}, at_least=_count(_kept(whole)))


def _fault(run: Path, wholes: dict[str, Path], *, at_least: int) -> str | None:
    problems = verify(run).problems
    if problems:
        return str(problems[0])
    values = _values(run)
    if _count(values) < at_least:
        return f"{_count(values)} rows of {at_least}"
    if _version(values, wholes) is None:
        return "other values"
    return None


def again(name: str, path: str, tree: dict[str, bytes | None], after: Path) -> str | None:
    """Run a command again after a loss of power; return a sentence if it fails."""
    with _there(tree):
        try:
            with _quiet():
                TRIALS[name].work(True)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        left = sorted(each.name for each in Path().rglob(".*"))
        if left:
            return f"leaves {left[0]}"
        if is_run(after / path):
            return _fault(Path(path), {"new": after / path}, at_least=_count(_kept(after / path)))
    return None
