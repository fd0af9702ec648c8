"""A few numbers of every n-th row, for the tracker of the training."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.schema import STEP
from trajstore.store.metadata.block_plan import Layout
from trajstore.values.native_types import widen
from trajstore.values.norms import vector_norm

logger = logging.getLogger(__name__)

Block = Mapping[str, npt.NDArray[Any]]


@dataclass(eq=False)
class LoggedRows:
    """Passes numbers of committed rows to a tracker, in the thread that has written them.

    They are ``trajstore/step``, ``loss``, ``rows`` and ``bytes_on_disk``, and by population
    (``dead`` and ``live``, or ``all`` without labels) ``grad_norm_POPULATION``, the mean L2 norm of
    the tokens' gradients, and ``unchanged_POPULATION``, the fraction of tokens whose vector has the
    bits of the row before. Numbers of variables that the run lacks are left out.

    Parameters
    ----------
    log : callable
        Takes a dict of numbers. Called in a copy of this thread's context, where trackers keep
        their run. After an error it is not called again; the error is logged.
    every : int
        The first row at or after each multiple of so many steps is passed.
    layout : Layout
        Of the run.
    is_dead : ndarray of bool, (token,), optional
        Of the recorded tokens.
    last_step : int
        Step of the last row before the recording, which is not passed; then of the last row.
    prefix : str
        Prefix of the names.
    """

    log: Callable[[dict[str, float]], Any]
    every: int
    layout: Layout
    is_dead: InitVar[npt.NDArray[np.bool_] | None]
    _: KW_ONLY
    last_step: int
    prefix: str

    def __post_init__(self, is_dead: npt.NDArray[np.bool_] | None) -> None:
        self._context = contextvars.copy_context()
        masks = {"all": slice(None)} if is_dead is None else {"dead": is_dead, "live": ~is_dead}
        self._masks: dict[str, Any] = {
            name: mask for name, mask in masks.items() if isinstance(mask, slice) or mask.any()
        }
        self._before: npt.NDArray[Any] | None = None  # bits of W in the last row of the last block
        self._has_failed = False

    def __call__(self, block: Block, first_row: int, bytes_written: int) -> None:
        """Pass the new rows of a block that was committed, as `RunWriter.on_commit`.

        Parameters
        ----------
        block : mapping of str to ndarray, (row, …)
            Native bits of its rows so far.
        first_row : int
            Number of its first row.
        bytes_written : int
            Bytes of the run on disk.
        """
        if self._has_failed:
            return
        try:
            for row, step in enumerate(block[STEP.name].tolist()):
                is_next = step // self.every > self.last_step // self.every
                self.last_step = max(step, self.last_step)
                if is_next:
                    numbers = self._numbers(block, row)
                    numbers |= {"step": step, "rows": first_row + row + 1}
                    numbers["bytes_on_disk"] = bytes_written
                    named = {f"{self.prefix}{name}": each for name, each in numbers.items()}
                    self._context.run(self.log, named)
            if "W" in block and len(block["W"]) == self.layout.block_rows:
                self._before = block["W"][-1].copy()
        except Exception:  # a tracker can raise anything, which must not end the recording
            self._has_failed = True
            logger.exception("log= failed and is not called again; the recording continues")

    def _numbers(self, block: Block, row: int) -> dict[str, float]:
        def values(name: str) -> npt.NDArray[Any]:
            return widen(block[name][row], self.layout.arrays[name].native)

        numbers = {"loss": float(values("loss"))} if "loss" in block else {}
        found: dict[str, npt.NDArray[Any]] = {}
        if "grad_token_norm" in block:
            found["grad_norm"] = values("grad_token_norm")
        elif "grad" in block:
            found["grad_norm"] = vector_norm(values("grad"))
        before = block["W"][row - 1] if row and "W" in block else self._before
        if "W" in block and before is not None:
            found["unchanged"] = (block["W"][row] == before).all(-1)
        for kind, each in found.items():
            for name, mask in self._masks.items():
                numbers[f"{kind}_{name}"] = float(each[mask].mean())
        return numbers
