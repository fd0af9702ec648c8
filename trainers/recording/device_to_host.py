"""The transfer of one row from the training device to the writer's block.

On the CPU a tensor is copied once, directly to its place in the block; from MPS the same copy
crosses to the host. On CUDA the training stream only makes a copy on the device. A second stream
copies it to pinned memory, and a thread copies it to the block. So neither the training stream nor
the training thread waits for the bus.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import RecordingError
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.flat_vectors import JoinedVector
from trajstore.values.native_types import NATIVE_TYPES

Value = torch.Tensor | JoinedVector

_SLOTS = 3
"""Maximum number of rows in transit: one being filled, one on the bus, one being stored."""


def memory_in_transit(device: torch.device, row: Iterable[torch.Tensor]) -> int:
    """Return the bytes of host memory that the transfer of such rows takes, apart from the blocks.

    torch rounds each block of pinned memory up to a power of two.
    """
    if device.type != "cuda":
        return 0
    return _SLOTS * sum(1 << max(value.nbytes - 1, 0).bit_length() for value in row)


def place_tensor(place: npt.NDArray[Any], native: str) -> torch.Tensor:
    """Return a tensor of the native type over the memory of native bits."""
    signed = np.dtype(f"i{NATIVE_TYPES[native].itemsize}")
    return torch.from_numpy(place.view(signed)).view(getattr(torch, native))


def _places(writer: RowTarget) -> dict[str, torch.Tensor]:
    return {
        name: place_tensor(place, writer.layout.arrays[name].native.name)
        for name, place in writer.next_row().items()
    }


def _fill(place: torch.Tensor, value: Value, ids: torch.Tensor | None) -> None:
    if isinstance(value, JoinedVector):
        value.copy_to(place)
    elif ids is None:
        place.copy_(value)
    elif value.device == place.device:
        torch.index_select(value, 0, ids, out=place)
    else:
        place.copy_(value.index_select(0, ids))


class HostTransfer:
    """Copies values to host memory: those of the first rows, before the run has their types."""

    def put(self, name: str, value: Value, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of a value, or of the rows `ids` of it."""
        if isinstance(value, JoinedVector):
            return value.on_host()
        chosen = value if ids is None else value.index_select(0, ids)
        return chosen.to("cpu", copy=True)

    def commit(self, step: int) -> None:
        """Keep nothing: the recorder has the row."""

    def flush(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Release nothing."""


class DirectTransfer:
    """Copies values at once, directly to the block.

    Parameters
    ----------
    writer : RunWriter or ComparedRun
    """

    def __init__(self, writer: RowTarget) -> None:
        self._writer = writer
        self._row: dict[str, torch.Tensor] = {}

    def put(self, name: str, value: Value, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a value, or the rows `ids` of it, into the row that is being filled.

        Returns
        -------
        tensor
            The copy, which does not change until the next `put` of that name.
        """
        if not self._row:
            # Only when it is needed: at the end of a block the writer may need time for a new one.
            self._row = _places(self._writer)
        _fill(self._row[name], value, ids)
        return self._row[name]

    def commit(self, step: int) -> None:
        """Pass the row to the writer as the state after `step`, and start the next."""
        self._writer.commit_row(step)
        self._row = {}

    def flush(self) -> None:
        """Wait for nothing: the rows are in their blocks."""

    def close(self) -> None:
        """Release the block."""
        self._row = {}


class DeferredTransfer:
    """Copies values on the device, and asynchronously to the host and the block.

    Parameters
    ----------
    writer : RunWriter or ComparedRun
        Only this transfer's thread uses it from now on.
    device : torch.device
        CUDA device of the tensors. A separate stream copies to pinned memory.
    """

    def __init__(self, writer: RowTarget, device: torch.device) -> None:
        self._writer = writer
        self._device = device
        self._stream = torch.cuda.Stream(device)
        shapes = _places(writer)
        self._slots = [
            {name: torch.empty_like(place, pin_memory=True) for name, place in shapes.items()}
            for _ in range(_SLOTS)
        ]
        self._staging = {
            name: torch.empty_like(place, device=device) for name, place in shapes.items()
        }
        self._host: dict[str, torch.Tensor] = {}  # values of the row that the host has
        self._carried: torch.cuda.Event | None = None
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(_SLOTS):
            self._free.put(slot)
        self._filled: queue.SimpleQueue[
            tuple[int, int, dict[str, torch.Tensor], torch.cuda.Event] | None
        ] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._store, name="trajstore-transfer", daemon=True)
        self._thread.start()

    def put(self, name: str, value: Value, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a value as `DirectTransfer.put`; the copy is on the device of the value.

        A value of the host does not cross to the device and back, as the training would wait.
        """
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            chosen = value.detach() if ids is None else value.detach().index_select(0, ids)
            self._host[name] = chosen.clone()
            return self._host[name]
        if self._carried is not None:
            # The device waits, not the host, and only if the last row is still in transit.
            torch.cuda.current_stream(self._device).wait_event(self._carried)
            self._carried = None
        self._host.pop(name, None)
        _fill(self._staging[name], value, ids)
        return self._staging[name]

    def commit(self, step: int) -> None:
        """Send the row as the state after `step`.

        Raises
        ------
        RecordingError
            If an earlier row could not be stored.
        """
        self._check()
        number = self._free.get()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, place in self._slots[number].items():
                if name not in self._host:
                    place.copy_(self._staging[name], non_blocking=True)
            # The thread that waits for it sleeps, and leaves its core to the training.
            event = self._carried = torch.cuda.Event(blocking=True)
            event.record()
        self._filled.put((step, number, self._host, event))
        self._host = {}

    def flush(self) -> None:
        """Wait until all rows are in their blocks.

        Raises
        ------
        RecordingError
            If a row could not be stored.
        """
        for slot in [self._free.get() for _ in range(_SLOTS)]:
            self._free.put(slot)
        self._check()

    def close(self) -> None:
        """Wait until all rows are in their blocks, and release the memory of the rows.

        Raises
        ------
        RecordingError
            If a row could not be stored.
        """
        self._filled.put(None)
        self._thread.join()
        self._slots.clear()
        self._staging.clear()
        self._host = {}
        self._check()

    def _store(self) -> None:
        while (item := self._filled.get()) is not None:
            step, number, host, event = item
            try:
                if self._failure is None:
                    event.synchronize()
                    for name, place in _places(self._writer).items():
                        place.copy_(host[name] if name in host else self._slots[number][name])
                    self._writer.commit_row(step)
            except BaseException as error:
                self._failure = error  # raised in the thread that trains
            self._free.put(number)

    def _check(self) -> None:
        if self._failure is not None:
            raise RecordingError(
                f"the recording stopped: {self._failure}; the committed rows are complete"
            ) from self._failure


Transfer = HostTransfer | DirectTransfer | DeferredTransfer


def open_transfer(writer: RowTarget, device: torch.device) -> Transfer:
    """Return the transfer for a device.

    Parameters
    ----------
    writer : RunWriter or ComparedRun
    device : torch.device
    """
    return DeferredTransfer(writer, device) if device.type == "cuda" else DirectTransfer(writer)
