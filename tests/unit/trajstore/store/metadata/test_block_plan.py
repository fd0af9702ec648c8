from __future__ import annotations

import math
import operator

import pytest
from exchange_runs import ALL
from hypothesis import given
from hypothesis import strategies as st

from trajstore.defaults import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument
from trajstore.store.metadata.block_plan import Layout, plan, within
from trajstore.units import parse_bytes


def test_gatsby_and_wordybird_get_the_blocks_that_the_format_names() -> None:
    assert plan(ALL, tokens=128, hidden=64).block_rows == 256
    assert plan(ALL, tokens=50_257, hidden=64).block_rows in (16, 32)


def check_division(layout: Layout) -> None:
    """Fail unless the parts of all arrays are whole chunks, and cover a row."""
    for array in layout.arrays.values():
        assert not any(map(operator.mod, array.shard, array.chunk))
        assert array.shard[0] == layout.block_rows
        if len(array.shard) > 1:
            assert array.shard[2:] == array.row[1:]
            assert (array.parts - 1) * array.shard[1] < array.row[0] <= array.parts * array.shard[1]
            # Rounding up wastes less than one chunk.
            assert array.shard[1] - -(-array.row[0] // array.parts) < array.chunk[1]


@given(
    variables=st.sampled_from([ALL, ALL | {"exp_avg": "float64"}]),
    tokens=st.integers(1, 60_000),
    hidden=st.integers(1, 1024),
    memory=st.integers(1 << 10, 1 << 31),
    rows=st.none() | st.integers(1, 64),
    buffers=st.integers(1, 2),
)
def test_a_plan_keeps_its_promises(
    variables: dict[str, str],
    tokens: int,
    hidden: int,
    memory: int,
    rows: int | None,
    buffers: int,
) -> None:
    sizes = {"tokens": tokens, "hidden": hidden, "buffers": buffers}
    try:
        layout = plan(variables, memory=memory, block_rows=rows, **sizes)
    except InvalidArgument as error:  # it says the least that works
        least = parse_bytes(str(error).split("at least ")[1].split(",")[0])
        assert plan(variables, memory=least, block_rows=rows, **sizes).memory > memory
        return
    assert layout.memory <= memory
    assert rows in (None, layout.block_rows)
    check_division(layout)
    matrices = [array for array in layout.arrays.values() if len(array.row) == 2]
    assert len({array.shard for array in matrices}) == 1
    # Memory of more than 32 MiB goes back to the system at once; a chunk has 128 tokens at least.
    decoded = math.prod(matrices[0].shard) * max(array.native.stored.itemsize for array in matrices)
    assert decoded <= 32 << 20 or matrices[0].shard[1] <= 128


def test_many_processors_fit_into_little_memory() -> None:
    """What imports and exports take by default holds a block of Wordybird, here and there."""
    sizes = {"tokens": 50_257, "hidden": 64, "buffers": 1, "threads": 8}
    matrices = dict.fromkeys(("W", "grad", "exp_avg", "exp_avg_sq"), "bfloat16")
    assert plan(matrices, memory=parse_bytes(EXCHANGE_MEMORY), **sizes).block_rows == 8
    memory, layout = parse_bytes("240MiB"), plan(matrices, memory=1 << 30, block_rows=8, **sizes)
    fewer = within(layout, memory, threads=None)
    assert 1 <= fewer.threads < 8
    assert fewer.memory <= memory
    with pytest.raises(InvalidArgument, match="1 block of 8 rows"):
        plan(matrices, memory=memory, **sizes)


@given(
    examples=st.integers(1, 70),
    positions=st.integers(1, 2000),
    rows=st.integers(1, 64),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_states_are_divided_along_their_examples(
    examples: int, positions: int, rows: int, dtype: str
) -> None:
    variables = {"W": dtype, "batch": "float64", "hidden_states": dtype}
    sizes = {"tokens": 50, "hidden": 64, "examples": examples, "positions": positions}
    layout = plan(variables, block_rows=rows, memory=1 << 60, **sizes)
    states = layout.arrays["hidden_states"]
    example = positions * 64 * 4
    assert states.row == (examples, positions, 64)
    check_division(layout)
    assert (layout.block_rows, states.chunk[0], states.chunk[2:]) == (rows, 1, states.row[1:])
    assert states.chunk[1] * example <= max(2 << 20, example)
    # A shard is a whole number of chunks, so it may be longer by fewer examples than it has chunks.
    most = max(30 << 20, rows * example)
    assert rows * (states.shard[1] - states.shard[1] // states.chunk[1]) * example <= most


@given(elements=st.integers(1, 1 << 24), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_vectors_of_a_model_are_divided_along_their_elements(elements: int, dtype: str) -> None:
    variables = {"W": dtype, "params": dtype, "params_grad": dtype}
    layout = plan(variables, tokens=50, hidden=8, lengths={"element": elements}, memory=1 << 29)
    assert layout.memory <= 1 << 29
    params = layout.arrays["params"]
    assert params.row == (elements,)
    check_division(layout)
    assert params.chunk[0] == layout.block_rows
    assert math.prod(params.chunk) * 4 <= 2 << 20
    longer = params.shard[1] // params.chunk[1]  # a whole number of chunks
    assert layout.block_rows * (params.shard[1] - longer) * 4 <= 30 << 20
    with pytest.raises(InvalidArgument, match="params: got no length of the dimension element"):
        plan(variables, tokens=50, hidden=8)


def test_blocks_of_more_chunks_than_readers_take_are_refused() -> None:
    sizes = {"tokens": 1, "hidden": 1, "examples": 1, "positions": 1, "memory": 1 << 40}
    variables = {"W": "float32", "hidden_states": "float32"}
    assert plan(variables, block_rows=1 << 16, **sizes).block_rows == 1 << 16
    with pytest.raises(InvalidArgument, match="hidden_states has 65,537 chunks, expected at most"):
        plan(variables, block_rows=(1 << 16) + 1, **sizes)
