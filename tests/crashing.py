"""Processes that record and are killed, and one that reads all the while.

Every row is made from its step alone, so whoever reads a run can tell whether a row is whole. A run
named `compact.zarr` has that encoding, and rows that follow from the gradient.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from bits_and_calls import random_bits
from forked_processes import processes
from still_timer import commit_now

from trajstore import RunWriter
from trajstore.values.native_types import narrow, native_type

TOKENS, HIDDEN, BLOCK = 40, 6, 4
TYPES = {"W": "bfloat16", "grad": "float16", "logits": "float32", "loss": "float32"}
COMPACT_TYPES = {"W": "bfloat16", "grad": "float16", "logits": "float32", "lr": "float64"}
SGD = {"class": "SGD", "hyperparameters": {"momentum": 0, "weight_decay": 0}}


_PAUSE = 0.01 if "TRAJSTORE_KILLS" in os.environ else 0.05
"""Seconds between two looks of a reader."""


def encoding_of(path: Any) -> str:
    """Encoding of a new run."""
    return "compact" if path.name.endswith("compact.zarr") else "delta"


def row(step: int, encoding: str = "delta") -> dict[str, Any]:
    """Values of a row, native bits."""
    if encoding == "compact":  # small integers, which sums keep
        steps = [random_bits((TOKENS, HIDDEN), each) & 3 for each in range(step + 1)]
        return {
            "W": (np.sum(steps, axis=0).astype("f4").view("u4") >> 16).astype("u2"),
            "grad": (-steps[-1].astype("f2")).view("u2"),
            "logits": random_bits((TOKENS,), step, 32).view("f4"),
            "lr": np.float64(1),
        }
    return {
        "W": random_bits((TOKENS, HIDDEN), step),
        "grad": random_bits((TOKENS, HIDDEN), step + 10_000),
        "logits": random_bits((TOKENS,), step, 32).view("f4"),
        "loss": random_bits((), step, 32).view("f4"),
    }


def create(path: Path, **options: Any) -> RunWriter:
    """Empty run of such rows."""
    encoding = encoding_of(path)
    arguments: dict[str, Any] = {
        "token": np.arange(TOKENS),
        "hidden": HIDDEN,
        "variables": COMPACT_TYPES if encoding == "compact" else TYPES,
        "encoding": encoding,
        "attributes": {"optimizer": SGD},
        "block_rows": BLOCK,
        "threads": 2,
        "commit_every": None,
    }
    return RunWriter.create(path, **arguments | options)


def extend(run: RunWriter, stop: int) -> None:
    """Append the rows up to so many."""
    for step in range(run.rows, stop):
        run.append(step, **row(step, encoding_of(run.path)))


def recorded(path: Path, rows: int, **options: Any) -> Path:
    """A run of so many such rows."""
    with create(path, **options) as run:
        extend(run, rows)
    return path


@dataclass
class KillAt:
    """Kills its process at one move of an object into its place: right before it, or right after.

    The moves of a commit are those of its shards, of the arrays' metadata files, and of the root.
    """

    move: int
    after: bool

    def install(self) -> None:
        """Count the moves of this process from now on."""
        moves = itertools.count(1)
        original = os.replace

        def replace(source: Any, target: Any) -> None:
            move = next(moves)  # of this call: other threads move objects meanwhile
            if move == self.move and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            original(source, target)
            if move == self.move and self.after:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace


def write_rows(
    path: Path,
    rows: int,
    kill: KillAt | None,
    told: Connection | None,
    *,
    by_time: bool = False,
) -> None:
    """Record up to so many rows, from wherever the run stands, telling each; in a process."""
    if kill is not None:
        kill.install()
    there = path.exists()
    writer = RunWriter.resume(path, commit_every=None) if there else create(path)
    with writer:
        for step in range(writer.rows, rows):
            writer.append(step=step, **row(step, encoding_of(path)))
            if by_time:
                commit_now(writer)
            if told is not None:
                told.send(step)


write_rows_by_time = partial(write_rows, by_time=True)
"""Each row is committed before the next one, wherever its block ends."""


def poll(
    path: Path,
    stop: Any,
    result: Connection,
    check: Callable[[xr.Dataset, list[int]], None] | None = None,
    *,
    restarts: bool = False,
) -> None:
    """Open a run with plain xarray, over and over, and check two of the rows that it shows.

    With `restarts`, what is recorded may begin again in a new folder, or cut the run, which may be
    open.
    """
    problems: list[str] = []
    opens = most = 0
    cut = False
    while not problems:
        last_look = stop.wait(_PAUSE)  # and leave the processor to the writer
        if path.exists():
            folder = path.stat().st_ino
            try:
                ds = xr.open_zarr(path)
                rows = ds.sizes["step"]
                assert ds.attrs["committed_rows"] == rows
                assert ds.step.values.tolist() == list(range(rows))
                if rows:
                    (check or _check)(ds, [opens % rows, rows - 1])
                most = max(most, rows)
                opens += 1
                cut = False
            except BaseException as error:
                if restarts and not cut and "open it again" in str(error):
                    cut = True
                elif not restarts or (path.exists() and path.stat().st_ino == folder):
                    problems.append(f"{type(error).__name__}: {error}")
        if last_look and opens:
            break
    result.send((opens, most, problems))


def _check(ds: xr.Dataset, at: list[int]) -> None:
    check_rows(ds.isel(step=at))


def check_rows(ds: xr.Dataset) -> None:
    """Fail unless every value of every row is what its step makes."""
    expected = [row(step, ds.attrs["encoding"]) for step in ds.step.values.tolist()]
    if not expected:
        return
    ds = ds.compute(scheduler="synchronous")
    bits = {name: np.stack([values[name] for values in expected]) for name in expected[0]}
    assert (ds.W.values.view("u4") == bits["W"].astype("u4") << 16).all()
    assert ds.logits.values.tobytes() == bits["logits"].tobytes()
    number = "loss" if "loss" in bits else "lr"
    assert ds[number].values.tobytes() == bits[number].tobytes()
    assert (narrow(ds.grad.values, native_type("float16")) == bits["grad"]).all()


def check(path: Path, rows: int) -> None:
    """Fail unless a reader sees so many rows, each whole."""
    ds = xr.open_zarr(path)
    assert ds.sizes["step"] == ds.attrs["committed_rows"] == rows
    assert ds.step.values.tolist() == list(range(rows))
    check_rows(ds)


class Reader:
    """A process that polls a run while the ``with`` block runs, and must find nothing wrong."""

    def __init__(self, path: Path, check: Callable[..., None] = poll) -> None:
        self._stop = processes.Event()
        self._result, there = processes.Pipe(duplex=False)
        self._process = processes.Process(target=check, args=(path, self._stop, there))
        self.opens = 0

    def __enter__(self) -> Reader:
        self._process.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._stop.set()
        opens, most, problems = self._result.recv()
        self._process.join()
        self.opens, self.most = opens, most
        if kind is None:
            assert not problems, f"after {opens} opens, at {most} rows: {problems[0]}"


def killed(target: Callable[..., None], *arguments: Any, after_step: int | None = None) -> bool:
    """Run a function in a process and tell whether it was killed.

    Parameters
    ----------
    target : callable
        Its last argument is a connection that it tells each step through, or None.
    *arguments : Any
        All but that.
    after_step : int, optional
        Kill it as soon as it tells that step; without it, it kills itself or ends.
    """
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(
        target=target, args=(*arguments, None if after_step is None else there)
    )
    process.start()
    there.close()
    if after_step is not None:
        try:
            while here.recv() < after_step:
                pass
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        except EOFError:
            pass  # it ended by itself
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), f"exit code {process.exitcode}"
    return process.exitcode != 0
