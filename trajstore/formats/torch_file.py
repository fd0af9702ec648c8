"""Files of `torch.save`: tensors in dictionaries and lists, and the numbers and texts beside them.

The only place of the formats that needs torch, imported when a file is opened. Nothing but tensors
and plain values is unpickled (``weights_only=True``), so a file cannot run code.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, MissingExtra, RunNotFound
from trajstore.values.native_types import NATIVE_TYPES

if TYPE_CHECKING:
    import torch

__all__ = ["TorchFile"]

Array = npt.NDArray[Any]

_DEEPEST = 8
_MOST_ITEMS = 1 << 16
_TYPES = (*NATIVE_TYPES, "int64", "int32", "int16", "int8", "uint8", "uint16", "bool")


class TorchFile:
    """A `.pt` file, open for reading; a context manager. Its tensors stay on disk until read.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    format : str
    keys : tuple of str
        Of the tensors: the keys that lead to each, with points between.
    attributes : dict of str to str, int, float or bool
        Plain values, named likewise.
    passed_over : dict of str to str
        Tensors of types, layouts or devices that are not read.

    Raises
    ------
    RunNotFound
        If there is no file.
    FormatError
        If torch cannot read it, or it holds other objects than tensors and plain values.
    MissingExtra
        If torch is not installed.
    """

    format = "torch"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import torch
        except ImportError:
            raise MissingExtra(
                f"{path} was written by torch.save, and torch is not installed to read it; "
                "install trajstore[train], or save the tensors as safetensors"
            ) from None
        self.path = Path(path)
        if not self.path.is_file():
            raise RunNotFound(f"there is no file at {path}")
        self._tensors: dict[str, torch.Tensor] = {}
        self.attributes: dict[str, Any] = {}
        self.passed_over: dict[str, str] = {}
        for key, value in _leaves(self._loaded(torch), "", 0):
            held = len(self._tensors) + len(self.attributes) + len(self.passed_over)
            if held >= _MOST_ITEMS:
                raise FormatError(f"{path} holds more than {_MOST_ITEMS} values")
            if isinstance(value, torch.Tensor):
                self._take(torch, key, value)
            else:
                self.attributes[key] = value
        self.keys = tuple(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors.clear()

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[key].shape)

    def dtype(self, key: str) -> str:
        """Type of a tensor."""
        return str(self._tensors[key].dtype).removeprefix("torch.")

    def read(
        self, key: str, start: int | None = None, stop: int | None = None, outer: int | None = None
    ) -> Array:
        """Values of a tensor, or of its rows from `start` up to `stop`; of floats, their bits.

        Parameters
        ----------
        key : str
        start, stop : int, optional
        outer : int, optional
            Place along a first axis that lies before the rows.
        """
        import torch

        tensor = self._tensors[key]
        if outer is not None:
            tensor = tensor[outer]
        if start is not None:
            tensor = tensor[start:stop]
        tensor = tensor.detach().contiguous()
        dtype = self.dtype(key)
        if dtype not in NATIVE_TYPES:
            return np.array(tensor.numpy())
        native = NATIVE_TYPES[dtype]
        signed = tensor.view(getattr(torch, f"int{8 * native.itemsize}"))
        return np.array(signed.numpy()).view(native.bits)

    def _loaded(self, torch: Any) -> Any:
        size = self.path.stat().st_size
        for in_place in (True, False):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the age of the format
                    return torch.load(
                        self.path, map_location="cpu", weights_only=True, mmap=in_place
                    )
            except Exception as error:  # whatever its unpickler meets in a damaged file
                # Files of torch before 1.6 cannot be mapped, and are read as a whole.
                if not in_place or "mmap can only be used" not in str(error):
                    told = str(error).strip().partition("\n")[0]
                    if isinstance(error, pickle.UnpicklingError):
                        # Its own advice is to allow what would run the code of the file.
                        told = (
                            "it is damaged, or holds objects of Python, which could run code and "
                            "are never loaded; save a dictionary of its tensors"
                        )
                    raise FormatError(
                        f"torch cannot read {self.path} ({size} bytes) as tensors and plain "
                        f"values: {told or type(error).__name__}"
                    ) from None
        raise AssertionError("one of the two ways returns or raises")

    def _take(self, torch: Any, key: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        # Strides of 0 could announce any size in a few bytes.
        held = tensor.untyped_storage().nbytes() if dense else 0
        if not dense:
            layout = str(tensor.layout).removeprefix("torch.")
            self.passed_over[key] = f"a tensor of layout {layout} on {tensor.device.type}"
        elif dtype not in _TYPES:
            self.passed_over[key] = f"a tensor of type {dtype}"
        elif tensor.numel() * tensor.element_size() > held:
            self.passed_over[key] = "a tensor that repeats its values, with strides of 0"
        else:
            self._tensors[key] = tensor


def _leaves(value: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in nested dictionaries and lists."""
    if isinstance(value, Mapping) and depth < _DEEPEST:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name), depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEEPEST:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}.{number}" if key else str(number), depth + 1)
    elif isinstance(value, str | int | float | bool) or hasattr(value, "untyped_storage"):
        yield key or "tensor", value
