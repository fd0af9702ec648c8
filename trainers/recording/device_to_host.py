"""The transfer of one row from the training device to the writer's block.

On the CPU a tensor is copied once, directly to its place in the block; from MPS the same copy
crosses to the host. On CUDA the training stream only makes copies in one piece of memory of the
device. A second stream copies that to pinned memory, and a thread copies it to the block. So
neither the training stream nor the training thread waits for the bus.

Rows go to a `RunWriter`, or to a `ComparedRun`, which compares them with those of a run.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import RecordingError
from trajstore.store.metadata.block_plan import Layout
from trajstore.trainers.recording.torch_internals import copy_each
from trajstore.values.native_types import native_type

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that can be recorded."""


@functools.cache  # a recording asks for each number of each step
def type_name(kind: torch.dtype | type) -> str:
    """Return the name of a type without its module."""
    return kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("torch.")


@functools.cache
def joint_type(types: frozenset[torch.dtype]) -> torch.dtype:
    """Return the smallest type that holds all values of each."""
    return functools.reduce(torch.promote_types, types)


def check_joinable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise an error if tensors cannot form one vector.

    Raises
    ------
    RecordingError
        If their devices differ, or a type is not one of floating-point numbers.
    """
    first: tuple[str, torch.Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise RecordingError(
                f"{name} has the type {tensor.dtype}, expected one of "
                f"{', '.join(map(str, FLOATS))}; record matrix instead of everything"
            )
        first = first or (name, tensor)
        if tensor.device != first[1].device:
            raise RecordingError(
                f"{first[0]} is on {first[1].device}, but {name} is on {tensor.device}; move all "
                "parameters to one device, or record matrix instead of everything"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedVector:
    """Tensors, one after another; each is copied once, to its place in a vector.

    Attributes
    ----------
    like : sequence of tensor
        Tensors of the shapes, for those that are missing.
    tensors : sequence of tensor or None
    dtype : torch.dtype
        Type of the vector.
    missing : float
        Value in place of None.
    factor : float
        Factor of the vector.
    """

    like: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor | None]
    dtype: torch.dtype
    missing: float = 0.0
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vector, (element,)."""
        pairs = zip(self.like, self.tensors, strict=True)
        return (sum([(like if tensor is None else tensor).numel() for like, tensor in pairs]),)

    def on_host(self) -> torch.Tensor:
        """Return a new vector on the CPU."""
        vector = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.copy_to(vector)
        return vector

    def copy_to(self, place: torch.Tensor) -> None:
        """Copy the tensors to a vector, (element,)."""
        present = [tensor for tensor in self.tensors if tensor is not None]
        devices = {tensor.device for tensor in present}
        first = present[0] if present else place
        device = first.device
        if len(present) < len(self.tensors):
            present = [
                first.new_full((like.numel(),), self.missing, dtype=place.dtype)
                if tensor is None
                else tensor
                for like, tensor in zip(self.like, self.tensors, strict=True)
            ]
        if len(devices) > 1:
            present = [tensor.to(device) for tensor in present]
        flat = [*map(torch.Tensor.flatten, present)]
        if device == place.device:
            torch.cat(flat, out=place)
        else:  # one copy, one wait of the host
            place.copy_(torch.cat(flat))
        if self.factor != 1.0:
            place.mul_(self.factor)


_INTEGER_OF_SIZE = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have one type, shape and bit patterns."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if _has_words(a) and _has_words(b):
        return torch.equal(a.view(torch.int64), b.view(torch.int64))
    return torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of the elements as integers, a view."""
    return tensor.view(_INTEGER_OF_SIZE[tensor.itemsize])


def _has_words(tensor: torch.Tensor) -> bool:
    """Return True if the rows of a tensor are whole words, which are compared twice as fast."""
    words = 8 // tensor.itemsize or 1
    if not tensor.ndim or tensor.shape[-1] % words or tensor.storage_offset() % words:
        return False
    return tensor.is_contiguous()


class RowTarget(Protocol):
    """What takes the rows of a training: a `RunWriter`, or a `ComparedRun`."""

    @property
    def layout(self) -> Layout:
        """Arrays of the run, and rows of a block."""

    def next_rows(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Return memory for the next rows, at most so many."""

    def commit_row(self, step: int) -> None:
        """Take the filled row as the state after a step."""


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
    signed = np.dtype(f"i{native_type(native).itemsize}")
    return torch.from_numpy(place.view(signed)).view(getattr(torch, native))


class RowPlaces:
    """The places of the rows in the blocks of a writer, one after another.

    The tensors over a block are made once.
    """

    def __init__(self, writer: RowTarget) -> None:
        self._writer = writer
        self._block: dict[str, torch.Tensor] = {}
        self._next_place = self._end = 0

    def next_row(self) -> Row:
        """Return the places of the next row; at the end of a block the writer may need time."""
        if self._next_place == self._end:
            memory = self._writer.next_rows(self._writer.layout.block_rows)
            arrays = self._writer.layout.arrays
            self._block = {
                name: place_tensor(place, arrays[name].native.name)
                for name, place in memory.items()
            }
            self._next_place, self._end = 0, len(next(iter(memory.values())))
        self._next_place += 1
        return {name: places[self._next_place - 1] for name, places in self._block.items()}

    def commit(self, step: int) -> None:
        """Pass the row to the writer as the state after `step`."""
        self._writer.commit_row(step)

    def release(self) -> None:
        """Release the block."""
        self._block, self._next_place, self._end = {}, 0, 0


def _fill(places: Row, values: Mapping[str, Value]) -> None:
    """Copy values to their places."""
    tensors = {k: value for k, value in values.items() if not isinstance(value, JoinedVector)}
    if len(tensors) < len(values):
        for name, value in values.items():
            if isinstance(value, JoinedVector):
                value.copy_to(places[name])
    copy_each([*map(places.__getitem__, tensors)], [*tensors.values()])


def copy_to_host(values: Mapping[str, Value]) -> Row:
    """Return copies of the values of a first row, before the run has their types."""
    return {
        name: value.on_host() if isinstance(value, JoinedVector) else value.to("cpu", copy=True)
        for name, value in values.items()
    }


class DirectTransfer:
    """Copies values at once, directly to the block.

    Parameters
    ----------
    writer : RowTarget
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
    writer : RowTarget
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


Transfer = DirectTransfer | DeferredTransfer


def open_transfer(writer: RowTarget, device: torch.device) -> Transfer:
    """Return the transfer for a device.

    Parameters
    ----------
    writer : RowTarget
    device : torch.device
    """
    return DeferredTransfer(writer, device) if device.type == "cuda" else DirectTransfer(writer)
