"""Histories for tests: random ones, and special cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr
from example_run import OPTIMIZER

MakeRun = Callable[..., xr.Dataset]


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 that holds bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 values, as bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def run_of(
    W: np.ndarray,
    *,
    steps: np.ndarray | None = None,
    native: str = "bfloat16",
    is_dead: np.ndarray | None = None,
    chunks: tuple[int, int, int] | None = None,
    **others: np.ndarray,
) -> xr.Dataset:
    """A Dataset like that of a run; uint16 values are bfloat16 bits."""

    def stored(values: np.ndarray) -> np.ndarray:
        return widened(values) if values.dtype == np.uint16 else values

    rows, tokens, _ = W.shape
    dims = ("step", "token", "hidden")
    ds = xr.Dataset(
        {
            name: (dims[: values.ndim], stored(values), {"native_dtype": native, "units": "1"})
            for name, values in {"W": W, **others}.items()
        },
        coords={
            "step": np.arange(rows) if steps is None else steps,
            "token": np.arange(tokens)[::-1] * 3,  # neither sorted nor positions
        },
    )
    if is_dead is not None:
        ds = ds.assign_coords(is_dead=("token", is_dead))
    return ds.chunk(dict(zip(dims, chunks, strict=True))) if chunks else ds


def wandering(rows: int, tokens: int, hidden: int, seed: int = 0) -> np.ndarray:
    """bfloat16 bits of a walk in which every token freezes at some time, or never."""
    rng = np.random.default_rng(seed)
    W = widened(bfloat16(rng.normal(0, 0.02, (tokens, hidden))))
    rest = rng.integers(0, 2 * rows, tokens)
    history = [bfloat16(W)]
    for row in range(1, rows):
        active = (row < rest) & (rng.random(tokens) < 0.7)
        change = rng.normal(0, 10.0 ** rng.uniform(-6, -2), (tokens, hidden))
        change *= rng.random((tokens, hidden)) < rng.choice([0.05, 1.0], (tokens, 1))
        W = widened(bfloat16(W + change * active[:, None]))
        history.append(bfloat16(W))
    return np.stack(history)


def adversarial() -> np.ndarray:
    """bfloat16 bits, (12, 14, 4): one token per special case."""
    rows, hidden = 12, 4
    one = 0x3F80
    W = np.full((rows, 14, hidden), one, np.uint16)
    W[1, 1, 0] = one + 1  # moves once, and back
    W[-1, 2, 0] = one + 1  # moves at the last step
    W[5:, 3, 1] = one + 1  # moves once
    W[:, 4] = np.where(np.arange(rows) % 2, 0x8000, 0x0000)[:, None]  # ±0 flips: no motion
    W[:, 5, 0] = 1 + np.arange(rows)  # through the subnormals
    W[:, 6, 0] = one - 6 + np.arange(rows)  # up across an exponent
    W[:, 7, 0] = one + 6 - np.arange(rows)  # down across it
    W[4:, 8] = 0x7FC0  # becomes and remains NaN
    W[4:8, 9, 2] = 0x7F80  # to infinity and back
    W[6:, 10, 3] = 0x7FC1  # NaN
    W[9:, 10, 3] = 0x7FC2  # with another payload: bits changed
    W[2:4, 11] = 0x4000  # thaws: moves, is unchanged, moves
    W[8:, 11] = 0x4040
    W[:, 12, 0] = np.where(np.arange(rows) % 2, 1, 0x8001)  # across zero, one step each side
    W[3:, 13, 0] = 0x7F7F  # from 1 to the largest finite value
    return W


# One chunking each: test_several_quantities checks all quantities for independence of the chunks.
Chunks = tuple[int, int, int] | None
HISTORIES: dict[str, tuple[Callable[[], np.ndarray], Chunks]] = {
    "wandering": (lambda: wandering(17, 9, 8), (4, 3, -1)),
    "adversarial": (adversarial, (5, -1, 2)),
    "any bits": (lambda: np.random.default_rng(3).integers(0, 1 << 16, (9, 7, 3), np.uint16), None),
    "one row": (lambda: wandering(1, 4, 8), (1, 1, 1)),
    "one long vector": (lambda: wandering(8, 1, 301, seed=7), (-1, 2, -1)),
}


@pytest.fixture(params=HISTORIES)
def history(request: pytest.FixtureRequest) -> tuple[Callable[[], np.ndarray], Chunks]:
    return HISTORIES[request.param]


@pytest.fixture
def bits(history: tuple[Callable[[], np.ndarray], Chunks]) -> np.ndarray:
    return history[0]()


@pytest.fixture
def chunks(history: tuple[Callable[[], np.ndarray], Chunks]) -> Chunks:
    return history[1]


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    return run_of


@pytest.fixture(scope="session")
def walk() -> Callable[..., np.ndarray]:
    return wandering


@pytest.fixture(scope="session")
def adam_run() -> xr.Dataset:
    """A run of 23 rows with gradients, moments and logits."""
    rng = np.random.default_rng(0)
    rows, tokens, hidden = 23, 11, 6
    grad = rng.normal(size=(rows, tokens, hidden)).astype(np.float32)
    past = grad * (np.arange(rows) > 0)[:, None, None]  # no gradients before row 0
    return run_of(
        wandering(rows, tokens, hidden),
        grad=grad,
        exp_avg=past / 10,
        exp_avg_sq=past**2,
        logits=rng.normal(size=(rows, tokens)).astype(np.float32),
        lr=np.linspace(1e-3, 0, rows),
        is_dead=np.arange(tokens) % 3 == 0,
    ).assign_attrs(optimizer=OPTIMIZER)
