"""Rows that are computed from other arrays: what happens where those are damaged or missing."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but
from compact_runs import RULE_ARRAYS, same_bits, sample_part, scheduled_run
from damage import contents, cut, flip
from stored_forms import stored_forms
from zarr.storage import MemoryStore

from trajstore import RunWriter, export, open_run, repair, verify
from trajstore.codec.computed_rows import cache
from trajstore.errors import FormatError
from trajstore.values.optimizer_rule import OptimizerRule, Rates

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
ROWS, BLOCK = 40, 16


@pytest.fixture(scope="module")
def history(sample: Path) -> xr.Dataset:
    return open_run(sample).isel(step=slice(0, ROWS)).load()


@pytest.fixture(scope="module")
def written(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_part(
        sample, tmp_path_factory.mktemp("compact") / "run.zarr", ROWS, block_rows=BLOCK
    )


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run.zarr"))


@pytest.fixture(autouse=True)
def _no_cache() -> Iterator[None]:
    """The same rows of another copy would be found."""
    cache.clear(most=0)
    yield
    cache.clear()


def in_memory(run: Path) -> xr.Dataset:
    from zarr.core.buffer import default_buffer_prototype

    buffer = default_buffer_prototype().buffer
    held = {key: buffer.from_bytes(data) for key, data in contents(run).items()}
    return xr.open_zarr(MemoryStore(held))


@pytest.mark.parametrize(
    "way", nightly_but([None, "no files", "threads", "processes"], None, "no files", "threads")
)
def test_plain_xarray_computes_the_rows(
    written: Path, history: xr.Dataset, way: str | None
) -> None:
    if way == "no files":
        ds = in_memory(written)
    else:
        opened = xr.open_zarr(written, chunks=way and {"step": BLOCK})
        ds = pickle.loads(pickle.dumps(opened))  # as it travels to another process
    if way in ("threads", "processes"):
        ds = ds.compute(scheduler=way)
    for name in MATRICES:
        assert ds[name].values.tobytes() == history[name].values.tobytes()
        for at in ((slice(5, 35, 3), [70, 3]), (slice(3), 5), (slice(20, 30), [9, 2])):
            assert ds[name][at].values.tobytes() == history[name][at].values.tobytes()


def test_rows_that_the_rule_does_not_give_are_corrected(sample: Path, tmp_path: Path) -> None:
    path = sample_part(sample, tmp_path / "run.zarr")
    elements = (22 - 3) * 128 * 16  # 3 blocks, of which each stores its first row
    sound = {"chunks": 3, "differences": 0, "elements": elements, "corrected": 0}
    assert stored_forms(path) == dict.fromkeys(RULE_ARRAYS, sound) | {
        "grad": {"chunks": 3, "differences": 0}
    }
    rows = xr.open_zarr(path).load()
    with RunWriter.resume(path, rows=21, fsync=False) as run:
        row: dict[str, Any] = {str(name): rows[name].values[21] for name in rows.data_vars}
        row["W"][5:8, 3] = 22
        run.append(21, **row)
    assert stored_forms(path)["W"] == sound | {"corrected": 3}
    assert stored_forms(path)["exp_avg"] == sound


def test_changing_hyperparameters_of_each_row_compute_it(tmp_path: Path) -> None:
    notes: list[str] = []
    path = scheduled_run(tmp_path / "run.zarr", on_note=notes.append, fsync=False)
    assert all(stored_forms(path)[name]["corrected"] == 0 for name in RULE_ARRAYS)
    assert (open_run(path).attrs["trajstore_format"], notes) == (4, [])
    export(path, tmp_path / "copy.zarr", encoding="delta")
    rows = xr.open_zarr(path).load()
    with RunWriter.resume(path, rows=11, fsync=False) as run:  # in the middle of a block
        for at in range(11, 20):
            run.append(at, **{str(name): rows[name].values[at] for name in rows.data_vars})
    same_bits(tmp_path / "copy.zarr", path)


NATIVES = {"W": "float32", "grad": "float32", "lr": "float64"}


def of_sgd(path: Path, W: Any, grad: np.ndarray, decay: float = 0) -> Path:
    """A run of these rows, in one block."""
    optimizer = {"class": "SGD", "hyperparameters": {"momentum": 0, "weight_decay": decay}}
    with RunWriter.create(
        path,
        token=range(4),
        hidden=2,
        variables=NATIVES,
        block_rows=9,
        attributes={"optimizer": optimizer},
        encoding="compact",
        fsync=False,
    ) as run:
        for step, row in enumerate(W):
            run.append(step=step, W=row, grad=grad[step], lr=0.25)
    return path


def test_rows_that_are_stored_need_no_other_array(tmp_path: Path) -> None:
    grad = np.random.default_rng(1).standard_normal((9, 4, 2)).astype(np.float32)
    W = np.ones_like(grad)  # which no rule gives
    path = of_sgd(tmp_path / "run.zarr", W, grad)
    shutil.rmtree(path / "grad")
    for ds in (in_memory(path), xr.open_zarr(path)):
        np.testing.assert_array_equal(ds.W.values, W)


@pytest.mark.parametrize("opened", [in_memory, xr.open_zarr])
def test_an_array_that_is_broken_or_missing_is_named(run: Path, opened: Any) -> None:
    cut(run / "grad" / "c.1.0.0", -1)
    with pytest.raises(FormatError, match=r"W, block 1 .* computed from grad .* not usable: the i"):
        _ = opened(run).W.values
    shutil.rmtree(run / "grad")
    with pytest.raises(
        FormatError, match=r"^W, block . .* computed from grad .*, which is missing"
    ):
        _ = opened(run).W.values
    assert opened(run).loss.shape == (ROWS,)


def test_runs_that_differ_in_their_rule_alone_share_no_rows(tmp_path: Path) -> None:
    """Their files hold the same bytes: the first rows, gradients, and corrections of 0."""
    cache.clear(most=1 << 20)
    grad = np.ones((4, 4, 2), np.float32)
    for decay in (0.0, 0.5):
        rule = OptimizerRule.of(
            {"class": "SGD", "hyperparameters": {"momentum": 0, "weight_decay": decay}}
        )
        W = [grad[0]]
        for step in range(1, 4):
            rates = Rates(step=step, lr=0.25, clip=1)
            W.append(rule.next_row({"W": W[-1]}, grad[0], NATIVES, rates)["W"])
        path = of_sgd(tmp_path / f"{decay}.zarr", W, grad, decay)
        np.testing.assert_array_equal(open_run(path).W.values, W)


def test_a_repair_drops_the_rows_of_all_that_is_computed(run: Path, history: xr.Dataset) -> None:
    flip(run / "exp_avg" / "c.1.0.0", 320)
    (problem,) = verify(run).problems
    assert problem.array == "exp_avg"
    done = repair(run)
    assert done.rows == BLOCK
    found = ("exp_avg", "W", "exp_avg_sq")
    assert done.damaged == dict.fromkeys(found, f"steps {BLOCK} to {2 * BLOCK - 1}")
    assert "grad" in done.whole
    assert verify(run).clean
    for name in MATRICES:
        assert open_run(run)[name].values.tobytes() == history[name].values[:BLOCK].tobytes()
