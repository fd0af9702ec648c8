"""The layouts of the notebooks' files: key names, types, alignment, extra scalars.

One table serves both ways out and in. What differs between the layouts and a run:

* 14.1a, 15.1a and 1.12f hold the state after each step, as a run does, and zeros where no step had
  been taken yet, where a run has NaN. 14.1a holds changes of W, not W.
* 1.12a holds W and the moments *before* the step of their row, beside the gradient, logits and loss
  of it; so its last row knows nothing of what the last step made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["LAYOUTS", "LEARNING_RATE", "NOTEBOOKS", "Column", "Notebook", "Scalar"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A tensor with one row per step.

    Attributes
    ----------
    key, variable : str
        Names in the file and in a run.
    dtype : str
        In the file.
    blank : {'zero', 'nan'}
        What the file holds in the row of step 0, where a run has NaN.
    time : {'after', 'before', 'change'}
        The value after the step, the value before it, or the difference.
    """

    key: str
    variable: str
    dtype: str
    blank: Literal["zero", "nan"] = "zero"
    time: Literal["after", "before", "change"] = "after"


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A scalar tensor that repeats part of the configuration.

    Attributes
    ----------
    key, dtype : str
    paths : tuple of tuple of str
        Where in the attributes of a run it may be; the first that is there counts. An import
        writes it to the first.
    codes : dict of str to int
        Numbers that stand for words; empty where the attribute is a number itself.
    """

    key: str
    dtype: str
    paths: tuple[tuple[str, ...], ...]
    codes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Notebook:
    """Layout of one notebook's file.

    Attributes
    ----------
    name : str
        Number of the notebook.
    columns : tuple of Column
    required : tuple of str
        Keys without which a file is not of this layout.
    has_steps : bool
        Whether it labels its rows, in ``recorded_steps``.
    has_populations : bool
        Whether it lists ``dead_token_ids`` and ``live_token_ids``.
    has_counts : bool
        Whether it has the numbers ``n_trained`` and ``n_untrained``.
    scalars : tuple of Scalar
    sizes : dict of str to tuple of str
        Whole numbers of the configuration that its metadata repeat, and where they are in the
        attributes of a run.
    """

    name: str
    columns: tuple[Column, ...]
    required: tuple[str, ...]
    has_steps: bool = True
    has_populations: bool = False
    has_counts: bool = False
    scalars: tuple[Scalar, ...] = ()
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_HYPERPARAMETERS = ("optimizer", "hyperparameters")
LEARNING_RATE = Scalar(
    key="learning_rate",
    dtype="float32",
    paths=(
        (*_HYPERPARAMETERS, "initial_lr"),
        ("config", "optimizer", "lr"),
        (*_HYPERPARAMETERS, "lr"),
    ),
)
_DECAY = Scalar(key="weight_decay", dtype="float32", paths=((*_HYPERPARAMETERS, "weight_decay"),))
_BETAS = tuple(
    Scalar(
        key=f"adam_beta{number + 1}",
        dtype="float32",
        paths=((*_HYPERPARAMETERS, "betas", str(number)),),
    )
    for number in range(2)
)
_SIGMA = ("config", "initialisation", "sigma")
# 0 means drawn in float32, then rounded, which is how the point-like start is made.
_METHOD = Scalar(
    key="init_method_code",
    dtype="int32",
    paths=(("config", "initialisation", "kind"),),
    codes={"point": 0},
)


def _recorder_columns(dtype: str) -> tuple[Column, ...]:
    return (
        Column(key="embeddings", variable="W", dtype=dtype),
        Column(key="grads", variable="grad", dtype=dtype),
        Column(key="momentum", variable="exp_avg", dtype=dtype),
        Column(key="variance", variable="exp_avg_sq", dtype=dtype),
        Column(key="logits", variable="logits", dtype=dtype),
        Column(key="losses", variable="loss", dtype=dtype, blank="nan"),
    )


NOTEBOOKS: dict[str, Notebook] = {
    notebook.name: notebook
    for notebook in (
        Notebook(
            name="14.1a",
            columns=(
                Column(key="grads", variable="grad", dtype="float32"),
                Column(key="deltas", variable="W", dtype="float32", time="change"),
            ),
            required=("recorded_steps", "grads", "deltas"),
            has_populations=True,
            scalars=(
                Scalar(key="init_sigma", dtype="float32", paths=(_SIGMA,)),
                LEARNING_RATE,
                _DECAY,
            ),
        ),
        Notebook(
            name="15.1a",
            columns=_recorder_columns("float32"),
            required=("recorded_steps", "embeddings"),
            has_populations=True,
            scalars=(
                Scalar(key="init_sigma", dtype="float32", paths=(_SIGMA,)),
                LEARNING_RATE,
                _DECAY,
                *_BETAS,
                _METHOD,
            ),
        ),
        Notebook(
            name="1.12f",
            columns=_recorder_columns("bfloat16"),
            required=("recorded_steps", "embeddings"),
            has_counts=True,
            scalars=(
                Scalar(key="init_scale", dtype="float32", paths=(_SIGMA,)),
                LEARNING_RATE,
                _DECAY,
                *_BETAS,
            ),
        ),
        Notebook(
            name="1.12a",
            columns=(
                Column(key="W", variable="W", dtype="bfloat16", time="before"),
                Column(key="grads", variable="grad", dtype="bfloat16"),
                Column(key="momentum", variable="exp_avg", dtype="float32", time="before"),
                Column(key="variance", variable="exp_avg_sq", dtype="float32", time="before"),
                # Its row 0 was a forward pass that no step made; a run has none to offer.
                Column(key="logits", variable="logits", dtype="float32", blank="nan"),
                Column(key="loss", variable="loss", dtype="float32"),
            ),
            required=("W", "grads"),
            has_steps=False,
            sizes={
                "vocab_size": ("config", "model", "vocab_size"),
                "hidden_dim": ("config", "model", "hidden"),
                "n_layers": ("config", "model", "layers"),
                "n_heads": ("config", "model", "heads"),
                "n_steps": ("config", "training", "steps"),
                "batch_size": ("config", "training", "batch_size"),
            },
        ),
    )
}

LAYOUTS = ("native", *NOTEBOOKS)
"""Layouts of safetensors files: a run's own, and those of the notebooks."""
