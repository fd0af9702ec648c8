"""A run that is there already, and is to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trainers.transfer import place_tensor
from trajstore.bits import narrow, native_type
from trajstore.errors import InvalidArgument, NothingToResume
from trajstore.group import open_group
from trajstore.schema import COORDINATES, STEP
from trajstore.writer import RunWriter

__all__ = ["ExistingRun"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExistingRun:
    """A run, cut to the rows that come before the next step. Made by `find`.

    Attributes
    ----------
    path : Path
    variables : tuple of str
        Its own, in its own order.
    rows : int
        Rows that it keeps.
    last_step : int
        Step of the last of them.
    last_weights : tensor, (token, hidden)
        W in that row, of its native type, on the CPU.
    attributes : mapping
        Attributes of the root that change.
    memory : int
        Bytes for all buffers.
    fsync : bool
    """

    path: Path
    variables: tuple[str, ...]
    rows: int
    last_step: int
    last_weights: torch.Tensor
    attributes: Mapping[str, Any]
    memory: int
    fsync: bool

    @classmethod
    def find(
        cls,
        path: Path,
        *,
        step: int,
        recording: Mapping[str, Any],
        variables: tuple[str, ...],
        required: frozenset[str],
        tokens: npt.NDArray[np.int64],
        attributes: Mapping[str, Any],
        memory: int,
        fsync: bool,
    ) -> Self:
        """Look at a run, without changing anything.

        Parameters
        ----------
        path : Path
        step : int
            Optimizer steps taken; the next row is of a later one.
        recording : mapping
            Parameter and manner of recording, which must be the run's.
        variables : tuple of str
            To record; the run's must be among them.
        required : frozenset of str
            Those that the run must have.
        tokens : ndarray of int64, (token,)
            Ids of the recorded tokens, which must be the run's.
        attributes, memory, fsync
            See the class.

        Raises
        ------
        NothingToResume
            If the run does not reach that step.
        InvalidArgument
            If it was recorded in another way.
        """
        group = open_group(path)
        _check_same(path, group.attrs.asdict().get("recording", {}), recording)
        held = tuple(name for name in group.array_keys() if name not in {STEP.name, *COORDINATES})
        missing = sorted(set(held) - set(variables)) + sorted(required - set(held))
        if missing:
            raise InvalidArgument(
                f"record: {path} holds {', '.join(held)}, and {', '.join(variables)} are to be "
                f"recorded; a run that goes on keeps its variables, so see to {', '.join(missing)}"
            )
        if not np.array_equal(np.asarray(group["token"][...]), tokens):
            raise InvalidArgument(
                f"tokens: those of {path} are not those that are to be recorded; a run that goes "
                "on keeps its tokens"
            )
        steps = np.asarray(group[STEP.name][...])
        # A row that is only there because training ended is none of a longer training.
        regular = steps[(steps % recording["every"] == 0) | (np.arange(steps.size) == 0)]
        kept = regular[regular <= step]
        if not kept.size or kept[-1] != max(steps[0], step - step % recording["every"]):
            reached = f"step {steps[-1]}" if steps.size else "no step"
            raise NothingToResume(
                f"{path} has come to {reached}, and the training goes on after step {step}; go on "
                "from an earlier checkpoint, or record anew"
            )
        W: Any = group["W"]
        native = native_type(str(W.attrs["native_dtype"]))
        bits = narrow(np.asarray(W[kept.size - 1]), native)
        return cls(
            path=path,
            variables=held,
            rows=int(kept.size),
            last_step=int(kept[-1]),
            last_weights=place_tensor(bits, native.name),
            attributes=attributes,
            memory=memory,
            fsync=fsync,
        )

    def check(self, W: torch.Tensor, step: int) -> None:
        """Insist that the training goes on with the weights that the run has.

        Parameters
        ----------
        W : tensor, (token, hidden)
            Of the recorded tokens, on the CPU.
        step : int
            Optimizer steps taken.

        Raises
        ------
        NothingToResume
            If a bit differs.
        """
        if step == self.last_step and not _same_bits(W, self.last_weights):
            raise NothingToResume(
                f"the weights that the training goes on with are not those of {self.path} at step "
                f"{step}; load the checkpoint of that step, or record anew"
            )

    def open(self) -> RunWriter:
        """Writer of the run after its rows.

        Raises
        ------
        RunLocked
            If another process writes to it.
        """
        return RunWriter.resume(
            self.path,
            rows=self.rows,
            attributes=self.attributes,
            memory=self.memory,
            fsync=self.fsync,
        )


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if before.get(name) != value:
            raise InvalidArgument(
                f"{name}: {path} was recorded with {before.get(name)}, got {value}; a run that "
                "goes on is recorded as before"
            )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
