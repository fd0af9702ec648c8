"""HDF5 files: all objects are checked before a value is read; writing is part by part.

HDF5 has no bfloat16, so 16-bit types are uint16 bit patterns, with an attribute for the type.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.defaults import DEFAULT_MEMORY
from trajstore.errors import FormatError, InvalidArgument, needs_extra
from trajstore.formats.array_file import ArrayFile, check_expansion
from trajstore.formats.safetensors import Tensor, Where, counted, item_type
from trajstore.threads import Progress, in_parallel
from trajstore.units import format_bytes
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]

_UNSOUND = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
"""Errors of the library when it reads a damaged file."""

_MOST_CHUNKS = 1 << 22
_MOST_ITEMS = 1 << 14
_DEEPEST_GROUP = 4
_MOST_NUMBERS = 1 << 12
_LONGEST_TEXT = 1 << 12
_COPIES_OF_A_CHUNK = 2
"""HDF5 holds a chunk before and after a filter."""

_LARGE_CHUNK = 16 << 20
"""Largest chunk, in bytes, that HDF5 may decompress whole for a few rows."""


class Hdf5File(ArrayFile):
    """An HDF5 file. It really holds all its datasets.

    Parameters
    ----------
    path : path-like
    memory : int
        Bytes of large compressed chunks that may be held at once. Uncompressed chunks are read in
        place, whatever their size.

    Attributes
    ----------
    keys : tuple of str
        Paths of the datasets: names of groups and dataset, joined by slashes.
    attributes : dict of str to str, int, float, bool or list of them
        Attributes of the root and of groups, by path: single values and short lists.
    unread : dict of str to str
        Links (never followed), variable-length strings, and types that no variable has.

    Raises
    ------
    MissingExtra
        If h5py is not installed.
    """

    format = "hdf5"
    _expected = "a valid HDF5 file"
    _unsound = _unsound_values = _UNSOUND

    def __init__(self, path: str | os.PathLike[str], memory: int = DEFAULT_MEMORY) -> None:
        self._memory = memory
        self._held: dict[str, int] = {}
        super().__init__(path)

    def _open(self) -> None:
        h5py = load_h5py()
        self._file = self._files.enter_context(h5py.File(self.path, "r"))
        self._datasets = dict(self._items(h5py, self._file, "", 0, [_MOST_ITEMS]))
        check_expansion(self.path, sum(dataset.nbytes for dataset in self._datasets.values()))
        self._arrays = {
            key: (tuple(dataset.shape), self._type(key, dataset))
            for key, dataset in self._datasets.items()
        }

    def _type(self, key: str, dataset: Any) -> str:
        """Type of a dataset. For bits, an attribute defines it."""
        dtype: np.dtype[Any] = dataset.dtype
        native = dtype.name
        with self._checked(key):
            if "native_dtype" in dataset.attrs:
                # A variable-length string would be read from the heap.
                fixed = dataset.attrs.get_id("native_dtype").dtype.kind == "S"
                native = "a variable-length string"
                native = dataset.attrs["native_dtype"].decode() if fixed else native
        if native == dtype.name or (dtype == np.uint16 and native in ("bfloat16", "float16")):
            return native
        raise FormatError(
            f"{self.path}: {key} has type {dtype} (native_dtype: {native}), expected uint16 bits "
            f"of bfloat16 or float16, or {', '.join(NATIVE_TYPES)}"
        )

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        """Values of a dataset.

        Raises
        ------
        InvalidArgument
            If `memory` does not hold a compressed chunk that must be held whole.
        """
        if key not in self._held and _is_large_and_packed(self._datasets[key]):
            self._hold_chunks(key, 0 if outer is None else 1)
        dataset = self._datasets[key]
        where = () if not dataset.shape else rows if outer is None else (outer, rows)
        return np.asarray(dataset[where])

    def _hold_chunks(self, key: str, axis: int) -> None:
        """Let HDF5 keep the chunks of the rows that are read, so that it decodes each once."""
        import h5py

        dataset = self._datasets[key]
        access, chunks, shape = dataset.id.get_access_plist(), dataset.chunks, dataset.shape
        beside = zip(shape[axis + 1 :], chunks[axis + 1 :], strict=True)
        chunk = math.prod(chunks) * dataset.dtype.itemsize
        cached = chunk * math.prod(-(-length // part) for length, part in beside)
        self._held[key] = cached + _COPIES_OF_A_CHUNK * chunk
        used = sum(self._held.values())
        if used > self._memory:
            raise InvalidArgument(
                f"{self.path}: {key} is compressed in chunks of {chunks[axis]} rows, which must be "
                f"held whole; this needs {format_bytes(used)}, but the memory budget is "
                f"{format_bytes(self._memory)}; raise it (memory=…), or rewrite the file with "
                "smaller chunks (h5repack)"
            )
        slots, _, preemption = access.get_chunk_cache()
        access.set_chunk_cache(slots, cached, preemption)
        # HDF5 gives the cache to a dataset only when it is opened for the first time.
        del dataset, self._datasets[key]
        self._datasets[key] = h5py.Dataset(h5py.h5d.open(self._file.id, key.encode(), access))

    def _items(
        self, h5py: Any, group: Any, prefix: str, depth: int, left: list[int]
    ) -> Iterator[tuple[str, Any]]:
        self._add_numbers(h5py, group, prefix)
        for name in list(group):
            left[0] -= 1
            if left[0] < 0:
                raise ValueError(f"it holds more than {_MOST_ITEMS} objects")
            if not isinstance(name, str):
                raise ValueError(f"the name {name!r} is not valid UTF-8")
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                # An external link would read another file.
                of = f" of {link.filename}" if isinstance(link, h5py.ExternalLink) else ""
                path = getattr(link, "path", "an unknown path")
                self.unread[f"{prefix}{name}"] = f"a link to {path}{of}, not followed"
                continue
            item = group[name]
            if isinstance(item, h5py.Group) and depth < _DEEPEST_GROUP:
                yield from self._items(h5py, item, f"{prefix}{name}/", depth + 1, left)
            # No variable holds strings. Variable-length ones are never read.
            elif isinstance(item, h5py.Dataset) and _is_plain(item.dtype):
                _check_stored(self.path, f"{prefix}{name}", item)
                yield f"{prefix}{name}", item
            elif isinstance(item, h5py.Group):
                self.unread[f"{prefix}{name}"] = "a group that is nested too deep"
            elif isinstance(item, h5py.Dataset):
                self.unread[f"{prefix}{name}"] = _kind(h5py, item.dtype)

    def _add_numbers(self, h5py: Any, group: Any, prefix: str) -> None:
        """Add attributes of a group that are a few numbers, or a fixed-length string."""
        for name in group.attrs:
            if not isinstance(name, str):
                raise ValueError(f"the name {name!r} is not valid UTF-8")
            key, opened = f"{prefix}{name}", group.attrs.get_id(name)
            if opened.dtype.kind not in "biufS":
                self.unread[key] = _kind(h5py, opened.dtype)
            elif opened.shape is None or math.prod(opened.shape) > _MOST_NUMBERS:
                self.unread[key] = f"an attribute of shape {opened.shape}"
            elif opened.shape == ():
                self.attributes[key] = _plain(group.attrs[name])
            else:
                values = np.asarray(group.attrs[name]).reshape(-1)
                self.attributes[key] = [_plain(value) for value in values]


def _is_plain(dtype: Any) -> bool:
    """True for numbers, booleans, and short strings of fixed length."""
    return dtype.kind in "biufS" and dtype.itemsize <= _LONGEST_TEXT


def _kind(h5py: Any, dtype: Any) -> str:
    """Description of a value of an unsupported type."""
    if h5py.check_ref_dtype(dtype) is not None:
        return "references to objects, not followed"
    if dtype.kind == "O":
        return "a variable-length string"
    return "of a compound type" if dtype.names else f"of type {dtype}"


def _plain(value: Any) -> Any:
    """Plain value of an attribute. A float becomes the shortest decimal that rounds to it."""
    if isinstance(value, bytes):
        return value.decode()
    return float(str(value)) if value.dtype.kind == "f" else value.item()


def _check_stored(path: Path, name: str, dataset: Any) -> None:
    """Raise an error unless the file stores a dataset as announced."""
    if dataset.shape is None:
        raise ValueError(f"{name} is empty")
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{name} stores its values in other files")
    count, itemsize = math.prod(dataset.shape), dataset.dtype.itemsize
    if not count:
        return
    if dataset.chunks is None:
        need, stored = count * itemsize, dataset.id.get_storage_size()
        if not stored:
            raise _unwritten(path, name, "none of its values was written")
        if stored != need:
            raise ValueError(f"{name} needs {need} bytes, but {stored} are stored")
        return
    chunks = math.prod(
        -(-length // part) for length, part in zip(dataset.shape, dataset.chunks, strict=True)
    )
    stored = dataset.id.get_num_chunks()
    # HDF5 returns zeros for missing chunks, so a small file could announce any size.
    if stored < chunks:
        raise _unwritten(path, name, f"{stored} of its {chunks} chunks were written")
    if chunks > _MOST_CHUNKS or stored != chunks:
        raise ValueError(
            f"{name} needs {chunks} chunks, but {stored} are stored; at most {_MOST_CHUNKS} are "
            "read"
        )
    chunk = math.prod(dataset.chunks) * itemsize
    if chunk > _LARGE_CHUNK and not _is_packed(dataset):
        for at in range(chunks):
            stored = dataset.id.get_chunk_info(at).size
            if stored != chunk:
                raise ValueError(f"{name} has a chunk of {stored} bytes, expected {chunk}")


def _unwritten(path: Path, name: str, detail: str) -> FormatError:
    return FormatError(
        f"{path}: {name} is incomplete: {detail}, and HDF5 would return zeros for the others; copy "
        "the existing rows to a new file"
    )


def _is_large_and_packed(dataset: Any) -> bool:
    """True if HDF5 would decompress a large chunk again for every few of its rows."""
    if dataset.chunks is None:
        return False
    is_large = math.prod(dataset.chunks) * dataset.dtype.itemsize > _LARGE_CHUNK
    return is_large and _is_packed(dataset)


def _is_packed(dataset: Any) -> bool:
    """True if filters, such as gzip, apply to its chunks."""
    return bool(dataset.id.get_create_plist().get_nfilters())


def load_h5py() -> Any:
    """Import h5py.

    Raises
    ------
    MissingExtra
        If it is not installed.
    """
    with needs_extra("an HDF5 file", "hdf5"):
        import h5py
    return h5py


def write_hdf5(
    path: Path,
    tensors: Sequence[Tensor],
    texts: Mapping[str, str],
    on_progress: Progress | None = None,
    *,
    attributes: Mapping[str, Any],
    chunk_rows: int,
    gzip: int,
    float16_as_bits: bool,
    memory: int,
) -> dict[str, int]:
    """Write a file, part by part. Tensors with a row per step are chunked by rows.

    Parameters
    ----------
    path : Path
        An existing file, which is overwritten.
    tensors : sequence of Tensor
    texts : mapping of str to str
        Each becomes a dataset of bytes.
    on_progress : callable, optional
    attributes : mapping of str to str, int or float
        Attributes of the root. Strings get a fixed length.
    chunk_rows : int
    gzip : int
        Level of compression; 0 for none.
    float16_as_bits : bool
        True to write float16 as uint16 bits, like bfloat16.
    memory : int
        Bytes of rows that are held until they are compressed.

    Returns
    -------
    dict of str to int
        Numbers of rounded values, by key.

    Raises
    ------
    MissingExtra
        If h5py is not installed.
    InvalidArgument
        If `memory` does not hold a chunk to compress.
    """
    h5py = load_h5py()
    with _opened(h5py, path) as (file, target):
        # HDF5 keeps variable-length strings in a heap, and its library loops forever if that is
        # damaged. It pads fixed-length strings with NUL, with which a token may end.
        for key, text in texts.items():
            file.create_dataset(key, data=np.frombuffer(text.encode(), np.uint8))
        for name, value in attributes.items():
            file.attrs[name] = np.bytes_(value) if isinstance(value, str) else value
        as_bits = ("bfloat16", "float16") if float16_as_bits else ("bfloat16",)
        datasets = {
            tensor.key: _create(file, tensor, as_bits, chunk_rows, gzip) for tensor in tensors
        }

        def written() -> Iterator[tuple[str, int, int]]:
            for tensor in tensors:
                dataset = datasets[tensor.key]
                if dataset.compression_opts is None:
                    for where, bits, changed in in_parallel(_reads(tensor, tensor.parts())):
                        dataset[where] = bits.view(dataset.dtype)
                        target.check()
                        yield tensor.key, bits.nbytes, changed
                    continue
                for start, chunk, size, changed in _compressed(tensor, dataset, memory):
                    dataset.id.write_direct_chunk((start, *[0] * (dataset.ndim - 1)), chunk)
                    target.check()
                    yield tensor.key, size, changed

        return counted(tensors, written(), on_progress)


class _Target:
    """The bytes of a new file, for HDF5, which crashes at the end of a process if a write fails.

    After an error, further writes are dropped.

    Parameters
    ----------
    path : Path
        An existing file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        self._error: OSError | None = None
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close
        self.read, self.readinto, self.flush = (
            self._file.read,
            self._file.readinto,
            self._file.flush,
        )

    def write(self, data: Any) -> int:
        """Write all bytes, or none after an error."""
        left = memoryview(data).cast("B")
        try:
            while self._error is None and left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._error = error
        return len(data)

    def truncate(self, size: int) -> int:
        """Set the length of the file."""
        return self._file.truncate(size) if self._error is None else size

    def check(self) -> None:
        """Raise the error of an earlier write."""
        if self._error is not None:
            raise self._error


@contextmanager
def _opened(h5py: Any, path: Path, **options: Any) -> Iterator[tuple[Any, _Target]]:
    """A new HDF5 file and its target.

    Raises
    ------
    OSError
        If the system refuses a write.
    """
    with closing(_Target(path)) as target:
        try:
            with h5py.File(target, "w", libver=("earliest", "v110"), **options) as file:
                yield file, target
        finally:
            target.check()


def _create(file: Any, tensor: Tensor, as_bits: Sequence[str], rows: int, gzip: int) -> Any:
    series = len(tensor.shape) > 1 and tensor.shape[0] > 0  # h5py refuses empty chunks
    sixteen = tensor.dtype in as_bits
    dataset = file.create_dataset(
        tensor.key,
        shape=tensor.shape,
        dtype="uint16" if sixteen else tensor.dtype,
        # One step per chunk, as in loops that append steps, or the rows of the layout.
        chunks=(min(rows, tensor.shape[0]), *tensor.shape[1:]) if series else None,
        compression="gzip" if series and gzip else None,
        compression_opts=gzip if series and gzip else None,
        # Every value is written; filling the chunks first would write everything twice.
        fill_time="never" if series else None,
    )
    if sixteen:
        dataset.attrs["native_dtype"] = np.bytes_(tensor.dtype)
        dataset.attrs["description"] = np.bytes_(f"bit patterns of {tensor.dtype} as uint16")
    return dataset


Read = tuple[Where, Array, int]
"""Position and bits of a part, and the number of rounded values."""


def _reads(tensor: Tensor, parts: Iterable[Where]) -> Iterator[Callable[[], Read]]:
    return (partial(_read, tensor, where) for where in parts)


def _read(tensor: Tensor, where: Where) -> Read:
    return where, *tensor.read(where)


def _parts(tensor: Tensor, rows: slice) -> Iterator[Where]:
    """Parts of some rows of a tensor."""
    for whole, *rest in tensor.parts():
        some = slice(max(whole.start, rows.start), min(whole.stop, rows.stop))
        if some.start < some.stop:
            yield (some, *rest)


def _compressed(tensor: Tensor, dataset: Any, memory: int) -> Iterator[tuple[int, bytes, int, int]]:
    """First row, compressed bytes, size and number of rounded values of each chunk.

    A chunk has few rows of all tokens, a block of the run has many rows of few tokens. So as many
    rows as fit into `memory` are read, then compressed. HDF5 would compress in one thread.
    """
    chunk, item = dataset.chunks, item_type(tensor.dtype)
    count, row = len(dataset), math.prod(chunk[1:]) * item.itemsize
    at_once = memory // (row * chunk[0]) * chunk[0]
    if not at_once:
        raise InvalidArgument(
            f"the memory budget of {format_bytes(memory)} does not hold a chunk of {tensor.key}, "
            f"{format_bytes(row * chunk[0])}; raise it (memory=…)"
        )
    for start in range(0, count, at_once):
        rows = slice(start, min(start + at_once, count))
        held = np.zeros((at_once, *chunk[1:]), item)  # a last chunk may have rows beyond the tensor
        changed = 0
        for (some, *rest), bits, rounded in in_parallel(_reads(tensor, _parts(tensor, rows))):
            held[(slice(some.start - start, some.stop - start), *rest)] = bits
            changed += rounded
        begins = range(start, rows.stop, chunk[0])
        packed = in_parallel(
            partial(zlib.compress, held[begin - start :][: chunk[0]].data, dataset.compression_opts)
            for begin in begins
        )
        for begin, data in zip(begins, packed, strict=True):
            yield begin, data, min(chunk[0], count - begin) * row, changed
            changed = 0
