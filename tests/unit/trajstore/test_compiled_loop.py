"""When loops are compiled, and how they get their arrays."""

from __future__ import annotations

import importlib
import sys
import threading
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

from trajstore import compiled_loop
from trajstore.compiled_loop import (
    CompiledLoop,
    memory_of,
    rows_in_one_piece,
    values_side_by_side,
)

SOURCE = """
def double(values, out):
    for at in range(values.size):
        out[at] = 2 * values[at]
"""


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledLoop:
    """One of a module of its own, compiled after 1,000 numbers."""
    (tmp_path / "doubling.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled_loop, "_ENOUGH", 1_000)
    importlib.invalidate_caches()
    sys.modules.pop("doubling", None)
    return CompiledLoop("doubling", "double")


def test_it_is_compiled_when_enough_was_gone_through(loop: CompiledLoop) -> None:
    pytest.importorskip("numba")
    assert loop.for_numbers(999) is None
    assert "doubling" not in sys.modules
    double = loop.for_numbers(1)
    assert double is not None
    values, out = np.arange(5.0), np.empty(5)
    double(values, out)
    np.testing.assert_array_equal(out, 2 * values)
    assert loop.for_numbers(1) is double


def test_while_one_thread_loads_it_others_go_on(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, loaded = threading.Event(), threading.Event()

    def load(self: CompiledLoop) -> object:
        loading.set()
        assert loaded.wait(10)
        return print

    monkeypatch.setattr(CompiledLoop, "_load", load)
    thread = threading.Thread(target=loop.for_numbers, args=(1_000,))
    thread.start()
    assert loading.wait(10)
    assert loop.for_numbers(1_000) is None
    loaded.set()
    thread.join()
    assert loop.for_numbers(1) is print


def test_without_numba_it_is_never_compiled(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_loop, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop.for_numbers(1_000) is None
    monkeypatch.undo()
    assert loop.for_numbers(1_000) is None  # it is looked for once


def test_a_numba_that_cannot_be_used_is_said_once(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> types.ModuleType:
        raise ImportError("Numba needs NumPy 2.3 or less. Got NumPy 9.9.")

    monkeypatch.setattr(compiled_loop, "find_spec", lambda name: True)
    monkeypatch.setattr(compiled_loop, "import_module", broken)
    with pytest.warns(RuntimeWarning, match=r"^numba is installed and cannot be used.*NumPy 9\.9"):
        assert loop.for_numbers(1_000) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop.for_numbers(1_000) is None


def test_whoever_switches_numba_off_gets_no_loop_of_python(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert loop.for_numbers(1_000) is None


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba = pytest.importorskip("numba")
    real = numba.njit

    def njit(*, nogil: bool, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available")
        return real(nogil=nogil)

    monkeypatch.setattr(numba, "njit", njit)
    double = loop.for_numbers(1_000)
    assert double is not None
    out = np.empty(2)
    double(np.ones(2), out)
    assert out.tolist() == [2, 2]


def test_memory_reaches_from_the_first_value_to_the_last() -> None:
    values = np.arange(60).reshape(3, 4, 5)
    assert memory_of(values).tolist() == list(range(60))
    assert memory_of(values[1:, 1:3, 2:4]).tolist() == list(range(27, 54))
    assert memory_of(values.transpose(2, 0, 1)).tolist() == list(range(60))
    memory_of(values[1:, 1:3])[0] = -1
    assert values[1, 1, 0] == -1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.empty((3, 4, 5)), (0, 20)),
        (np.empty((3, 4, 5))[:, 1:3], (0, 10)),
        (np.empty((3, 4, 5))[:, :, 1:3], (1, 2)),
        (np.empty((3, 4, 5))[:, :, ::2], (2, 1)),
        (np.empty((4, 3, 5)).transpose(1, 0, 2), (1, 5)),
        (np.empty((3, 4, 5)).transpose(1, 2, 0), (2, 1)),
        (np.empty((3, 4, 1))[:, ::2], (1, 1)),
        (np.empty((3, 1, 5)), (0, 5)),
        (np.empty(3), (0, 1)),
        (np.empty((3, 0, 5)), (2, 0)),
        (np.empty((0, 4, 5)), (2, 0)),
        (np.empty((3, 4, 5))[::-1], (2, 0)),
        (np.empty((3, 4, 5))[:, ::-1], (2, 0)),
    ],
)
def test_how_far_values_lie_side_by_side(values: np.ndarray, expected: tuple[int, int]) -> None:
    assert values_side_by_side(values) == expected
    assert values_side_by_side(np.empty(values.shape), values) == expected
    assert rows_in_one_piece(values) == (expected[0] == 0)


def test_a_broadcast_row_does_not_lie_in_one_piece() -> None:
    assert not rows_in_one_piece(np.broadcast_to(np.zeros(()), (3, 4)))
