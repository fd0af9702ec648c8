"""`RunWriter`: rows in, whole blocks out, one atomic commit a block.

The flow of one row: its arrays are copied once, into their place in the block buffer (by `append`,
or by a caller that fills `next_row` itself). A full block goes to the `Pipeline`, which encodes and
writes every array's shard behind the caller's back, while the next block is filled; then each
array's metadata grows; then the root is replaced, which is the commit. Whatever happens in between,
a reader sees the rows of the last commit and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore.bits import as_bits
from trajstore.errors import InvalidArgument, RunExists, WriterClosed
from trajstore.layout import BLOCKS, DEFAULT_MEMORY, Layout, parse_bytes, plan
from trajstore.metadata import DOCUMENT, Documents, utc_now
from trajstore.objects import PARTIAL_SUFFIX, put
from trajstore.pipeline import Pipeline
from trajstore.schema import FORMAT, STEP
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
    seconds_waited : float
        How long `append` has waited for the disk, because all buffers were full.

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
        self.seconds_waited = 0.0
        self._documents = documents
        self._attributes = attributes
        self._last_step = -1
        self._status: Status = "recording"
        self._pipeline = Pipeline(path, layout, self._commit)
        self._pending: deque[Future[None]] = deque()
        self._blocks = [_allocate(layout) for _ in range(BLOCKS)]
        self._row_bytes = sum(
            array.row_bytes for name, array in layout.arrays.items() if name != STEP.name
        )

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._pipeline.bytes_written

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
        encoding: str = "delta",
        threads: int | None = None,
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
        encoding : {'delta', 'portable'}
            ``delta`` is smaller and faster, and read wherever trajstore is installed; ``portable``
            is read by any reader of Zarr v3.
        threads : int, optional
            That encode; without it as many as there are processors, at most 8.
        overwrite : bool
            Replace a run that is there.

        Raises
        ------
        RunExists
            If something is at `path`.
        InvalidArgument
            If an argument is impossible.
        """
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
            encoding=encoding,
            threads=threads,
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
        if at == 0:
            self._make_room()
        block = self._block()
        return {name: block[name][at, ...] for name in block if name != STEP.name}

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
        self._block()[STEP.name][self.rows % self.layout.block_rows] = step
        self._last_step = step
        self.rows += 1
        self.bytes_recorded += self._row_bytes
        if self.rows % self.layout.block_rows == 0:
            self._hand_over(self.layout.block_rows)

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
        """Commit every row, also of the last, partial block, and set the status.

        Twice does no harm.

        Raises
        ------
        OSError
            If a block could not be written; what was committed before stays.
        """
        if self._status != "recording":
            return
        self._status = status
        try:
            partial = self.rows % self.layout.block_rows
            if partial:
                self._hand_over(partial, status)
            else:
                change = self.rows, status
                self._pending.append(self._pipeline.submit(0, None, change))
            self._settle(0)
        except BaseException:
            self._status = "interrupted"
            if self._pipeline.failure is not None:
                # The status is worth a try; the failure that is being raised matters more.
                with contextlib.suppress(OSError):
                    self._commit((self.committed_rows, "interrupted"))
            raise
        finally:
            self._pipeline.close()
            self._blocks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close("complete" if kind is None else "interrupted")
        except BaseException as failure:
            if failure is not error:  # which is on its way already
                raise

    def _check_open(self) -> None:
        if self._status != "recording":
            raise WriterClosed(f"{self.path} is closed as {self._status}")
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self._pipeline.failure is not None:
            raise self._pipeline.failure

    def _block(self) -> dict[str, npt.NDArray[Any]]:
        """Buffer of the block that is being filled."""
        return self._blocks[self.rows // self.layout.block_rows % BLOCKS]

    def _make_room(self) -> None:
        """Wait until the buffer of the next block has been written."""
        if len(self._pending) < BLOCKS:
            return
        started = time.perf_counter()
        self._settle(BLOCKS - 1)
        self.seconds_waited += time.perf_counter() - started

    def _settle(self, most: int) -> None:
        """Wait until at most so many blocks are on their way; raise what went wrong."""
        while len(self._pending) > most:
            self._pending.popleft().result()

    def _hand_over(self, filled: int, status: Status = "recording") -> None:
        """Have the block that ends with the last row written and committed."""
        number = (self.rows - 1) // self.layout.block_rows
        buffer = self._blocks[number % BLOCKS]
        block = {name: array[:filled] for name, array in buffer.items()}
        self._pending.append(self._pipeline.submit(number, block, (self.rows, status)))

    def _commit(self, change: tuple[int, Status]) -> None:
        """Make so many rows visible, with that status."""
        rows, status = change
        if rows > self.committed_rows:
            for name in self._documents.series():
                put(self.path / name / DOCUMENT, [self._documents.array(name, rows)])
        self._attributes = self._attributes | {
            "status": status,
            "committed_rows": rows,
            "updated": utc_now(),
        }
        put(self.path / DOCUMENT, [self._documents.root(rows, self._attributes)])
        self.committed_rows = rows


def _allocate(layout: Layout) -> dict[str, npt.NDArray[Any]]:
    return {
        name: np.empty((layout.block_rows, *array.row), array.native.bits)
        for name, array in layout.arrays.items()
    }


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
    if not _is_run(target):
        raise RunExists(f"{path} is not a run, so it is not overwritten; choose another path")
    return target


def _is_run(path: Path) -> bool:
    try:
        document = json.loads((path / DOCUMENT).read_bytes())
        return "trajstore_format" in document["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _create_folder(
    path: Path, documents: Documents, root: Mapping[str, Any], *, overwrite: bool
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = f".{path.name}.{os.getpid()}"
    new = path.with_name(f"{beside}{PARTIAL_SUFFIX}")
    new.mkdir()
    try:
        for key, data in documents.objects.items():
            put(new / key, [data])
        for name in documents.names():
            put(new / name / DOCUMENT, [documents.array(name, 0)])
        put(new / DOCUMENT, [documents.root(0, root)])
        if overwrite and path.exists():
            old = path.with_name(f"{beside}.old")
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
