"""Evaluation of a function at many steps, appended to a Zarr store."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument, TrajstoreError
from trajstore.exchange.selection import Steps, select_part
from trajstore.store.storage.remote_path import RunPath, location
from trajstore.trainers.config import RunConfig
from trajstore.trainers.evaluations.function_source import load_function
from trajstore.trainers.evaluations.result import step_dataset
from trajstore.trainers.evaluations.result_store import ResultStore
from trajstore.trainers.evaluations.worker_processes import in_processes
from trajstore.trainers.products import float32_products
from trajstore.trainers.step_models.recorded_parameters import RunParameters
from trajstore.trainers.step_models.step_model import Constructor, StepModel

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
    jobs: Count = 1,
    constructor: Constructor | str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluated:
    """Call a function with the model of each step, and append its results to a Zarr store.

    The store has the dimension ``step`` of the run, so ``xr.merge`` joins both. If the store
    exists, `evaluate` evaluates the missing steps only, as after a kill or an error. It stores
    results in the order of the steps, at the latest after five seconds.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``.
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
        Evaluate these recorded steps only, such as ``"0:1000:10"``.
    jobs : int
        Number of processes. Several processes need a function that pickle can import, or a string.
    constructor : callable or str, optional
        As for `model_at`; a string names it like a function.
    overwrite : bool
        Remove an existing store.
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
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(
    ...     ["training.steps=4", "training.batch_size=4", 'recording.variables=["everything"]']
    ... )
    >>> def norms(model, step):
    ...     return {"attention_norm": model.transformer.h[0].attn.c_attn.weight.norm()}
    >>> evaluate(record(config, "run.zarr"), norms, "norms.zarr", every=2).steps
    3
    >>> xr.open_zarr("norms.zarr").step.values
    array([0, 2, 4])
    """
    stored = RunParameters(run)
    wanted = _wanted(stored.steps, steps, every)
    if isinstance(function, str):
        load_function(function)  # its errors are reported before a process starts
    about = {
        "run": location(run).name,
        "created": stored.attributes.get("created"),
        "function": _name(function),
    }
    with ResultStore.open(output, about, overwrite=overwrite) as store:
        before = len(store.steps)
        missing = np.setdiff1d(wanted, store.steps)
        if before and len(missing) and missing[0] < store.steps[-1]:
            raise InvalidArgument(
                f"{output} has results up to step {store.steps[-1]} but not of step {missing[0]}, "
                "and results are only appended; choose another output, or replace it with "
                "overwrite=True"
            )
        done = len(wanted) - len(missing)
        try:
            for result in _results(run, function, constructor, missing.tolist(), jobs):
                store.add(result)
                done += 1
                if on_progress is not None:
                    on_progress(done, len(wanted))
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


class Evaluator:
    """Calls a function with the models of steps. Each process has one.

    Parameters
    ----------
    run : path-like or str
    function : callable or str
    constructor : callable or str, optional
    """

    def __init__(
        self, run: RunPath, function: Evaluation | str, constructor: Constructor | str | None
    ) -> None:
        self._name = _name(function)
        self._function = load_function(function) if isinstance(function, str) else function
        build = load_function(constructor) if isinstance(constructor, str) else constructor
        self._stored = RunParameters(run)
        self._model = StepModel(self._stored, build)
        config = self._stored.attributes.get("config")
        products = RunConfig.parse(config).training.products if config else "native"
        self._in_float32 = products == "float32"

    def __call__(self, steps: Sequence[int]) -> Iterator[xr.Dataset]:
        """Yield the results of steps, in increasing order.

        Raises
        ------
        InvalidArgument
            If the function raises an error; the message has the step.
        """
        for step, row in self._stored.rows(steps, self._model.variables):
            self._model.set(row)
            yield step_dataset(self._result(step), step)

    def _result(self, step: int) -> Any:
        try:
            with float32_products(self._in_float32):
                return self._function(self._model.module, step)
        except InvalidArgument as error:  # of a ready-made evaluation
            raise InvalidArgument(f"step {step}: {error}") from error
        except Exception as error:  # any code of the user
            place = _place(self._function, error)
            raise InvalidArgument(
                f"step {step}: {self._name} raised {type(error).__name__}: {error} "
                f"({os.path.basename(place.filename)}, line {place.lineno})"
            ) from error


def _place(function: Evaluation, error: Exception) -> traceback.FrameSummary:
    """The last line of the function's own file that an error passed, or the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    return (own or frames)[-1]


def _results(
    run: RunPath,
    function: Evaluation | str,
    constructor: Constructor | str | None,
    steps: Sequence[int],
    jobs: int,
) -> Iterator[xr.Dataset]:
    if not steps:
        return iter(())
    if jobs == 1:
        return Evaluator(run, function, constructor)(steps)
    return in_processes(Evaluator, (run, function, constructor), steps, jobs)


def _wanted(recorded: Any, steps: Steps, every: int) -> Any:
    """Return the steps to evaluate.

    Raises
    ------
    StepNotFound, InvalidArgument
        If a single step was not recorded, or there are none.
    """
    chosen = select_part(xr.Dataset(coords={"step": recorded}), steps=steps)["step"].values
    wanted = chosen[chosen % every == 0]
    if not len(wanted):
        raise InvalidArgument(f"no selected step is a multiple of {every}; give a smaller every=…")
    return wanted


def _name(function: Evaluation | str) -> str:
    """Return the name of a function in messages, and in the store."""
    return str(getattr(function, "__qualname__", function))
