"""Runs of the encoding `compact` from the sample run, whose optimizer has a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from trajstore import RunWriter, export
from trajstore.values.native_types import cast
from trajstore.values.optimizer_rule import OptimizerRule, Rates

RULE_ARRAYS = ("W", "exp_avg", "exp_avg_sq")


def sample_part(sample: Path, path: Path, rows: int = 22, **options: Any) -> Path:
    """The first rows of the sample run in blocks of 8, of the encoding `compact`."""
    options = {"block_rows": 8, "encoding": "compact", "steps": f"0:{rows}"} | options
    export(sample, path, **options)
    return path


def same_bits(one: Path, other: Path, rows: int | None = None) -> xr.Dataset:
    """The second run; what it holds are, bit for bit, the first rows of the first."""
    ds, whole = xr.open_zarr(other).load(), xr.open_zarr(one).load().isel(step=slice(rows))
    for name in ds.variables:
        assert ds[name].dtype == whole[name].dtype, name
        assert ds[name].values.tobytes() == whole[name].values.tobytes(), name
    return ds


def scheduled_run(path: Path, *, recorded: bool = True, **options: Any) -> Path:
    """A run of AdamW whose beta1 and weight_decay change; `recorded` if it holds them."""
    given = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    optimizer = {"class": "torch.optim.adamw.AdamW", "hyperparameters": given}
    natives = dict.fromkeys(("grad", *RULE_ARRAYS), "bfloat16")
    natives |= {"lr": "float64", "clip_coef": "float32"}
    rng, shape = np.random.default_rng(1), (64, 32)
    state = {name: np.zeros(shape, np.float32) for name in RULE_ARRAYS}
    with RunWriter.create(
        path,
        token=range(shape[0]),
        hidden=shape[1],
        variables=natives | ({"hyperparameters": "float64"} if recorded else {}),
        hyperparameter=["beta1", "weight_decay"],
        attributes={"optimizer": optimizer},
        encoding="compact",
        **{"block_rows": 8, **options},
    ) as run:
        for step in range(20):
            grad = cast(rng.standard_normal(shape).astype(np.float32), "bfloat16")
            values = [0.9 - 0.01 * step, 0.1 * (step % 3)]
            if step:
                numbers = tuple(zip(("beta1", "weight_decay"), values, strict=True))
                rates = Rates(step=step, lr=0.01, clip=1.0, numbers=numbers)
                state = OptimizerRule.of(optimizer).next_row(state, grad, natives, rates)
            held = {"hyperparameters": values} if recorded else {}
            run.append(step, **state, grad=grad, lr=0.01, clip_coef=np.float32(1), **held)
    return path
