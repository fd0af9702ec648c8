"""A small real training, recorded in a second, so that analysis can be tried before any training.

NumPy alone trains it: no torch, no download, no file of the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import RunExists
from trajstore.provenance import RunAttributes
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.writing.writer import RunWriter
from trajstore.values.native_types import cast
from trajstore.values.optimizer_rule import OptimizerRule, Rates

Array = npt.NDArray[Any]

_TEXT = """
The lamp in the north window burned until four. Mara counted the boats that came in, and wrote each
name in a book with a green cover. There were nine boats in spring and six in autumn. Nobody knew
where the other three had gone, and nobody on the pier wanted to be the first to ask about it.
"""
_TOKENS, _HIDDEN, _STEPS, _BATCH = 128, 16, 300, 64
_LR = 0.01
_OPTIMIZER = {
    "class": "trajstore.trainers.rounded_optimizer.RoundedAdamW",
    "hyperparameters": {
        "lr": _LR,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "state_dtype": "bfloat16",
        "rounding": "nearest",
        "rounding_seed": 0,
    },
    "schedule": {"class": "linear", "steps": _STEPS},
}
_VARIABLES = {
    "W": "bfloat16",
    "grad": "bfloat16",
    "exp_avg": "bfloat16",
    "exp_avg_sq": "bfloat16",
    "hidden_mean": "float32",
    "logits": "float32",
    "loss": "float32",
    "lr": "float64",
    "clip_coef": "float32",
}


def sample_run(path: str | os.PathLike[str] = "sample.zarr") -> Path:
    """Train a small language model for 300 steps, record every step, and return the run's path.

    The model predicts the next character of a short text. Its unembedding `W` (128 ASCII tokens ×
    16, bfloat16) is trained by AdamW with bfloat16 moments, and the hidden state of each
    character is fixed. The learning rate falls linearly to 0. 99 tokens never occur in the text:
    they move all the same, until their updates round away.

    A sample run that exists is returned as it is.

    Parameters
    ----------
    path : path-like
        Folder of the run.

    Returns
    -------
    Path

    Raises
    ------
    RunExists
        If the path holds anything but a complete sample run.

    Examples
    --------
    >>> import xarray as xr
    >>> from trajstore import sample_run
    >>> ds = xr.open_zarr(sample_run("sample.zarr"))
    >>> dict(ds.sizes)
    {'step': 301, 'token': 128, 'hidden': 16}
    >>> int(ds.is_dead.sum())
    99
    """
    target = Path(path)
    if target.exists():
        _check_sample(target)
        return target
    text = np.frombuffer(" ".join(_TEXT.split()).encode(), np.uint8).astype(np.int64)
    counts = np.bincount(text, minlength=_TOKENS)
    with RunWriter.create(
        target,
        token=np.arange(_TOKENS),
        hidden=_HIDDEN,
        variables=_VARIABLES,
        is_dead=counts == 0,
        token_count=counts,
        token_text=[chr(token) for token in range(_TOKENS)],
        attributes={"optimizer": _OPTIMIZER, "provenance": {"sample_run": 1}},
    ) as run:
        for row in _train(text):
            run.append(**row)
    return target


def _check_sample(target: Path) -> None:
    attributes: dict[str, Any] = {}
    if (target / "zarr.json").exists():
        attributes = root_attributes(target)
    is_sample = RunAttributes.of(attributes).provenance.get("sample_run") == 1
    if not is_sample or attributes.get("status") != "complete":
        raise RunExists(f"{target} exists and is not a complete sample run; choose another path")


def _train(text: Array) -> Any:
    """Rows of the training, one for each step from 0 on, as arguments of `RunWriter.append`."""
    random = np.random.default_rng(7)
    states = 0.5 * random.standard_normal(_HIDDEN) + random.standard_normal((_TOKENS, _HIDDEN))
    W = _rounded(0.02 * random.standard_normal((_TOKENS, _HIDDEN)) + 0.25)
    rule = OptimizerRule.of(_OPTIMIZER)
    state = {"W": W, "exp_avg": np.zeros_like(W), "exp_avg_sq": np.zeros_like(W)}
    nan = np.float32("nan")
    yield {
        "step": 0,
        **state,
        "grad": np.full_like(W, nan),
        "hidden_mean": np.full(_HIDDEN, nan),
        "logits": np.full(_TOKENS, nan),
        "loss": nan,
        "lr": np.nan,
        "clip_coef": nan,
    }
    for step in range(1, _STEPS + 1):
        place = random.integers(len(text) - 1, size=_BATCH)
        hidden, following = states[text[place]], text[place + 1]
        logits = hidden @ state["W"].T.astype(np.float64)
        likely = np.exp(logits - logits.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        loss = -np.log(likely[np.arange(_BATCH), following]).mean()
        error = likely.copy()
        error[np.arange(_BATCH), following] -= 1
        grad = _rounded(error.T @ hidden / _BATCH)
        lr = _LR * (1 - (step - 1) / _STEPS)
        state = rule.next_row(state, grad, _VARIABLES, Rates(step=step, lr=lr, clip=1.0))
        yield {
            "step": step,
            **state,
            "grad": grad,
            "hidden_mean": hidden.mean(axis=0).astype(np.float32),
            "logits": logits[0].astype(np.float32),
            "loss": np.float32(loss),
            "lr": lr,
            "clip_coef": np.float32(1),
        }


def _rounded(values: Array) -> Array:
    return cast(values.astype(np.float32), "bfloat16")
