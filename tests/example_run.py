"""The run that the examples in docstrings look at: 20 steps of AdamW, without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trajstore import RunWriter
from trajstore.values.native_types import cast
from trajstore.values.optimizer_rule import OptimizerRule

TEXT = "the cat sat on the mat"
TOKENS, HIDDEN, STEPS = 128, 4, 20
OPTIMIZER = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}


MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
NUMBERS = {"logits": "float32", "loss": "float32", "lr": "float64", "clip_coef": "float32"}
TYPES = dict.fromkeys(MATRICES, "bfloat16") | NUMBERS


def write_example_run(path: Path) -> None:
    """Train W to say the letters of `TEXT` as often as they occur, and record every step.

    All tokens start at one point; the learning rate falls to nearly nothing, and at last the
    updates are rounded away. The numbers shown in docstrings are sums of few values and counts,
    which are the same on every machine.
    """
    count = np.bincount(np.frombuffer(TEXT.encode(), np.uint8), minlength=TOKENS)
    wanted = count / count.sum()
    state = np.array([1.0, 0.5, -0.5, 0.25])  # what the model makes of every context
    rule = OptimizerRule.of(OPTIMIZER)
    W = np.repeat(np.where(count == 0, 0.75, 1.5).astype(np.float32)[:, None], HIDDEN, axis=1)
    moments = {name: np.zeros_like(W) for name in ("exp_avg", "exp_avg_sq")}
    with RunWriter.create(
        path,
        token=np.arange(TOKENS),
        hidden=HIDDEN,
        variables=TYPES,
        is_dead=count == 0,
        token_count=count,
        token_text=[chr(token) for token in range(TOKENS)],
        attributes={"optimizer": OPTIMIZER},
        block_rows=8,
    ) as run:
        unknown = {"loss": np.float32("nan"), "lr": np.nan, "clip_coef": np.float32("nan")}
        nothing = {"grad": np.full_like(W, np.nan), "logits": np.full(TOKENS, np.nan, np.float32)}
        run.append(step=0, W=W, **moments, **nothing, **unknown)
        for step in range(1, STEPS + 1):
            logits = (W * state).sum(-1, dtype=np.float64)
            weights = np.exp(logits)
            likely = weights / weights.sum()
            grad = cast(((likely - wanted)[:, None] * state).astype(np.float32), "bfloat16")
            for (name, beta), power in zip(
                {"exp_avg": rule.beta1, "exp_avg_sq": rule.beta2}.items(), (1, 2), strict=True
            ):
                new = beta * moments[name] + (1 - beta) * grad.astype(np.float64) ** power
                moments[name] = cast(new.astype(np.float32), "bfloat16")
            lr = 0.01 * (1 - (step - 1) / STEPS)
            rates = np.float64(lr), np.int64(step)
            change = rule.change(W, *moments.values(), *rates, "bfloat16")
            W = cast(W + change, "bfloat16")
            run.append(
                step=step,
                W=W,
                grad=grad,
                **moments,
                logits=logits.astype(np.float32),
                loss=np.float32(-(wanted * np.log(likely)).sum()),
                lr=lr,
                clip_coef=np.float32(1),
            )
