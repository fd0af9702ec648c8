"""`evaluate` calls a function with the models of many steps, in their order.

Functions are given as objects, as ``FILE.py:function`` or as ``MODULE:function``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xarray as xr

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument, TrajstoreError, did_you_mean
from trajstore.exchange.selection import Steps, select_part
from trajstore.store.storage.remote_path import RunPath, location
from trajstore.trainers.evaluations.result import ResultStore, step_dataset
from trajstore.trainers.matrix_products import float32_products
from trajstore.trainers.runs.developed_run import rows_of
from trajstore.trainers.states.stored_model import StoredModel
from trajstore.trainers.step_model import Constructor, StepModel


def load_function(source: str) -> Callable[..., Any]:
    """Import a function by ``FILE.py:function`` or ``MODULE:function``.

    Modules next to the file can be imported by it.

    Raises
    ------
    InvalidArgument
        If the text has another form, the file or the function does not exist, or the import fails.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise InvalidArgument(f"got {source!r}, expected FILE.py:function, such as probe.py:probe")
    module = _file(place) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise InvalidArgument(f"{place} has no function {name}{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # any code of the module
        raise InvalidArgument(
            f"cannot import {name}: {type(error).__name__}: {error}; give FILE.py:function, or the "
            "name of an installed module"
        ) from error


def _file(place: str) -> ModuleType:
    path = Path(place).absolute()
    if not path.is_file():
        raise InvalidArgument(f"there is no file {place}; give FILE.py:function")
    # A name of its own: another module of this name may be imported. An edited file is run again.
    content = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()
    name = f"{path.stem}_{content[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses, which look up their module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any code of the file
        del sys.modules[name]
        raise InvalidArgument(f"cannot import {place}: {type(error).__name__}: {error}") from error
    return module


Evaluation = Callable[[torch.nn.Module, int], Any]
"""Returns the values of a model at a step, by name."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The store of an evaluation.

    Attributes
    ----------
    path : Path
    steps : int
        Steps with results.
    new : int
        Those of this call.
    names : tuple of str
        Names of the results, sorted.
    """

    path: Path
    steps: int
    new: int
    names: tuple[str, ...]


@checks_types
def evaluate(
    run: RunPath,
    function: Evaluation | str,
    output: str | os.PathLike[str],
    *,
    every: Count = 1,
    steps: Steps = None,
    constructor: Constructor | str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluated:
    """Call a function with the model of each step, and append its results to a Zarr store.

    The store has the dimension ``step`` of the run, so ``xr.merge`` joins both. If the store
    exists, `evaluate` evaluates the missing steps only, as after a kill or an error. Results are
    appended in the order of the steps, at the latest after five seconds. A missing step before the
    last stored one is an error.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"`` or ``"keyframes"``.
    function : callable or str
        Called as ``function(model, step)``; returns a dict of scalars, texts, arrays or tensors. An
        array may be given with its dimensions: ``(("layer", "head"), values)``. A string names it:
        ``FILE.py:function`` or ``MODULE:function``. The model is the same object at every step, in
        evaluation mode.
    output : path-like
        The Zarr store.
    every : int
        Evaluate the steps that are multiples of this number.
    steps : str, int, slice or iterable of int, optional
        Evaluate these recorded steps only, such as ``"0:1000:10"``. Default: all, or all keyframes.
    constructor : callable or str, optional
        As for `model_at`; a string names it like a function.
    overwrite : bool
        Replace an existing store, when the first results are written.
    on_progress : callable, optional
        Called with the numbers of evaluated and of all steps.

    Returns
    -------
    Evaluated

    Raises
    ------
    RunNotFound, VariableNotRecorded, StepNotFound
        If there is no run, or it lacks the parameters or a step.
    RunExists
        If `output` exists and is not the store of an evaluation.
    InvalidArgument
        If the function raises an error or returns other types, the store has other results, or no
        selected step is a multiple of `every`.

    Examples
    --------
    >>> import xarray as xr
    >>> def norms(model, step):
    ...     return {"attention_norm": model.transformer.h[0].attn.c_attn.weight.norm()}
    >>> evaluate("everything.zarr", norms, "norms.zarr", every=2).steps
    2
    >>> xr.open_zarr("norms.zarr").step.values
    array([0, 2])
    """
    stored = StoredModel(run)
    recorded = stored.steps if steps is None else stored.all_steps
    selected = _selected_steps(recorded, steps, every)
    name = str(getattr(function, "__qualname__", function))
    called = load_function(function) if isinstance(function, str) else function
    build = load_function(constructor) if isinstance(constructor, str) else constructor
    about = {
        "run": location(run).name,
        "created": stored.attributes.get("created"),
        "function": name,
    }
    with ResultStore.open(output, about, overwrite=overwrite) as store:
        before = len(store.steps)
        missing = np.setdiff1d(selected, store.steps)
        if before and len(missing) and missing[0] < store.steps[-1]:
            raise InvalidArgument(
                f"{output} has results up to step {store.steps[-1]} but not of step {missing[0]}, "
                "and results are only appended; choose another output, or replace it with "
                "overwrite=True"
            )
        done = len(selected) - len(missing)
        try:
            with rows_of(run, missing.tolist()) as rows:
                for result in _results(rows, called, name, build, missing.tolist()):
                    store.add(result)
                    done += 1
                    if on_progress is not None:
                        on_progress(done, len(selected))
        except TrajstoreError as error:
            if len(store.steps):
                error.args = (
                    f"{error}. {output} keeps the results up to step {store.steps[-1]}; the "
                    "same call continues",
                )
            raise
    return Evaluated(
        path=store.path,
        steps=len(store.steps),
        new=len(store.steps) - before,
        names=store.names,
    )


def _results(
    run: RunPath,
    function: Evaluation,
    name: str,
    constructor: Constructor | None,
    steps: Sequence[int],
) -> Iterator[xr.Dataset]:
    """Yield the results of steps, in increasing order.

    Raises
    ------
    InvalidArgument
        If the function raises an error; the message has the step.
    """
    if not steps:
        return
    stored = StoredModel(run)
    model = StepModel(stored, constructor)
    in_float32 = False
    if config := stored.attributes.get("config"):
        from trajstore.trainers.config import RunConfig  # which an own loop does without

        in_float32 = RunConfig.parse(config).training.products == "float32"
    for step, weights in stored.weights(steps):
        model.set(weights)
        try:
            with float32_products(in_float32):
                result = function(model.module, step)
        except InvalidArgument as error:  # of a ready-made evaluation
            raise InvalidArgument(f"step {step}: {error}") from error
        except Exception as error:  # any code of the user
            place = _place(function, error)
            raise InvalidArgument(
                f"step {step}: {name} raised {type(error).__name__}: {error} "
                f"({os.path.basename(place.filename)}, line {place.lineno})"
            ) from error
        yield step_dataset(result, step)


def _place(function: Evaluation, error: Exception) -> traceback.FrameSummary:
    """The last line of the function's own file that an error passed, or the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    own_frames = [frame for frame in frames if code and frame.filename == code.co_filename]
    return (own_frames or frames)[-1]


def _selected_steps(recorded: Any, steps: Steps, every: int) -> Any:
    """Return the steps to evaluate.

    Raises
    ------
    StepNotFound, InvalidArgument
        If a single step was not recorded, or there are none.
    """
    chosen = select_part(xr.Dataset(coords={"step": recorded}), steps=steps)["step"].values
    multiples = chosen[chosen % every == 0]
    if not len(multiples):
        raise InvalidArgument(f"no selected step is a multiple of {every}; give a smaller every=…")
    return multiples
