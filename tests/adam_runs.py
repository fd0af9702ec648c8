"""Parameters that torch.optim's Adam trains, as runs hold them, and models of a few lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

SHAPE = (6, 5)


def trained(
    kind: str, options: dict[str, Any], dtype: str, rows: int = 20, max_norm: float = 1.0
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
    rates = [np.nan, *(3e-3 * (1 - step / rows) for step in range(1, rows))]
    for step in range(1, rows):
        optimizer.param_groups[0]["lr"] = rates[step]
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
    """Both moments of each row, row by row; with `restart`, each from the recorded row before."""
    import ml_dtypes

    given = ds.attrs["optimizer"]["hyperparameters"]
    coupled = given["weight_decay"] * (not ds.attrs["optimizer"]["class"].endswith("AdamW"))
    native = ds.grad.attrs["native_dtype"]
    native = getattr(ml_dtypes, native, native)
    result = {name: np.zeros(ds.W.shape) for name in ("exp_avg", "exp_avg_sq")}
    for name, moments in result.items():
        beta = given["betas"][name == "exp_avg_sq"]
        recorded = ds[name].values.astype(np.float64)
        if ds.step[0] != 0 or restart:
            moments[0] = recorded[0]
        for row in range(1, ds.sizes["step"]):
            before = recorded[row - 1] if restart else moments[row - 1]
            if "skipped" in ds and ds.skipped.values[row] == 1:
                moments[row] = before
                continue
            g = (ds.grad.values[row] * ds.clip_coef.values[row]).astype(native).astype(np.float64)
            g = -g if given.get("maximize") else g
            g = g + coupled * ds.W.values[row - 1].astype(np.float64) if coupled else g
            moments[row] = beta * before + (1 - beta) * (g * g if name == "exp_avg_sq" else g)
    return result


def attributed_by_hand(ds: xr.Dataset, window: int) -> dict[str, np.ndarray]:
    """What `freeze_attribution` finds, token after token and step after step, in NumPy.

    The change that Adam makes of two moments is the package's own, which has tests against torch.
    """
    from trajstore.values.native_types import cast, spacing
    from trajstore.values.optimizer_rule import OptimizerRule

    rule = OptimizerRule.of(ds.attrs["optimizer"])
    native, W = ds.W.attrs["native_dtype"], ds.W.values
    rows, tokens, _ = W.shape
    lr, kind = ds.lr.values, W.dtype
    taken = np.arange(rows) > 0
    if "skipped" in ds:
        taken &= ds.skipped.values != 1
    count = int(ds.step[0]) + np.cumsum(taken)
    rates = [lr[row] for row in range(rows) if taken[row] and not np.isnan(lr[row])]
    peak = max(rates, default=np.nan)
    with np.errstate(all="ignore"):
        exact = {name: values.astype(kind) for name, values in by_hand(ds).items()}
        norms = np.sqrt((ds.grad.values.astype(np.float64) ** 2).sum(-1)).astype(np.float32)
    live = [token for token in range(tokens) if "is_dead" in ds and not ds.is_dead.values[token]]
    attribution = np.zeros((5, tokens), np.int8)
    margin = np.full((5, tokens), np.nan)
    steps = np.zeros(tokens, np.int64)
    for token in range(tokens):
        w = W[:, token]
        bits = np.where(w == 0, 0, w.view(f"u{kind.itemsize}"))  # both zeros are one value
        last = max([0, *(1 + np.flatnonzero((bits[1:] != bits[:-1]).any(1)))])
        if last == rows - 1:
            continue
        tried = [row for row in range(last + 1, rows) if taken[row]][:window]
        steps[token] = len(tried)
        for number in range(5):
            moves = False
            for row in tried:
                m, v = (ds[name].values[row, token] for name in ("exp_avg", "exp_avg_sq"))
                rate, of = lr[row], native
                if number == 1:
                    m, v = (exact[name][row, token] for name in ("exp_avg", "exp_avg_sq"))
                elif number == 2:
                    rate = peak
                elif number == 3:
                    if not live:
                        continue
                    order = np.argsort(norms[row, live], kind="stable")  # NaN last
                    at = live[order[(len(live) - 1) // 2]]
                    m, v = (ds[name].values[row, at] for name in ("exp_avg", "exp_avg_sq"))
                elif number == 4:
                    if native == "float64":
                        continue
                    of = "float32"
                before = w[row - 1]
                change = rule.change(before, m, v, np.float64(rate), np.int64(count[row]), of)
                with np.errstate(all="ignore"):
                    after = cast((before.astype(np.float64) + change).astype(kind), of)
                    hops = np.abs(change.astype(np.float64)) / spacing(before, of)
                moves |= any(b != a for a, b in zip(before, after, strict=True) if b == b)
                margin[number, token] = np.fmax.reduce([margin[number, token], *hops])
            attribution[number, token] = 3 if np.isnan(margin[number, token]) else 1 + moves
    return {"attribution": attribution, "attribution_margin": margin, "attribution_steps": steps}
