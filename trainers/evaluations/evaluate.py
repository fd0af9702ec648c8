"""`evaluate` calls a function with the models of many steps, here or in other processes.

Functions are given as objects, as ``FILE.py:function`` or as ``MODULE:function``. Results arrive in
the order of the steps.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing.synchronize import Event
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
from trajstore.threads import threads_of_each
from trajstore.trainers.evaluations.result import ResultStore, step_dataset
from trajstore.trainers.products import float32_products
from trajstore.trainers.runs.developed_run import rows_of
from trajstore.trainers.states.stored_model import StoredModel
from trajstore.trainers.step_model import Constructor, StepModel

Worker = Callable[..., Callable[[Sequence[int]], Iterable[xr.Dataset]]]
"""Returns a function that yields the results of some steps; called once in each process."""

_LONGEST = 16
"""Most steps of a request."""

_PATIENCE = 2.0
"""Seconds after which a process returns the results of a request that it has not completed. One
that has to stop is terminated then.
"""

_AHEAD = 4
"""Requests of each process whose results may wait for those of earlier steps."""

_stop: Event
"""Set if a process has to stop after its step."""


def in_processes(
    worker: Worker, arguments: tuple[Any, ...], steps: Sequence[int], jobs: int
) -> Iterator[xr.Dataset]:
    """Call ``worker(*arguments)`` in several processes, and the result with some of the steps.

    Yields
    ------
    Dataset
        One for each step, in order.

    Raises
    ------
    InvalidArgument
        If the arguments cannot be pickled.
    TrajstoreError
        If a process is killed; or the error of the first step that fails, after all results before
        it.
    """
    try:
        pickled = pickle.dumps((worker, arguments))
    except Exception as error:  # pickle raises many types
        raise InvalidArgument(
            f"the function cannot be passed to other processes ({error}); define it in a module, "
            "or give FILE.py:function"
        ) from error
    length = max(1, min(_LONGEST, len(steps) // (_AHEAD * jobs)))
    pieces = deque(steps[start : start + length] for start in range(0, len(steps), length))
    threads = threads_of_each(jobs)
    others = {*multiprocessing.active_children()}
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), spawn, _start, (threads, stop))
    waiting: deque[Any] = deque()
    try:
        while waiting or pieces:
            while pieces and len(waiting) < _AHEAD * jobs:
                piece = pieces.popleft()
                waiting.append((piece, pool.submit(_evaluated, pickled, piece)))
            piece, future = waiting[0]
            results, failure = future.result()
            waiting.popleft()
            yield from results
            if failure is not None:
                raise failure
            if left := piece[len(results) :]:
                waiting.appendleft((left, pool.submit(_evaluated, pickled, left)))
    except BrokenProcessPool as error:
        raise TrajstoreError(
            f"a process that evaluated step {piece[0]} or a later one was killed, perhaps because "
            "the memory was full; give fewer jobs"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in {*multiprocessing.active_children()} - others:
            process.join(_PATIENCE)
            process.terminate()
        pool.shutdown()


def _start(threads: int, stop: Event) -> None:
    """Prepare a process. It ends when the first one ends, for whatever reason."""
    global _stop  # noqa: PLW0603
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    first: Any = multiprocessing.parent_process()
    first.join()
    os._exit(1)


@cache
def _evaluator(pickled: bytes) -> Callable[[Sequence[int]], Iterable[xr.Dataset]]:
    worker, arguments = pickle.loads(pickled)
    return worker(*arguments)  # type: ignore[no-any-return]


def _evaluated(
    pickled: bytes, steps: Sequence[int]
) -> tuple[list[xr.Dataset], TrajstoreError | None]:
    """Return the results of the first steps, and the error of the next one."""
    results: list[xr.Dataset] = []
    began = time.monotonic()
    try:
        for result in _evaluator(pickled)([] if _stop.is_set() else steps):
            results.append(result)
            if _stop.is_set() or time.monotonic() - began > _PATIENCE:
                break
    except TrajstoreError as error:
        error.add_note(traceback.format_exc())
        return results, error
    return results, None


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
    if isinstance(function, str):
        load_function(function)  # its errors are reported before a process starts
    about = {
        "run": location(run).name,
        "created": stored.attributes.get("created"),
        "function": _name(function),
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
                for result in _results(rows, function, constructor, missing.tolist(), jobs):
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
        self._stored = StoredModel(run)
        self._model = StepModel(self._stored, build)
        self._in_float32 = False
        if config := self._stored.attributes.get("config"):
            from trajstore.trainers.config import RunConfig  # which an own loop does without

            self._in_float32 = RunConfig.parse(config).training.products == "float32"

    def __call__(self, steps: Sequence[int]) -> Iterator[xr.Dataset]:
        """Yield the results of steps, in increasing order.

        Raises
        ------
        InvalidArgument
            If the function raises an error; the message has the step.
        """
        for step, weights in self._stored.weights(steps):
            self._model.set(weights)
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
    own_frames = [frame for frame in frames if code and frame.filename == code.co_filename]
    return (own_frames or frames)[-1]


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


def _name(function: Evaluation | str) -> str:
    """Return the name of a function in messages, and in the store."""
    return str(getattr(function, "__qualname__", function))
