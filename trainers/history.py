"""The run of one parameter while it grows: from the values of a step to a whole row."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping

import torch

from trainers.existing import ExistingRun
from trainers.motion import ULP_TYPES, token_norm, ulp_l1
from trainers.parameter import RecordedParameter
from trainers.transfer import Transfer, open_transfer
from trajstore.errors import RecordingError
from trajstore.layout import format_bytes
from trajstore.schema import VARIABLES
from trajstore.writer import RunWriter

__all__ = ["MOMENTS", "History", "WriterFactory"]

WriterFactory = Callable[[dict[str, str]], RunWriter]
"""Makes the run, given the native type of each variable."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class History:
    """Rows of one parameter.

    The run is created when the first optimizer step is complete, because only then every native
    type is known; until then the initial state and the rows are held here.

    Parameters
    ----------
    parameter : RecordedParameter
    ids : tensor of int64, optional
        Recorded rows of the matrix; all without it.
    variables : tuple of str
        What to record.
    required : frozenset of str
        Those that a run must not go without. Of the others, what the first step does not show
        (moments of SGD, logits of a model without an unembedding) is left out.
    create : callable
        Makes the run.
    every : int
        Steps from one row to the next.
    first_step : int
        Optimizer steps taken before.
    existing : ExistingRun, optional
        Run that is to go on, in place of a new one; nothing of it changes before `open`.

    Attributes
    ----------
    rows : int
        Rows handed over for storing.
    last_step : int
        Step of the last of them.
    """

    def __init__(
        self,
        parameter: RecordedParameter,
        *,
        ids: torch.Tensor | None,
        variables: tuple[str, ...],
        required: frozenset[str],
        create: WriterFactory,
        every: int,
        first_step: int,
        existing: ExistingRun | None = None,
    ) -> None:
        self.parameter = parameter
        self.variables = variables
        self.writer: RunWriter | None = None
        tensor = parameter.tensor.detach()
        if "W_ulp_l1" in variables and tensor.dtype not in ULP_TYPES:
            raise RecordingError(
                f"W_ulp_l1 of {parameter.name}: got {tensor.dtype}, expected one of "
                f"{', '.join(map(str, ULP_TYPES))}; leave it out of what is recorded"
            )
        self._ids = None if ids is None else ids.to(tensor.device)
        self._required = required
        self._create = create
        self._every = every
        self._first_step = first_step
        self._initial = self._selected(tensor).to("cpu", copy=True)
        self._previous: torch.Tensor | None = None
        if "W_step_norm" in variables or "W_ulp_l1" in variables:
            self._previous = self._selected(tensor).clone()
        self._transfer: Transfer | None = None
        self._pending: list[tuple[int, dict[str, torch.Tensor]]] = []
        self._row: dict[str, torch.Tensor] = {}
        self._complete_step: int | None = None
        self.rows = 0
        self.last_step = first_step
        self._existing = existing
        if existing is not None:
            existing.check(self._initial, first_step)
            self.variables = existing.variables

    def open(self) -> None:
        """Take up the run that is to go on, after its last row; a new one is made later.

        Raises
        ------
        RunLocked
            If another process writes to it.
        """
        existing = self._existing
        if existing is None:
            return
        if self._previous is not None:
            self._previous.copy_(existing.last_weights)
        self.writer = existing.open()
        self._existing = None
        with self._full_disk():
            self._transfer = open_transfer(self.writer, self.parameter.tensor.device, [])
        self.rows, self.last_step = existing.rows, existing.last_step
        self._initial = self._initial.new_empty(0)

    def selected(self, tensor: torch.Tensor) -> torch.Tensor:
        """The recorded tokens of a tensor whose first dimension is the vocabulary."""
        return self._selected(tensor.detach())

    def take(self, name: str, value: torch.Tensor) -> None:
        """Copy a value of the step in progress to where it will be stored; the last one counts.

        Parameters
        ----------
        name : str
            Ignored if it is not recorded.
        value : tensor
            Of the whole vocabulary, where the variable has a token dimension.

        Raises
        ------
        RecordingError
            If it has another type or shape than in the first row.
        """
        if name not in self.variables:
            return
        value = value.detach()
        ids = self._ids if VARIABLES[name].dims[1:2] == ("token",) else None
        if self._transfer is None:
            chosen = value if ids is None else value.index_select(0, ids)
            self._row[name] = chosen.to("cpu", copy=True)
            return
        self._check(name, value, ids)
        self._put(name, value, ids)

    def take_motion(self) -> None:
        """Take how far W moved since the previous row."""
        if self._previous is not None:
            now = self.selected(self.parameter.tensor)
            self._take_selected("W_step_norm", token_norm(now, self._previous))
            self._take_selected("W_ulp_l1", ulp_l1(now, self._previous))

    def take_grad_norm(self, gradient: torch.Tensor) -> None:
        """Take the length of each token's gradient."""
        if "grad_token_norm" in self.variables:
            self._take_selected("grad_token_norm", token_norm(self.selected(gradient)))

    def taken(self, name: str) -> torch.Tensor | None:
        """Copy of a value of the step in progress, of the recorded tokens, if there is one."""
        return self._row.get(name)

    def finish(self, step: int, *, skipped: bool) -> None:
        """Complete the row of `step`.

        Raises
        ------
        RecordingError
            If a variable was not seen, or the disk is full.
        """
        recorded = step % self._every == 0
        if self._transfer is None:
            self._pending.append((step, self._row))
            if not skipped:
                self._begin()
            self._row = {}
            self._complete_step = None if recorded else step
            return
        self._check_whole(step, self._row)
        self._row = {}
        self._complete_step = step
        if recorded:
            self._commit(step)

    def close(self, *, complete: bool) -> None:
        """Commit the last step if it is whole, and close the run."""
        if self.writer is None:
            return
        with self._full_disk():
            try:
                if self._complete_step is not None:
                    self._commit(self._complete_step)
                if self._transfer is not None:  # or it could not be opened
                    self._transfer.close()
            finally:
                self.writer.close("complete" if complete else "interrupted")

    def _selected(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._ids is None else tensor.index_select(0, self._ids)

    def _take_selected(self, name: str, value: torch.Tensor) -> None:
        if name not in self.variables:
            return
        if self._transfer is None:
            self._row[name] = value.to("cpu", copy=True)
        else:
            self._put(name, value, None)

    def _put(self, name: str, value: torch.Tensor, ids: torch.Tensor | None) -> None:
        assert self._transfer is not None
        with self._full_disk():
            self._row[name] = self._transfer.put(name, value, ids)
        # The row of the step before, if it was not handed over, is being written over.
        self._complete_step = None

    def _check(self, name: str, value: torch.Tensor, ids: torch.Tensor | None) -> None:
        assert self.writer is not None
        array = self.writer.layout.arrays[name]
        shape = value.shape if ids is None else (len(ids), *value.shape[1:])
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != array.native.name or tuple(shape) != array.row:
            raise RecordingError(
                f"{name} is now {dtype} of shape {tuple(shape)}, and was {array.native.name} of "
                f"shape {array.row} in the first row; a run cannot change that"
            )

    def _check_whole(self, step: int, row: Mapping[str, torch.Tensor]) -> None:
        unseen = [name for name in self.variables if name not in row]
        if unseen:
            raise RecordingError(
                f"step {step} did not show {', '.join(unseen)}, so its row is not whole; "
                f"{_remedy(unseen)}"
            )

    def _begin(self) -> None:
        """Create the run, with the initial state and the rows until now."""
        last_step, last = self._pending[-1]
        self.variables = tuple(
            name for name in self.variables if name in last or name in self._required
        )
        for step, row in self._pending:
            for name in MOMENTS:
                if name in last and name not in row:  # skipped before there was any state
                    row[name] = torch.zeros_like(last[name])
            self._check_whole(step, row)
        self.writer = self._create(
            {name: str(last[name].dtype).removeprefix("torch.") for name in self.variables}
        )
        start = {"zero": 0.0, "nan": float("nan")}
        initial = {
            name: self._initial
            if VARIABLES[name].row0 == "initial"
            else torch.full_like(last[name], start[VARIABLES[name].row0])
            for name in self.variables
        }
        rows = [(self._first_step, initial)]
        rows += [
            (step, {name: row[name] for name in self.variables})
            for step, row in self._pending
            if step % self._every == 0
        ]
        with self._full_disk():
            self._transfer = open_transfer(self.writer, self.parameter.tensor.device, rows)
        self.rows, self.last_step = len(rows), rows[-1][0]
        if last_step % self._every:
            for name in self.variables:
                self._transfer.put(name, last[name])
        else:
            self._keep_previous()
        self._pending.clear()
        self._initial = self._initial.new_empty(0)

    def _commit(self, step: int) -> None:
        assert self._transfer is not None
        with self._full_disk():
            self._transfer.commit(step)
        self.rows += 1
        self.last_step = step
        self._complete_step = None
        self._keep_previous()

    def _keep_previous(self) -> None:
        if self._previous is not None:
            self._previous.copy_(self.selected(self.parameter.tensor))

    def _full_disk(self) -> _FullDisk:
        assert self.writer is not None
        return _FullDisk(self.writer)


class _FullDisk:
    """Says what to do when the disk is full."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            writer = self._writer
            block = writer.bytes_recorded * writer.layout.block_rows // max(writer.rows, 1)
            free = shutil.disk_usage(writer.path.parent).free
            raise RecordingError(
                f"no space is left for {writer.path}: {format_bytes(free)} are free, and a block "
                f"of {writer.layout.block_rows} rows takes up to {format_bytes(block)}; its first "
                f"{writer.committed_rows} rows are whole; free some space, or record less"
            ) from error


def _remedy(unseen: list[str]) -> str:
    if "loss" in unseen:
        return "the model returns no loss, so tell it in every step with observe(loss=…)"
    if "logits" in unseen:
        return "tell them in every step with observe(logits=…)"
    if "grad" in unseen or "grad_token_norm" in unseen:
        return "the parameter got no gradient"
    return "leave it out of what is recorded"
