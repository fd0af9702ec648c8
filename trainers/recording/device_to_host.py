"""The transfer of one row from the training device to the writer's block.

On the CPU a tensor is copied once, directly to its place in the block; from MPS the same copy
crosses to the host. On CUDA the training stream only makes copies in one piece of memory of the
device. A second stream copies that to pinned memory, and a thread copies it to the block. So
neither the training stream nor the training thread waits for the bus.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import RecordingError
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.flat_vectors import JoinedVector
from trajstore.trainers.recording.torch_internals import copy_each
from trajstore.values.native_types import NATIVE_TYPES

Value = torch.Tensor | JoinedVector
Row = dict[str, torch.Tensor]

_ALIGNED = 16  # bytes

_SLOTS = 3
"""Maximum number of rows in transit: one being filled, one on the bus, one being stored."""


def memory_in_transit(device: torch.device, row: Iterable[torch.Tensor]) -> int:
    """Return the bytes of host memory that the transfer of such rows takes, apart from the blocks.

    torch rounds each block of pinned memory up to a power of two.
    """
    if device.type != "cuda":
        return 0
    size = sum(_aligned(value.nbytes) for value in row)
    return _SLOTS << max(size - 1, 0).bit_length()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class _RowMemory:
    """Memory of one row, so that one copy carries the whole row; `places` are views of it."""

    def __init__(self, like: Row, **options: Any) -> None:
        size = sum(_aligned(value.nbytes) for value in like.values())
        self.whole = torch.empty(size, dtype=torch.uint8, **options)
        self.places: Row = {}
        begin = 0
        for name, value in like.items():
            part = self.whole[begin : begin + value.nbytes]
            self.places[name] = part.view(value.dtype).view(value.shape)
            begin += _aligned(value.nbytes)


def place_tensor(place: npt.NDArray[Any], native: str) -> torch.Tensor:
    """Return a tensor of the native type over the memory of native bits."""
    signed = np.dtype(f"i{NATIVE_TYPES[native].itemsize}")
    return torch.from_numpy(place.view(signed)).view(getattr(torch, native))


class RowPlaces:
    """The places of the rows in the blocks of a writer, one after another.

    The tensors over a block are made once.
    """

    def __init__(self, writer: RowTarget) -> None:
        self._writer = writer
        self._block: dict[str, torch.Tensor] = {}
        self._at = self._end = 0

    def next_row(self) -> Row:
        """Return the places of the next row; at the end of a block the writer may need time."""
        if self._at == self._end:
            given = self._writer.next_rows(self._writer.layout.block_rows)
            arrays = self._writer.layout.arrays
            self._block = {
                name: place_tensor(place, arrays[name].native.name) for name, place in given.items()
            }
            self._at, self._end = 0, len(next(iter(given.values())))
        self._at += 1
        return {name: places[self._at - 1] for name, places in self._block.items()}

    def commit(self, step: int) -> None:
        """Pass the row to the writer as the state after `step`."""
        self._writer.commit_row(step)

    def release(self) -> None:
        """Release the block."""
        self._block, self._at, self._end = {}, 0, 0


def _fill(places: Row, values: Mapping[str, Value]) -> None:
    """Copy values to their places."""
    tensors = {name: one for name, one in values.items() if not isinstance(one, JoinedVector)}
    if len(tensors) < len(values):
        for name, one in values.items():
            if isinstance(one, JoinedVector):
                one.copy_to(places[name])
    copy_each([*map(places.__getitem__, tensors)], [*tensors.values()])


class HostTransfer:
    """Copies values to host memory: those of the first rows, before the run has their types."""

    def put(self, values: Mapping[str, Value]) -> Row:
        """Return copies of values."""
        return {
            name: one.on_host() if isinstance(one, JoinedVector) else one.to("cpu", copy=True)
            for name, one in values.items()
        }

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
        self._places = RowPlaces(writer)
        self._row: Row = {}

    def put(self, values: Mapping[str, Value]) -> Row:
        """Copy values into the row that is being filled.

        Returns
        -------
        dict of str to tensor
            The copies, and others of the row. They do not change until the next `put` of a name.
        """
        if not self._row:  # not before it is needed
            self._row = self._places.next_row()
        _fill(self._row, values)
        return {name: self._row[name] for name in values}

    def commit(self, step: int) -> None:
        """Pass the row to the writer as the state after `step`, and start the next."""
        self._places.commit(step)
        self._row = {}

    def flush(self) -> None:
        """Wait for nothing: the rows are in their blocks."""

    def close(self) -> None:
        """Release the block."""
        self._row = {}
        self._places.release()


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
        self._places = RowPlaces(writer)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        like = self._next = self._places.next_row()
        self._slots = [_RowMemory(like, device="cpu", pin_memory=True) for _ in range(_SLOTS)]
        self._staging: _RowMemory | None = _RowMemory(like, device=device)
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

    def put(self, values: Mapping[str, Value]) -> Row:
        """Copy values as `DirectTransfer.put`; each copy is on the device of its value.

        A value of the host does not cross to the device and back, as the training would wait.
        """
        copies = {
            name: value.detach().clone()
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        }
        there = {name: value for name, value in values.items() if name not in copies}
        if there and self._carried is not None:
            # The device waits, not the host, and only if the last row is still in transit.
            torch.cuda.current_stream(self._device).wait_event(self._carried)
            self._carried = None
        assert self._staging is not None
        places = self._staging.places
        _fill(places, there)
        for name in there:
            self._host.pop(name, None)
        self._host |= copies
        return copies | {name: places[name] for name in there}

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
            assert self._staging is not None
            self._slots[number].whole.copy_(self._staging.whole, non_blocking=True)
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
        self._staging = None
        self._next = {}
        self._places.release()
        self._host = {}
        self._check()

    def _store(self) -> None:
        while (item := self._filled.get()) is not None:
            step, number, host, event = item
            try:
                if self._failure is None:
                    event.synchronize()
                    for name, place in (self._next or self._places.next_row()).items():
                        slot = self._slots[number].places
                        place.copy_(host[name] if name in host else slot[name])
                    self._next = {}
                    self._places.commit(step)
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
