"""Files of `torch.save`: tensors, numbers and strings in dictionaries and lists.

Lists that grew by one entry per step are arrays: lists of numbers, of tensors of one shape, or of
dictionaries with the same keys. So are tensors under the numbers of their steps.

Only this module of the formats needs torch, which it imports when a file is opened. It unpickles
only tensors and plain values (``weights_only=True``), so a file cannot run code.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, needs_extra
from trajstore.formats.array_file import ArrayFile
from trajstore.values.native_types import NATIVE_TYPES

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

_DEEPEST = 8
_MOST_ITEMS = 1 << 16
_TYPES = (*NATIVE_TYPES, "int64", "int32", "int16", "int8", "uint8", "uint16", "bool")


class TorchFile(ArrayFile):
    """A `.pt` file. Tensors stay on disk until they are read.

    Keys are the paths of tensors: keys joined by periods. Attributes are plain values. Tensors of
    unsupported types, layouts or devices are not read.

    Raises
    ------
    MissingExtra
        If torch is not installed.
    """

    format = "torch"

    def _open(self) -> None:
        subject = f"{self.path}, a file of torch.save,"
        with needs_extra(subject, "torch", "save the tensors as safetensors"):
            import torch
        self._held: dict[str, Any] = {}
        self._places: dict[Any, str] = {}  # tied tensors are stored once
        self._files.callback(self._held.clear)
        for key, value in _leaves(self._loaded(torch), "", 0):
            if len(self._held) + len(self.attributes) + len(self.unread) >= _MOST_ITEMS:
                raise FormatError(
                    f"{self.path} holds more than {_MOST_ITEMS} values; save only the tensors to "
                    "import"
                )
            if isinstance(value, list):
                self._take(torch, key, value, (len(value),))
            elif isinstance(value, np.ndarray | torch.Tensor):
                self._take(torch, key, [torch.as_tensor(value)], ())
            else:
                self.attributes[key] = value

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        import torch

        source = self._held[key] if outer is None else self._held[key][outer]
        if isinstance(source, list):
            source = torch.stack(source[rows])
        elif source.ndim:
            source = source[rows]
        tensor = source.detach().contiguous()
        dtype = self.dtype(key)
        if dtype not in NATIVE_TYPES:
            return np.array(tensor.numpy())
        native = NATIVE_TYPES[dtype]
        signed = tensor.view(getattr(torch, f"int{8 * native.itemsize}"))
        return np.array(signed.numpy()).view(native.bits)

    def _loaded(self, torch: Any) -> Any:
        size = self.path.stat().st_size
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the age of the format
                # Files of torch before 1.6 are no archives, cannot be mapped, and are read whole.
                in_place = zipfile.is_zipfile(self.path)
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=in_place)
        except Exception as error:  # a damaged file can raise anything in the unpickler
            text = str(error).strip().partition("\n")[0]
            if isinstance(error, pickle.UnpicklingError):
                # torch's own advice would allow the file to run code.
                text = (
                    "it is damaged, or holds Python objects, which could run code and are never "
                    "loaded; save a dictionary of its tensors"
                )
            raise FormatError(
                f"torch cannot read {self.path} ({size} bytes) as tensors and plain values: "
                f"{text or type(error).__name__}"
            ) from None

    def _take(
        self, torch: Any, key: str, tensors: list[torch.Tensor], rows: tuple[int, ...]
    ) -> None:
        """Add a tensor, or tensors of one shape and type as rows."""
        first = tensors[0]
        dtype = str(first.dtype).removeprefix("torch.")
        fault = next(filter(None, (_fault(torch, tensor, dtype) for tensor in tensors)), "")
        # A list that repeats one tensor could announce any size.
        if rows and not fault and sum(row.nbytes for row in tensors) > self.path.stat().st_size:
            fault = "a list that repeats one tensor, so earlier values are lost"
        if not fault and not rows and first.numel():
            place = (first.data_ptr(), first.shape, first.stride(), first.dtype)
            other = self._places.setdefault(place, key)
            fault = "" if other == key else f"the same tensor as {other}"
        if fault:
            self.unread[key] = fault
        else:
            self._held[key] = tensors if rows else first
            self._arrays[key] = ((*rows, *first.shape), dtype)


def _fault(torch: Any, tensor: torch.Tensor, dtype: str) -> str:
    """Reason why a tensor cannot be read; empty if it can."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout} on {tensor.device.type}"
    if dtype not in _TYPES:
        return f"a tensor of type {dtype}"
    # Strides of 0 could announce any size in a few bytes.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "a tensor that repeats its values, with strides of 0"
    return ""


def _leaves(value: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Plain values, tensors, arrays and lists of tensors in nested dictionaries and lists."""
    inner: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        by_step = _by_step(value)
        inner = value if by_step is None else {"steps": by_step[0]}
        if by_step is not None:
            yield key or "tensors", by_step[1]
    elif isinstance(value, list | tuple):
        series = _series(value) if "param_groups" not in key.split(".") else None
        if isinstance(series, np.ndarray | list):
            yield key or "tensors", series
            return
        inner = dict(enumerate(value)) if series is None else series
    elif isinstance(value, str | int | float | bool) or hasattr(value, "untyped_storage"):
        yield key or "tensor", value
    if inner is not None and depth < _DEEPEST:
        for name, item in inner.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name), depth + 1)


def _series(values: Sequence[Any]) -> Array | list[Any] | dict[Any, list[Any]] | None:
    """An array of numbers, tensors that are its rows, or a list per key of the entries.

    None for other lists, such as the arguments of a function.
    """
    types = {type(value) for value in values}
    if types in ({int}, {bool}) or (types and types <= {int, float}):
        # A tuple of two numbers is a pair, such as both betas.
        is_pair = isinstance(values, tuple) and len(values) == 2
        array = None if is_pair else np.array(values)
        return array if array is not None and array.dtype.kind in "bif" else None
    if values and _are_alike(values):
        return list(values)
    first = values[0] if len(values) > 1 else None
    if isinstance(first, Mapping) and all(
        isinstance(each, Mapping) and each.keys() == first.keys() for each in values
    ):
        return {name: [each[name] for each in values] for name in first}
    return None


def _by_step(value: Mapping[Any, Any]) -> tuple[list[int], list[Any]] | None:
    """Steps and tensors of a dictionary from step numbers to tensors; None for others."""
    if len(value) < 2 or {type(key) for key in value} != {int} or not _are_alike(value.values()):
        return None
    steps = sorted(value)
    return steps, [value[step] for step in steps]


def _are_alike(values: Iterable[Any]) -> bool:
    """True if all values are tensors of one shape and type."""
    kinds = {
        (tuple(value.shape), value.dtype) if hasattr(value, "untyped_storage") else None
        for value in values
    }
    return len(kinds) == 1 and None not in kinds
