"""Parameters that torch.optim's Adam trains, as runs hold them, and models of a few lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

SHAPE = (6, 8)


def trained(
    kind: str, options: dict[str, Any], dtype: str, rows: int = 20, max_norm: float = 2.0
) -> xr.Dataset:
    """A run of `rows` rows whose gradients come and go, and are clipped at first."""
    import torch

    torch.manual_seed(0)
    native = getattr(torch, dtype)
    W = torch.nn.Parameter((0.02 * torch.randn(*SHAPE)).to(native))
    optimizer = getattr(torch.optim, kind)([W], **{"lr": 3e-3, **options})
    nothing = torch.full_like(W, float("nan"))
    zero = torch.zeros_like(W)
    history: dict[str, list[Any]] = {
        "W": [W.detach().clone()],
        "grad": [nothing],
        "exp_avg": [zero],
        "exp_avg_sq": [zero],
        "clip_coef": [torch.tensor(float("nan"), dtype=native)],
    }
    rates = [np.nan]
    for step in range(1, rows):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / rows)
        rates.append(optimizer.param_groups[0]["lr"])
        W.grad = (10.0 ** (-step / 4) * torch.randn(*SHAPE)).to(native)
        history["grad"].append(W.grad.clone())
        norm = torch.nn.utils.clip_grad_norm_([W], max_norm)
        history["clip_coef"].append(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        optimizer.step()
        state = optimizer.state[W]
        for name in ("exp_avg", "exp_avg_sq"):
            history[name].append(state[name].clone())
        history["W"].append(W.detach().clone())
    stored = torch.float64 if dtype == "float64" else torch.float32
    dims = ("step", "token", "hidden")
    ds = xr.Dataset(
        {
            name: (
                dims if values[0].ndim else dims[:1],
                np.stack([value.to(stored).numpy() for value in values]),
                {"native_dtype": dtype},
            )
            for name, values in history.items()
        },
        coords={
            "step": np.arange(rows),
            "token": np.arange(SHAPE[0]),
            "is_dead": ("token", np.arange(SHAPE[0]) % 3 == 0),
        },
    ).assign(lr=("step", np.array(rates)))
    group = optimizer.param_groups[0]
    return ds.assign_attrs(
        optimizer={
            "class": f"torch.optim.{kind.lower()}.{kind}",
            "hyperparameters": {key: value for key, value in group.items() if key != "params"},
        }
    )


def by_hand(ds: xr.Dataset, *, restart: bool = False) -> dict[str, np.ndarray]:
    """Both moments of each row, element by element; with `restart`, each from the row before."""
    given = ds.attrs["optimizer"]["hyperparameters"]
    coupled = given["weight_decay"] * (not ds.attrs["optimizer"]["class"].endswith("AdamW"))
    native = ds.grad.attrs["native_dtype"]
    result = {name: np.zeros(ds.W.shape) for name in ("exp_avg", "exp_avg_sq")}
    for name, moments in result.items():
        beta = given["betas"][name == "exp_avg_sq"]
        if ds.step[0] != 0 or restart:
            moments[0] = ds[name].values[0]
        for row in range(1, ds.sizes["step"]):
            for at in np.ndindex(ds.W.shape[1:]):
                before = ds[name].values[row - 1][at] if restart else moments[row - 1][at]
                if "skipped" in ds and ds.skipped.values[row] == 1:
                    moments[row][at] = before
                    continue
                g = float(rounded(ds.grad.values[row][at] * ds.clip_coef.values[row], native))
                g = -g if given.get("maximize") else g
                g += coupled * float(ds.W.values[row - 1][at]) if coupled else 0.0
                x = g * g if name == "exp_avg_sq" else g
                moments[row][at] = beta * float(before) + (1 - beta) * x
    return result


def rounded(value: np.floating, native: str) -> np.floating:
    """Nearest value of the native type, by ml_dtypes."""
    import ml_dtypes

    return np.float64(np.asarray(value).astype(getattr(ml_dtypes, native, native)))
