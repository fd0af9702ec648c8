"""Results of steps from several processes, in the order of the steps."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import xarray as xr

from trajstore.errors import InvalidArgument, TrajstoreError
from trajstore.threads import default_threads

__all__ = ["in_processes"]

Worker = Callable[..., Callable[[Sequence[int]], Iterable[xr.Dataset]]]
"""Returns a function that yields the results of some steps; called once in each process."""

_LONGEST = 16
"""Steps that a process evaluates between two requests for more."""

_PATIENCE = 2.0
"""Seconds until a process that does not end by itself is ended."""

_AHEAD = 4
"""Requests of each process whose results may wait for those of earlier steps."""


def in_processes(
    worker: Worker, arguments: tuple[Any, ...], steps: Sequence[int], jobs: int
) -> Iterator[xr.Dataset]:
    """Call ``worker(*arguments)`` in several processes, and the result with some of the steps.

    A process ends when this one ends, for whatever reason: it reads from a pipe that then closes.

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
        pickle.dumps((worker, arguments))
    except Exception as error:  # pickle raises many types
        raise InvalidArgument(
            f"the function cannot be passed to other processes ({error}); define it in a module, "
            "or give FILE.py:function"
        ) from error
    length = max(1, min(_LONGEST, len(steps) // (_AHEAD * jobs)))
    pieces = [steps[start : start + length] for start in range(0, len(steps), length)]
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or max(1, default_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(min(jobs, len(pieces))):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(theirs, worker, arguments, threads), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield from _in_order(pipes, pieces)
    finally:
        for pipe in pipes:
            pipe.close()  # each process ends when it reads or writes the next time
        for process in processes:
            process.join(_PATIENCE)
            process.terminate()
            process.join()


def _in_order(pipes: Sequence[Connection], pieces: Sequence[Sequence[int]]) -> Iterator[xr.Dataset]:
    """Distribute the steps, and yield the results in order."""
    results: list[list[Any]] = [[] for _ in pieces]
    idle = list(pipes)
    piece_of: dict[Connection, int] = {}
    given = 0
    for current, steps in enumerate(pieces):
        for place in range(len(steps)):
            while len(results[current]) <= place:
                # At most a few pieces wait in memory for an earlier one.
                while idle and given < min(len(pieces), current + _AHEAD * len(pipes)):
                    pipe = idle.pop()
                    _send(pipe, pieces[given])
                    piece_of[pipe] = given
                    given += 1
                for ready in wait(list(piece_of)):
                    pipe = cast(Connection, ready)
                    piece = piece_of[pipe]
                    results[piece].append(_received(pipe, pieces[piece]))
                    if isinstance(results[piece][-1], Exception):
                        del piece_of[pipe]  # its process has ended
                    elif len(results[piece]) == len(pieces[piece]):
                        del piece_of[pipe]
                        idle.append(pipe)
            result = results[current][place]
            if isinstance(result, Exception):
                raise result
            yield result
        results[current].clear()


def _send(pipe: Connection, steps: Sequence[int]) -> None:
    try:
        pipe.send(list(steps))
    except OSError as error:
        raise _killed(steps) from error


def _received(pipe: Connection, steps: Sequence[int]) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return _killed(steps)


def _killed(steps: Sequence[int]) -> TrajstoreError:
    return TrajstoreError(
        f"a process that evaluated steps {steps[0]} to {steps[-1]} was killed, perhaps because the "
        "memory was full; give fewer --jobs"
    )


def _run(pipe: Connection, worker: Worker, arguments: tuple[Any, ...], threads: int) -> None:
    """Evaluate steps until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(threads)
    try:
        steps = pipe.recv()
        try:
            evaluator = worker(*arguments)
            while True:
                for result in evaluator(steps):
                    pipe.send(result)
                steps = pipe.recv()
        except TrajstoreError as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
    except (EOFError, OSError):  # the first process has ended
        return
