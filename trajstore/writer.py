"""`RunWriter`: rows in, whole blocks out, one atomic commit a block.

The flow of one row: its arrays are copied once, into their place in the block buffer (by `append`,
or by a caller that fills `next_row` itself). When the block is full, every array is encoded into
one shard and written; then each array's metadata grows; then the root is replaced, which is the
commit. Whatever happens in between, a reader sees the rows of the last commit and nothing else.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore.bits import as_bits
from trajstore.errors import InvalidArgument, RunExists, WriterClosed
from trajstore.layout import DEFAULT_MEMORY, Layout, parse_bytes, plan
from trajstore.metadata import DOCUMENT, Documents, chunk_key, utc_now
from trajstore.objects import PARTIAL_SUFFIX, put
from trajstore.schema import FORMAT, STEP
from trajstore.shard import shard_parts
from trajstore.version import __version__

__all__ = ["RunWriter", "check_target"]

Status = Literal["recording", "complete", "interrupted"]


class RunWriter:
    """Appends rows to a new run.

    Made by `create`; a context manager that closes the run as ``complete``, or as ``interrupted``
    when it is left by an exception.

    Attributes
    ----------
    path : Path
    layout : Layout
    rows : int
        Rows appended so far.
    committed_rows : int
        Rows that readers see.
    bytes_recorded : int
        Bytes appended, in native types.
    bytes_written : int
        Bytes of the shards on disk.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from trajstore import RunWriter, open_run
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with RunWriter.create(path, token=[0, 1, 2], hidden=4, variables={"W": "float32"}) as run:
    ...     for step in range(3):
    ...         run.append(step=step, W=np.full((3, 4), step, "float32"))
    >>> open_run(path).W.shape
    (3, 3, 4)
    """

    def __init__(
        self, path: Path, layout: Layout, documents: Documents, attributes: dict[str, Any]
    ) -> None:
        self.path = path
        self.layout = layout
        self.rows = 0
        self.committed_rows = 0
        self.bytes_recorded = 0
        self.bytes_written = 0
        self._documents = documents
        self._attributes = attributes
        self._last_step = -1
        self._status: Status = "recording"
        self._block = {
            name: np.empty((layout.block_rows, *array.row), array.native.bits)
            for name, array in layout.arrays.items()
        }
        self._row_bytes = sum(
            array.row_bytes for name, array in layout.arrays.items() if name != STEP.name
        )

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        token: npt.ArrayLike,
        hidden: int,
        variables: Mapping[str, str],
        is_dead: npt.ArrayLike | None = None,
        token_count: npt.ArrayLike | None = None,
        token_text: npt.ArrayLike | None = None,
        config: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        block_rows: int | None = None,
        encoding: str = "portable",
        overwrite: bool = False,
    ) -> Self:
        """Make an empty run.

        It appears at `path` whole, with no rows, or not at all.

        Parameters
        ----------
        path : path-like
            A local folder, by custom ``NAME.zarr``.
        token : array_like of int, (token,)
            Vocabulary ids of the recorded tokens.
        hidden : int
            Length of the hidden dimension.
        variables : mapping of str to str
            Native type (bfloat16, float16, float32, float64) of each variable to record.
        is_dead, token_count, token_text : array_like, (token,), optional
            Coordinates.
        config : mapping, optional
            Configuration of the run, JSON values only.
        attributes : mapping, optional
            Further attributes of the root, such as ``optimizer`` and ``provenance``.
        memory : int or str, default 1 GiB
            Bytes for all buffers together.
        block_rows : int, optional
            Rows of a block; planned from `memory` without it.
        encoding : {'portable'}
            Chain of codecs.
        overwrite : bool
            Replace a run that is there.

        Raises
        ------
        RunExists
            If something is at `path`.
        InvalidArgument
            If an argument is impossible.
        """
        if encoding != "portable":
            raise InvalidArgument(f"there is no encoding {encoding!r}; choose portable")
        path = check_target(path, overwrite=overwrite)
        ids = np.asarray(token)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(np.unique(ids)) != ids.size:
            raise InvalidArgument(
                f"token: got {ids.dtype} of shape {ids.shape}, expected distinct vocabulary ids "
                "in one dimension"
            )
        coordinates: dict[str, npt.ArrayLike] = {"token": ids}
        given = {"is_dead": is_dead, "token_count": token_count, "token_text": token_text}
        for name, values in given.items():
            if values is None:
                continue
            if np.shape(values) != ids.shape:
                raise InvalidArgument(
                    f"{name}: got shape {np.shape(values)}, expected {ids.shape} as token has"
                )
            coordinates[name] = values
        if "W" not in variables:
            raise InvalidArgument(f"a run always holds W, got only {', '.join(variables) or '—'}")
        layout = plan(
            variables,
            tokens=ids.size,
            hidden=hidden,
            memory=parse_bytes(memory),
            block_rows=block_rows,
        )
        now = utc_now()
        root = {
            "trajstore_format": FORMAT,
            "trajstore_version": __version__,
            "status": "recording",
            "committed_rows": 0,
            "created": now,
            "updated": now,
            "timeline": "post-step",
            "encoding": encoding,
            "block_rows": layout.block_rows,
            "config": dict(config or {}),
            **(attributes or {}),
        }
        documents = Documents(layout, coordinates)
        _create_folder(path, documents, root, overwrite=overwrite)
        return cls(path, layout, documents, root)

    def next_row(self) -> dict[str, npt.NDArray[Any]]:
        """Places of the next row's values, to be filled without another copy.

        Returns
        -------
        dict of str to ndarray
            Writable views of native bits, one per variable; they hold garbage until filled, and
            are the writer's own after `commit_row`.
        """
        self._check_open()
        at = self.rows % self.layout.block_rows
        return {name: block[at, ...] for name, block in self._block.items() if name != STEP.name}

    def commit_row(self, step: int) -> None:
        """Take the row that `next_row` gave out, every variable filled, as the state after `step`.

        Raises
        ------
        InvalidArgument
            If `step` does not come after the last one.
        """
        self._check_open()
        if step <= self._last_step:
            raise InvalidArgument(
                f"got step {step} after step {self._last_step}; steps must increase"
            )
        self._block[STEP.name][self.rows % self.layout.block_rows] = step
        self._last_step = step
        self.rows += 1
        self.bytes_recorded += self._row_bytes
        if self.rows % self.layout.block_rows == 0:
            self._write_block()

    def append(self, step: int, **values: Any) -> None:
        """Append one row.

        Parameters
        ----------
        step : int
            Optimizer steps taken; strictly increasing.
        **values : array_like
            Every variable of the run: values of its native type (NumPy, ml_dtypes or torch),
            uint16 bits for a 16-bit type, or float32 that is exactly representable.

        Raises
        ------
        InvalidArgument
            If a variable is missing or unknown, a shape is wrong, or a value would be rounded.
            The run is as before.
        """
        row = self.next_row()
        if values.keys() != row.keys():
            missing = ", ".join(row.keys() - values.keys()) or "none"
            unknown = ", ".join(values.keys() - row.keys()) or "none"
            raise InvalidArgument(
                f"a row of this run holds {', '.join(row)}; missing: {missing}; unknown: {unknown}"
            )
        for name, value in values.items():
            bits = as_bits(value, self.layout.arrays[name].native, name)
            if bits.shape != row[name].shape:
                raise InvalidArgument(f"{name}: got shape {bits.shape}, expected {row[name].shape}")
            row[name][...] = bits
        self.commit_row(step)

    def close(self, status: Literal["complete", "interrupted"] = "complete") -> None:
        """Commit the rows of the last, partial block, and set the status. Twice does no harm."""
        if self._status != "recording":
            return
        if self.rows > self.committed_rows:
            self._write_shards()
        self._commit(status)
        self._status = status
        self._block.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("complete" if kind is None else "interrupted")

    def _check_open(self) -> None:
        if self._status != "recording":
            raise WriterClosed(f"{self.path} is closed as {self._status}")

    def _write_block(self) -> None:
        self._write_shards()
        self._commit("recording")

    def _write_shards(self) -> None:
        number, start = divmod(self.committed_rows, self.layout.block_rows)
        assert start == 0, "a block is written whole"
        filled = self.rows - self.committed_rows
        for name, array in self.layout.arrays.items():
            key = chunk_key(name, number, len(array.shard))
            parts = shard_parts(self._block[name][:filled], array)
            self.bytes_written += put(self.path / key, parts)

    def _commit(self, status: Status) -> None:
        if self.rows > self.committed_rows:
            for name in self._documents.series():
                put(self.path / name / DOCUMENT, [self._documents.array(name, self.rows)])
        changes = {"status": status, "committed_rows": self.rows, "updated": utc_now()}
        self._attributes = self._attributes | changes
        put(self.path / DOCUMENT, [self._documents.root(self.rows, self._attributes)])
        self.committed_rows = self.rows


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Local path of a run that may be created there.

    Raises
    ------
    RunExists
        If something is there and `overwrite` is not set, or it is not a run.
    InvalidArgument
        If it is an address, not a local path.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(f"cannot record to {text}: a run is recorded to a local folder")
    target = Path(path).absolute()
    if not target.exists():
        return target
    if not overwrite:
        raise RunExists(f"{path} is already there; choose another path, or overwrite it")
    if not (target / DOCUMENT).is_file():
        raise RunExists(f"{path} is not a run, so it is not overwritten; choose another path")
    return target


def _create_folder(
    path: Path, documents: Documents, root: Mapping[str, Any], *, overwrite: bool
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL_SUFFIX, dir=path.parent))
    try:
        # mkdtemp makes a folder for its owner alone; a run is shared like any other folder.
        umask = os.umask(0)
        os.umask(umask)
        new.chmod(0o777 & ~umask)
        for key, data in documents.objects.items():
            put(new / key, [data])
        for name in documents.names():
            put(new / name / DOCUMENT, [documents.array(name, 0)])
        put(new / DOCUMENT, [documents.root(0, root)])
        if overwrite and path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            path.rename(old)
            new.rename(path)
            shutil.rmtree(old)
        else:
            new.rename(path)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and path.exists() and not overwrite:
            raise RunExists(f"{path} has just been made by another process") from error
        raise
