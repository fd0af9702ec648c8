"""The planner of a run: rows of a block, shapes of shards and chunks, and memory.

A *block* is ``block_rows`` consecutive rows. Each array stores it in one shard, or in several
shards of a range of tokens each. A shard decodes to at most 30 MiB, so that readers can reuse the
memory. It is divided along ``token`` into inner chunks, so that the history of one token needs one
inner chunk per block. Chunks of a large W hold a part of a block's rows. Variables of single
examples are divided along ``example`` in the same way. Their inner chunks hold one row, as the
examples of two steps differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.codec.block import BlockForm, Runs
from trajstore.codec.chunk import Chain, chain, vector_chain
from trajstore.codec.computed_rows import GRADIENT, computed_chains
from trajstore.defaults import DEFAULT_MEMORY
from trajstore.errors import InvalidArgument
from trajstore.schema import INTEGERS, STEP, VARIABLES, Variable
from trajstore.store.metadata.zarr_json import MOST_CHUNKS
from trajstore.threads import encoding_threads
from trajstore.units import format_bytes
from trajstore.values.native_types import STEP_TYPE, NativeType, native_type
from trajstore.values.optimizer_rule import VECTORS, OptimizerRule, VectorRule

BLOCKS = 2
"""Block buffers of a writer with background threads: one is filled, the other encoded."""

CHUNKS_AHEAD = 4
"""Number of encoded chunks per encoding thread that may wait to be written."""

_COPIES_OF_A_CHUNK = 6  # during encoding: four in scratch memory, two compressed
_OVERHEAD = 3 << 20  # bytes of the interpreter, the allocator and the stacks of threads
_SMALL_ROW = 1 << 20
_LARGEST_CHUNK = 8 << 20
_LARGEST_SNAPSHOT = 256 << 20
_LARGEST_OBJECT = 30 << 20  # the C library returns larger memory to the system at once
LARGEST_TASK = 16 << 20
"""Decoded bytes of a task that scans a whole run. Larger tasks need memory and are not faster."""

_WIDEST_PREDICTED = 4  # bytes of a value
_REPLAYED: dict[str, Any] = {"compressor": "zstd", "level": 1, "blocksize": 1 << 18}
"""Compression of large rows in the encoding ``compact``."""
_SMALL_GRADIENT: dict[str, Any] = {"level": 1, "shuffle": "shuffle", "blocksize": 1 << 19}
"""Compression of gradients in small rows: most of their low bytes are noise."""
_CHUNK = 2 << 20
_CHUNK_OF_HISTORIES = 3 << 19  # the history of a token reads and checks the whole chunk
_FEWEST_TOKENS = 128
MOST_ROWS = 256
"""Largest number of rows of a block that the caller does not set."""
FEWEST_ROWS = 8
"""Smallest number of rows of a planned block. With fewer, differences save little."""

# In chunks ordered by token, one row needs all rows of its chunk. So a chunk has few rows, but
# enough that its first row, stored without differences, does not dominate its size.
_ROWS_OF_A_SNAPSHOT = (8, 7, 6, 5, 4)
_MOST_ROWS_OF_HISTORIES = 32  # rows of a block; with more, a token would be in too many chunks


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """Layout of the values of one variable.

    Attributes
    ----------
    variable : Variable
    row : tuple of int
        Shape of one row.
    chunk, shard : tuple of int
        Shapes of an inner chunk and of a shard, step first. A shard has a whole number of chunks.
    chain : Chain
        Codecs of a chunk.
    first_part : int
        Number of this writer's first shard in a block, if other writers have the ones before.
    """

    variable: Variable
    row: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    chain: Chain
    first_part: int = 0

    @property
    def native(self) -> NativeType:
        """Type of the values in memory."""
        return self.chain.native

    @property
    def parts(self) -> int:
        """Number of shards of a block."""
        return math.ceil(self.row[0] / self.shard[1]) if len(self.shard) > 1 else 1

    def window(self, part: int) -> tuple[slice, ...]:
        """Window of a shard in a block."""
        if len(self.shard) == 1:
            return (slice(None),)
        return (slice(None), slice(part * self.shard[1], (part + 1) * self.shard[1]))

    def form(self, runs: Runs) -> BlockForm:
        """Storage form of the shards in a run of that identity."""
        return BlockForm(
            array=self.variable.name,
            chain=self.chain,
            shape=self.shard,
            chunk=self.chunk,
            runs=runs,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the native type."""
        return math.prod(self.row) * self.native.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one uncompressed inner chunk."""
        return math.prod(self.chunk) * self.chain.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The plan of a whole run.

    Attributes
    ----------
    block_rows : int
        Rows of a block. Without timed commits, it limits the loss and the delay for readers.
    threads : int
        Number of encoding threads.
    arrays : dict of str to ArrayLayout
        The step coordinate first, then the variables.
    buffers : int
        Number of blocks in memory.
    runs : Runs
        Identity of the run, for the labels of its blocks; empty before the run is created.
    """

    block_rows: int
    threads: int
    arrays: dict[str, ArrayLayout]
    buffers: int = BLOCKS
    runs: Runs = ()

    @property
    def forms(self) -> dict[str, BlockForm]:
        """Storage form of the shards of each array."""
        return {name: array.form(self.runs) for name, array in self.arrays.items()}

    @property
    def memory(self) -> int:
        """Largest memory of a writer in bytes: blocks, chunks being encoded, threads."""
        chunk = max(array.chunk_bytes for array in self.arrays.values())
        encoding = self.threads * _COPIES_OF_A_CHUNK + self.threads * CHUNKS_AHEAD + 1
        return self.blocks_memory + encoding * chunk + _OVERHEAD

    @property
    def blocks_memory(self) -> int:
        """Bytes of the blocks in memory."""
        row = sum(array.row_bytes for array in self.arrays.values())
        return self.buffers * self.block_rows * row


def plan(
    variables: Mapping[str, str],
    *,
    tokens: int,
    hidden: int,
    examples: int | None = None,
    positions: int | None = None,
    lengths: Mapping[str, int] | None = None,
    memory: int = DEFAULT_MEMORY,
    block_rows: int | None = None,
    threads: int | None = None,
    buffers: int = BLOCKS,
    encoding: str = "delta",
    rule: OptimizerRule | None = None,
    vectors: VectorRule | None = None,
) -> Layout:
    """Plan the blocks, shards and chunks of a run.

    Parameters
    ----------
    variables : mapping of str to str
        Native type of each variable.
    tokens, hidden : int
        Lengths of the dimensions.
    examples, positions : int, optional
        Lengths of ``example`` and ``position``, if a variable has them.
    lengths : mapping of str to int, optional
        Lengths of the other dimensions: ``parameter``, ``hyperparameter``, ``element``, ``group``,
        ``byte``, ``buffer_element``, ``word``.
    memory : int, default 1 GiB
        Memory budget of a writer in bytes.
    block_rows : int, optional
        Rows of a block. Default: the largest power of two from 8 to 256 that fits into `memory`,
        or from 1 if there are variables along ``element`` or ``word``.
        It also keeps an inner chunk of 128 tokens within 8 MiB, and the shards of an array within
        256 MiB, both decoded.
    threads : int, optional
        Number of encoding threads. Default: all processors but one, 2 to 8, and fewer if
        `memory` is too small.
    buffers : int
        Number of blocks in memory.
    encoding : {'delta', 'compact'}
    rule : OptimizerRule, optional
        By which ``compact`` computes W and the moments; without it they are stored as differences.
    vectors : VectorRule, optional
        The same for the vectors of all other parameters.

    Raises
    ------
    InvalidArgument
        If a length is not positive, or `memory` is too small. The message states the minimum.
    """
    kinds = {STEP.name: (STEP, STEP_TYPE)}
    kinds |= {name: (VARIABLES[name], native_type(dtype)) for name, dtype in variables.items()}
    for name, (_, native) in kinds.items():
        if (native is STEP_TYPE) != (name in (STEP.name, *INTEGERS)):
            expected = STEP_TYPE.name if name in INTEGERS else "a type of floats"
            raise InvalidArgument(f"{name}: got the type {native.name}, expected {expected}")
    lengths = dict(lengths or {}) | {"token": tokens, "hidden": hidden}
    lengths |= {
        dim: given
        for dim, given in (("example", examples), ("position", positions))
        if given is not None
    }
    for variable_name, (entry, _) in kinds.items():
        for dim in entry.dims[1:]:
            if dim not in lengths:
                named = dim in ("example", "position")
                raise InvalidArgument(
                    f"{variable_name}: got no length of the dimension {dim}; pass the largest of a "
                    f"row with {f'{dim}s=…' if named else f'lengths={{{dim!r}: …}}'}"
                )
    for name, length in lengths.items():
        if length < 1:
            raise InvalidArgument(f"{name} has length {length}, expected at least 1")
    chosen, threads = threads, threads or encoding_threads()
    row_bytes = sum(
        math.prod(lengths[dim] for dim in entry.dims[1:]) * native.itemsize
        for entry, native in kinds.values()
    )

    def arrange(rows: int) -> Layout:
        chains = {
            name: chain(
                native,
                len(entry.dims),
                small=row_bytes < _SMALL_ROW,
                history=name == "W" and rows <= _MOST_ROWS_OF_HISTORIES and encoding == "delta",
            )
            for name, (entry, native) in kinds.items()
        }
        compact = encoding == "compact" or row_bytes < _SMALL_ROW
        for role, name in VECTORS.items():
            if name in kinds:
                native = kinds[name][1]
                chains[name] = vector_chain(native, small=compact, differences=role != GRADIENT)
        if encoding == "compact":
            chains = replay_chains(chains, rule, vectors)
        part_tokens, counts = _division(chains, kinds, lengths, rows)
        arrays = {
            name: _array(entry, lengths, rows, chains[name], part_tokens, counts.get(name))
            for name, (entry, _) in kinds.items()
        }
        return Layout(block_rows=rows, threads=threads, arrays=arrays, buffers=buffers)

    rows = block_rows or MOST_ROWS
    if block_rows is None:
        # Limits the size of a chunk of few tokens, and the bytes decoded for a snapshot.
        chunk = min(tokens, _FEWEST_TOKENS) * hidden * 4
        elements = lengths.get("element", 0)
        snapshot = max(tokens * hidden, elements) * 4
        while rows > FEWEST_ROWS and (
            rows * chunk > _LARGEST_CHUNK or rows * snapshot > _LARGEST_SNAPSHOT
        ):
            rows //= 2
        fewest = 1 if elements or "word" in lengths else FEWEST_ROWS
        while rows > fewest and arrange(rows).memory > memory:
            rows //= 2
    layout = arrange(rows)
    for name, form in layout.forms.items():
        if math.prod(form.grid) > MOST_CHUNKS:
            raise InvalidArgument(
                f"got blocks of {rows} rows, in which {name} has {math.prod(form.grid):,} chunks, "
                f"expected at most {MOST_CHUNKS:,}; pass a smaller block_rows"
            )
    return within(layout, memory, threads=chosen)


def replay_chains(
    chains: Mapping[str, Chain],
    rule: OptimizerRule | None,
    vectors: VectorRule | None = None,
) -> dict[str, Chain]:
    """Chains of the encoding ``compact``.

    Parameters
    ----------
    chains : mapping of str to Chain
        Chains of the encoding ``delta``.
    rule : OptimizerRule, optional
    vectors : VectorRule, optional
    """
    made = dict(chains)
    rules = [each for each in (rule, vectors) if each is not None]
    for name in (GRADIENT, *(name for each in rules for name in each.state)):
        if name in made and made[name].compressor == "lz4":
            made[name] = replace(made[name], **_REPLAYED)
        elif name == GRADIENT and name in made:
            made[name] = replace(made[name], **_SMALL_GRADIENT)
    if GRADIENT in made and made[GRADIENT].native.itemsize <= _WIDEST_PREDICTED:
        made[GRADIENT] = replace(made[GRADIENT], kind="predicted")
    for each in rules:
        made |= computed_chains(each, made)
    return made


def within(layout: Layout, memory: int, *, threads: int | None) -> Layout:
    """The layout, with fewer encoding threads if `memory` is too small and `threads` is None.

    Raises
    ------
    InvalidArgument
        If `memory` is still too small. The message states the minimum.
    """
    while threads is None and layout.threads > 1 and layout.memory > memory:
        layout = replace(layout, threads=layout.threads - 1)
    if layout.memory > memory:
        least = math.ceil(layout.memory / (1 << 20))
        raise InvalidArgument(
            f"the memory budget of {format_bytes(memory)} is too small for {layout.buffers} "
            f"block{'s' * (layout.buffers > 1)} of {layout.block_rows} "
            f"row{'s' * (layout.block_rows > 1)} ({format_bytes(layout.blocks_memory)}) and their "
            f"encoding; raise it to at least {least} MiB, or use fewer rows per block"
        )
    return layout


def _division(
    chains: Mapping[str, Chain],
    kinds: Mapping[str, tuple[Variable, NativeType]],
    lengths: Mapping[str, int],
    rows: int,
) -> tuple[int, dict[str, int]]:
    """Tokens of a shard of a matrix, and the number of inner chunks in it for each matrix.

    The tokens are the same for all matrices, so that these can be read together.
    """
    matrices = {
        name: chains[name]
        for name, (entry, _) in kinds.items()
        if entry.dims[1:] == ("token", "hidden")
    }
    tokens, hidden = lengths["token"], lengths["hidden"]
    value = max(coding.native.stored.itemsize for coding in matrices.values())
    most = max(_LARGEST_OBJECT // (rows * hidden * value), _FEWEST_TOKENS)
    size = math.ceil(tokens / math.ceil(tokens / most))
    counts = {
        name: _chunks_of(size, rows, (hidden,), coding)[0] for name, coding in matrices.items()
    }

    def divisors(whole: int) -> dict[str, int]:
        return {
            name: next(part for part in range(count, whole + 1) if whole % part == 0)
            for name, count in counts.items()
        }

    def excess(whole: int) -> float:
        return sum(part / counts[name] for name, part in divisors(whole).items())

    # The numbers of chunks have a common multiple, which also divides the tokens of a shard.
    highest = max(counts.values())
    common = min(range(highest, 2 * highest), key=excess)
    return math.ceil(size / common) * common, divisors(common)


def _chunks_of(tokens: int, rows: int, rest: tuple[int, ...], coding: Chain) -> tuple[int, int]:
    """Number of inner chunks for so many tokens, and rows of each."""
    part, chunk_bytes = rows, _CHUNK
    if coding.token_first:
        chunk_bytes = _CHUNK_OF_HISTORIES
        part = next((part for part in _ROWS_OF_A_SNAPSHOT if rows % part == 0), rows)
    token_bytes = part * math.prod(rest) * coding.native.stored.itemsize
    count = math.ceil(tokens / min(tokens, max(chunk_bytes // token_bytes, _FEWEST_TOKENS)))
    if tokens * rows * math.prod(rest) * 4 > LARGEST_TASK:
        count += count % 2  # an even number, so that half a shard can be a task
    return count, part


def _array(
    entry: Variable,
    lengths: Mapping[str, int],
    rows: int,
    coding: Chain,
    length: int,
    count: int | None,
) -> ArrayLayout:
    """Layout of an array; for a matrix, with `held` tokens and `count` chunks in a shard."""
    row = tuple(lengths[dim] for dim in entry.dims[1:])
    chunk = shard = (rows, *row)
    if "token" in entry.dims:
        tokens, *rest = row
        fewest, part = _chunks_of(length if count else tokens, rows, tuple(rest), coding)
        if count is None:
            length, count = tokens, fewest
        # Equal chunks; the last one lacks fewer tokens than there are chunks.
        size = math.ceil(length / count)
        chunk, shard = (part, size, *rest), (rows, size * count, *rest)
    elif "element" in entry.dims:
        (elements,) = row
        length = _even(elements, _LARGEST_OBJECT // (rows * coding.native.stored.itemsize))
        count, _ = _chunks_of(length, rows, (), coding)
        size = math.ceil(length / count)
        chunk, shard = (rows, size), (rows, size * count)
    elif entry.dims[1:3] == ("example", "position"):
        examples, *rest = row
        example = math.prod(rest) * coding.native.stored.itemsize
        length = _even(examples, _LARGEST_OBJECT // (rows * example))
        size = _even(length, _CHUNK // example)
        chunk, shard = (1, size, *rest), (rows, math.ceil(length / size) * size, *rest)
    return ArrayLayout(variable=entry, row=row, chunk=chunk, shard=shard, chain=coding)


def _even(whole: int, most: int) -> int:
    """Length of equal parts of a whole, from 1 to `most`."""
    return math.ceil(whole / math.ceil(whole / max(most, 1)))
