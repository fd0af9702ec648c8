"""The planner: how many rows make a block, how tokens are split into chunks, what memory it takes.

A *block* is ``block_rows`` consecutive rows. Each array stores one shard per block, whole and once;
a shard is divided along ``token`` into inner chunks, so that one token's history reads one inner
chunk a block, and one step's snapshot one shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trajstore.bits import STEP_TYPE, NativeType, native_type
from trajstore.errors import InvalidArgument
from trajstore.schema import STEP, Variable, variable

__all__ = ["DEFAULT_MEMORY", "ArrayLayout", "Layout", "format_bytes", "parse_bytes", "plan"]

DEFAULT_MEMORY = 1 << 30
"""Bytes for all buffers of a writer together."""

_LARGEST_CHUNK = 8 << 20
_CHUNK = 4 << 20
_FEWEST_TOKENS = 128
_MOST_ROWS = 256
_FEWEST_ROWS = 8

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """Where the values of one variable lie.

    Attributes
    ----------
    variable : Variable
    native : NativeType
    row : tuple of int
        Shape of one row.
    chunk, shard : tuple of int
        Shapes of an inner chunk and of a shard, step first. A shard is a whole number of chunks.
    """

    variable: Variable
    native: NativeType
    row: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the native type."""
        return math.prod(self.row) * self.native.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one decoded inner chunk."""
        return math.prod(self.chunk) * self.native.stored.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The plan of a whole run.

    Attributes
    ----------
    block_rows : int
        Rows of a block: what is lost at worst, and how late a reader sees a row.
    arrays : dict of str to ArrayLayout
        The step coordinate first, then the variables.
    """

    block_rows: int
    arrays: dict[str, ArrayLayout]

    @property
    def memory(self) -> int:
        """Bytes that a writer holds at most: one block, and one chunk while it is encoded."""
        return _memory(self.block_rows, self.arrays)


def _memory(block_rows: int, arrays: Mapping[str, ArrayLayout]) -> int:
    row = sum(array.row_bytes for array in arrays.values())
    # A chunk exists twice while it is encoded: widened, and compressed.
    return block_rows * row + 2 * max(array.chunk_bytes for array in arrays.values())


def plan(
    variables: Mapping[str, str],
    *,
    tokens: int,
    hidden: int,
    memory: int = DEFAULT_MEMORY,
    block_rows: int | None = None,
) -> Layout:
    """Plan the blocks, shards and chunks of a run.

    Parameters
    ----------
    variables : mapping of str to str
        Native type of each variable.
    tokens, hidden : int
        Lengths of the two dimensions.
    memory : int, default 1 GiB
        Bytes for all buffers together.
    block_rows : int, optional
        Rows of a block. Without it: the largest power of two that fits into `memory` and keeps an
        inner chunk of at least 128 tokens within 8 MiB, at most 256.

    Raises
    ------
    InvalidArgument
        If a length is not positive, or `memory` is too small (the message says the least).
    """
    for name, length in (("token", tokens), ("hidden", hidden)):
        if length < 1:
            raise InvalidArgument(f"{name} has length {length}, expected at least 1")
    if block_rows is not None and block_rows < 1:
        raise InvalidArgument(f"a block has {block_rows} rows, expected at least 1")
    lengths = {"token": tokens, "hidden": hidden}

    def arrange(rows: int) -> dict[str, ArrayLayout]:
        arrays = {
            name: _array(variable(name), native_type(dtype), lengths, rows)
            for name, dtype in variables.items()
        }
        return {STEP.name: _array(STEP, STEP_TYPE, lengths, rows)} | arrays

    if block_rows is not None:
        arrays = arrange(block_rows)
        need = _memory(block_rows, arrays)
        if need > memory:
            raise InvalidArgument(
                f"blocks of {block_rows} rows need {format_bytes(need)}, but the memory budget is "
                f"{format_bytes(memory)}; use smaller blocks or raise the budget"
            )
        return Layout(block_rows=block_rows, arrays=arrays)

    widest = min(tokens, _FEWEST_TOKENS) * hidden * 4
    rows = _MOST_ROWS
    while rows > _FEWEST_ROWS and rows * widest > _LARGEST_CHUNK:
        rows //= 2
    while rows > _FEWEST_ROWS and _memory(rows, arrange(rows)) > memory:
        rows //= 2
    arrays = arrange(rows)
    need = _memory(rows, arrays)
    if need > memory:
        raise InvalidArgument(
            f"the memory budget of {format_bytes(memory)} does not hold one block of "
            f"{rows} rows; at least {format_bytes(need)} is needed"
        )
    return Layout(block_rows=rows, arrays=arrays)


def _array(
    entry: Variable, native: NativeType, lengths: Mapping[str, int], rows: int
) -> ArrayLayout:
    row = tuple(lengths[dim] for dim in entry.dims[1:])
    if not row or entry.dims[1] != "token":
        chunk = (rows, *row)
        return ArrayLayout(variable=entry, native=native, row=row, chunk=chunk, shard=chunk)
    tokens, *rest = row
    token_bytes = rows * math.prod(rest) * native.stored.itemsize
    most = min(tokens, max(_CHUNK // token_bytes, _FEWEST_TOKENS))
    count = math.ceil(tokens / most)
    # Even chunks: the last one is short by fewer tokens than there are chunks.
    size = math.ceil(tokens / count)
    return ArrayLayout(
        variable=entry,
        native=native,
        row=row,
        chunk=(rows, size, *rest),
        shard=(rows, size * math.ceil(tokens / size), *rest),
    )


def parse_bytes(text: str | int) -> int:
    """Bytes in ``'512MiB'``, ``'1.5GiB'``, ``'8MB'`` or a plain number.

    Raises
    ------
    InvalidArgument
        If it is not a positive size.
    """
    if isinstance(text, int):
        size = text
    else:
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_UNITS, "": 1}
        number = text.strip().rstrip("KMGTiBkmgtb")
        unit = text.strip()[len(number) :]
        known = {name.lower(): factor for name, factor in units.items()}
        try:
            size = int(float(number) * known[unit.lower()])
        except (ValueError, KeyError, OverflowError):
            raise InvalidArgument(
                f"cannot read {text!r} as a size; write a number and a unit, such as 512MiB or 1GiB"
            ) from None
    if size < 1:
        raise InvalidArgument(f"a size must be positive, got {text!r}")
    return size


def format_bytes(size: float) -> str:
    """Size in the largest binary unit that leaves at least 1."""
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"
