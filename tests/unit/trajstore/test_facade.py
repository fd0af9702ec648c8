"""What `import trajstore` gives and loads; the form of all messages; variables; the sample run."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trajstore
from trajstore import (
    RunWriter,
    analysis,
    errors,
    export,
    import_file,
    open_run,
    repair,
    sample_run,
    verify,
)
from trajstore.errors import InvalidArgument, MissingExtra, RunExists, did_you_mean, needs_extra
from trajstore.schema import (
    OPTIMIZER_STATE,
    VARIABLES,
    belongs,
    resolve_variables,
    variable,
    variables_of,
)


def test_a_missing_package_names_its_extra_with_a_command_to_paste() -> None:
    with pytest.raises(MissingExtra) as raised, needs_extra("a file", "hdf5", "write .csv"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    sentence = str(pickle.loads(pickle.dumps(raised.value)))
    command = "pip install -c constraints.txt '.[hdf5]'"
    assert sentence == f"a file needs the extra hdf5: {command}; or write .csv"


def test_a_missing_module_of_trajstore_needs_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"trajstore\.nothing"), needs_extra("a", "b"):
        import trajstore.nothing  # noqa: F401


@pytest.mark.parametrize(
    ("typed", "known", "suggestion"),
    [
        ("w", ["W", "grad"], " (did you mean 'W'?)"),
        ("exp-avg", ["exp_avg", "exp_avg_sq"], " (did you mean 'exp_avg'?)"),
        ("rl", ["name", "lr"], " (did you mean 'lr'?)"),
        ("", ["W"], ""),
        ("W", [], ""),
    ],
)
def test_the_nearest_name_is_suggested(typed: str, known: list[str], suggestion: str) -> None:
    assert did_you_mean(typed, known) == suggestion


def test_mistyped_variables_get_a_suggestion() -> None:
    with pytest.raises(InvalidArgument, match="'gard' \\(did you mean 'grad'\\?\\)"):
        variable("gard")
    with pytest.raises(InvalidArgument, match="'weigths' \\(did you mean 'weights'\\?\\)"):
        resolve_variables("weigths")
    with pytest.raises(InvalidArgument, match="got 'loss, lr' without W"):
        resolve_variables(("loss", "lr"))


def _texts(node: ast.expr) -> str:
    """A message with {} for what it fills in."""
    if isinstance(node, ast.BinOp):
        return _texts(node.left) + _texts(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_texts, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


def _messages(*, of: set[str]) -> Iterator[tuple[str, str, str]]:
    """Each error of these classes that the package makes: its place, class and message."""
    for folder, _, names in os.walk(trajstore.__path__[0], followlinks=True):
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            calls = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call))
            for call in calls:
                if isinstance(call.func, ast.Name) and call.func.id in of and call.args:
                    yield f"{file.name}:{call.lineno}", call.func.id, _texts(call.args[0])


def test_messages_say_problem_value_and_fix_in_short_sentences() -> None:
    """What `optimizer_rule` and `new_run` raise is a reason in the sentence of who asks."""
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    found = [*_messages(of=classes - {"MissingExtra"})]
    assert len(found) > 500
    reasons = ("optimizer_rule.py", "new_run.py")
    for place, kind, text in found:
        assert not text.endswith((".", "!")) or "zip -0r" in text, place
        assert "\n" in text or "  " not in text, place
        assert all(len(part.split()) <= 25 for part in re.split(r"[;:\n]|\. ", text)), place
        if kind == "InvalidArgument" and not place.startswith(reasons):
            assert re.search(r"expected|[;:] |\{\}$", text), f"{place} names no fix: {text}"


KEPT = [{"name": "velocity", "of": "element"}, {"name": "rows", "of": "other"},
        {"name": "warmth", "of": "parameter", "type": "float"}]  # fmt: skip
NAMES = ("velocity", "params_velocity", "param_warmth", "param_kept")


def written(path: Path, rows: int = 5) -> Path:
    """A run with what an optimizer keeps, by its own names."""
    shapes = ((4, 3), (6,), (2,), (2,))
    lengths = dict(zip(NAMES, shapes, strict=True))
    types = dict.fromkeys(("W", *lengths), "float32")
    with RunWriter.create(
        path, token=np.arange(4), hidden=3, variables=types, parameter=("a", "b"),
        lengths={"element": 6}, attributes={OPTIMIZER_STATE: KEPT},
    ) as writer:  # fmt: skip
        for step in range(rows):
            values = {name: np.full(shape, step, "f4") for name, shape in lengths.items()}
            writer.append(step, W=np.full((4, 3), -step, "f4"), **values)
    return path


def test_names_of_an_optimizer_are_those_of_its_run(tmp_path: Path) -> None:
    assert variables_of({}) == tuple(VARIABLES)
    known = variables_of({OPTIMIZER_STATE: KEPT})
    assert known == (*VARIABLES, *NAMES)
    assert not belongs("rows", known)
    assert VARIABLES["params_velocity"].dims == ("step", "element")
    assert VARIABLES["params_sum"].units == "nat2"
    types, new = {"W": "float32", "velocity": "float32"}, tmp_path / "a.zarr"
    with pytest.raises(InvalidArgument, match="there is no variable 'velocity'"):
        RunWriter.create(new, token=[0], hidden=1, variables=types)
    untyped = {OPTIMIZER_STATE: [{"name": "x", "of": "parameter"}]}
    with pytest.raises(InvalidArgument, match="optimizer_state"):
        RunWriter.create(new, token=[0], hidden=1, variables={"W": "float32"}, attributes=untyped)


def test_names_of_an_optimizer_are_repaired_and_copied(tmp_path: Path) -> None:
    path = written(tmp_path / "run.zarr")
    ds = open_run(path).load()
    assert verify(path).clean
    for lost in ("zarr.json", "velocity/zarr.json", "param_kept/zarr.json"):
        (path / lost).unlink()
        assert not verify(path).clean, lost
        repair(path)
        assert verify(path).clean, lost
    xr.testing.assert_equal(ds, open_run(path).load())
    export(path, tmp_path / "run.safetensors")
    import_file(tmp_path / "run.safetensors", tmp_path / "back.zarr")
    export(path, tmp_path / "copy.zarr", format="run")
    for copy in ("back.zarr", "copy.zarr"):
        found = open_run(tmp_path / copy).load()
        for name in NAMES:
            np.testing.assert_array_equal(found[name], ds[name])
    with RunWriter.resume(path, rows=3) as writer:
        assert {*NAMES} <= {*writer.layout.arrays}
    (path / "velocity/c.0.0.0").write_bytes(b"")
    assert {problem.array for problem in verify(path).problems} == {"velocity"}


ROOT = Path(__file__).parents[3]
HEAVY = ("xarray", "dask", "pandas", "zarr", "numpy", "torch")


def run(code: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_every_promised_name_is_there_and_is_found_only_once() -> None:
    for name in trajstore.__all__:
        assert getattr(trajstore, name) is getattr(trajstore, name)
    assert set(trajstore.__all__) <= set(dir(trajstore))
    with pytest.raises(AttributeError, match="'trajstore' has no attribute 'opn_run'"):
        trajstore.opn_run  # noqa: B018


@pytest.mark.parametrize("name", ["trainers", "analysis"])
def test_a_folder_of_the_clone_is_no_second_copy(name: str) -> None:
    code = f"""
try:
    import {name}
except ImportError as error:
    print(error)
import trajstore.{name}
"""
    assert f"import trajstore.{name} instead" in run(code, ROOT)


def test_the_command_line_helps_without_loading_them() -> None:
    code = f"""
import sys
from click.testing import CliRunner
from trajstore.cli.main import main
for name in main.list_commands(None):
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
print([m for m in {HEAVY} if m in sys.modules])
"""
    assert run(code) == "[]"


def test_the_sample_run_shows_the_freeze_of_dead_tokens(sample: Path) -> None:
    ds = open_run(sample).load()
    assert (ds.loss[1] > ds.loss[-1]).item()
    assert (ds.grad[-1].where(ds.is_dead, 1) != 0).any("hidden").all()
    frozen = analysis.freeze(ds).frozen_since.where(ds.is_dead, drop=True)
    assert ((frozen > 100) & (frozen < 300)).all()
    cause = analysis.freeze_cause(ds).values
    assert (cause[cause != 0] == analysis.CAUSES.index("lost_update")).mean() > 0.99


def test_a_sample_run_is_returned_as_it_is_and_no_other_path_is_replaced(
    sample: Path, tmp_path: Path
) -> None:
    before = (sample / "zarr.json").stat().st_mtime_ns
    assert sample_run(sample) == sample
    assert (sample / "zarr.json").stat().st_mtime_ns == before
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", written(tmp_path / "run.zarr")):
        with pytest.raises(RunExists, match="exists and is not a complete sample run"):
            sample_run(path)
