"""Layouts of the notebooks' files: names, types, alignment, and the numbers besides the arrays.

Export and import use the same table. `trajstore.exchange.guessing.kind_table` detects the arrays of
every file, with or without a layout. Differences between the layouts and a run:

* Most hold the state after each step, as a run does. Before the first step they hold zeros, where a
  run holds NaN. 14.1a holds changes of W instead of W; its first form holds dead tokens only.
* 1.12a holds W and the moments *before* the step of their row, with the gradient, logits and loss
  of that step. Its last row therefore lacks the result of the last step.
* From Thimble on, files also hold numbers and masks; in HDF5 the numbers are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "EXPORT_LAYOUTS",
    "HDF5_KEYS",
    "HDF5_TEXTS",
    "IMPORT_LAYOUTS",
    "KEPT_ATTRIBUTES",
    "LAYOUTS",
    "POPULATIONS",
    "Column",
    "Layout",
]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A tensor with one row per step.

    Attributes
    ----------
    key, variable : str
        Names in the file and in a run.
    dtype : str
        Type in the file.
    as_bits : bool
        True if the file holds the bits of that type as uint16.
    blank : {'zero', 'nan'}
        Value in the row of step 0, where a run has NaN.
    time : {'after', 'before', 'change'}
        The value after the step, the value before it, or the difference.
    first_row : {0, 1}
        1 if the file omits the row of step 0.
    """

    key: str
    variable: str
    dtype: str
    as_bits: bool = False
    blank: Literal["zero", "nan"] = "zero"
    time: Literal["after", "before", "change"] = "after"
    first_row: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of the files of one family of notebooks.

    Attributes
    ----------
    name : str
        Number or name of the notebook.
    columns : tuple of Column
    required : tuple of str
        Keys that every file of this layout has.
    format : {'safetensors', 'hdf5'}
    steps : str, optional
        Key of the steps of the rows; None if rows are steps 0, 1, 2, ….
    only_dead : bool
        True if it has rows of the dead tokens only.
    populations : tuple of str
        Keys that mark the dead tokens, from `POPULATIONS`.
    counts : dict of str to bool
        Keys of the numbers of dead (True) and live tokens.
    scalars : dict of str to str
        Type of each number besides the arrays; the names are those of the table of kinds.
    as_texts : tuple of str
        Numbers that its metadata hold as strings.
    chunk_rows : int
        Rows of a chunk in HDF5.
    gzip : int
        Level of compression in HDF5; 0 for none.
    """

    name: str
    columns: tuple[Column, ...]
    required: tuple[str, ...]
    format: Literal["safetensors", "hdf5"] = "safetensors"
    steps: str | None = "recorded_steps"
    only_dead: bool = False
    populations: tuple[str, ...] = ()
    counts: Mapping[str, bool] = field(default_factory=dict)
    scalars: Mapping[str, str] = field(default_factory=dict)
    as_texts: tuple[str, ...] = ()
    chunk_rows: int = 1
    gzip: int = 0

    @property
    def marks_dead(self) -> bool:
        """True if it distinguishes dead tokens from live ones."""
        return bool(self.populations or self.counts or self.only_dead)


POPULATIONS: dict[str, tuple[Literal["mask", "ids"], bool]] = {
    "dead_mask": ("mask", True),
    "live_mask": ("mask", False),
    "untrained_mask": ("mask", True),
    "trained_mask": ("mask", False),
    "dead_ids": ("ids", True),
    "live_ids": ("ids", False),
    "dead_token_ids": ("ids", True),
    "live_token_ids": ("ids", False),
    "dead_indices": ("ids", True),
}
"""Form of each key (mask or ids), and True if it marks the dead tokens, False for the live ones."""


def _floats(names: str, dtype: str = "float32") -> dict[str, str]:
    return dict.fromkeys(names.split(), dtype)


_ADAM = _floats("learning_rate weight_decay adam_beta1 adam_beta2")
_INIT_CODE = {"init_method_code": "int32"}
_SIZES = _floats("vocab_size hidden_dim n_layers n_heads num_steps batch_size", "int64")
_CHANGES = _floats("init_sigma learning_rate weight_decay")
_LISTS = {"populations": ("dead_token_ids", "live_token_ids")}
_LIVE_AND_DEAD = {"n_live": False, "n_dead": True}
_THIMBLE: dict[str, Any] = {
    "steps": None,
    "populations": ("live_mask", "dead_mask", "live_ids", "dead_ids"),
    "counts": _LIVE_AND_DEAD,
    "scalars": _SIZES | _ADAM | _floats("adam_epsilon init_scale") | _floats("seed", "int64"),
}


def _column(key: str, variable: str, dtype: str = "bfloat16", **more: Any) -> Column:
    return Column(key=key, variable=variable, dtype=dtype, **more)


def _matrices(names: str, dtype: str, *, as_bits: bool = False) -> tuple[Column, ...]:
    """Columns of W, its gradient and the moments, one per name."""
    variables = ("W", "grad", "exp_avg", "exp_avg_sq")
    pairs = zip(names.split(), variables, strict=False)
    return tuple(_column(key, variable, dtype, as_bits=as_bits) for key, variable in pairs)


def _recorder_columns(dtype: str) -> tuple[Column, ...]:
    return (
        *_matrices("embeddings grads momentum variance", dtype),
        _column("logits", "logits", dtype),
        _column("losses", "loss", dtype, blank="nan"),
    )


def _changes(prefix: str = "") -> tuple[Column, ...]:
    return (
        _column(f"{prefix}grads", "grad", "float32"),
        _column(f"{prefix}deltas", "W", "float32", time="change"),
    )


def _thimble_columns(dtype: str, *, as_bits: bool = False) -> tuple[Column, ...]:
    matrices = _matrices("W grad_W momentum_W variance_W", dtype, as_bits=as_bits)
    return (*matrices, _column("losses", "loss", "float32", blank="nan"))


def _layout(name: str, columns: tuple[Column, ...], required: str, **more: Any) -> Layout:
    return Layout(name=name, columns=columns, required=tuple(required.split()), **more)


_HISTORY = (_column("embedding_history", "W"),)
_BFLOAT16 = _recorder_columns("bfloat16")
_NUMBERS_OF_1_12A = "vocab_size hidden_dim n_layers n_heads n_steps batch_size learning_rate"
_1_12A = (
    _column("W", "W", time="before"),
    _column("grads", "grad"),
    _column("momentum", "exp_avg", "float32", time="before"),
    _column("variance", "exp_avg_sq", "float32", time="before"),
    # Row 0 holds the forward pass before the first step, which a run does not record.
    _column("logits", "logits", "float32", blank="nan"),
    _column("loss", "loss", "float32"),
)
_THIMBLE_8 = (
    _column("W", "W", as_bits=True),
    _column("g", "grad", "float32"),
    _column("m", "exp_avg", "float32"),
    _column("v", "exp_avg_sq", "float32"),
    _column("loss", "loss", "float32"),
)
_GOLDILOCKS = (_column("W", "W"), _column("losses", "loss", "float32", first_row=1))

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _layout("08.2a", _HISTORY, "embedding_history", steps=None),
        _layout(
            "13.4a", _HISTORY, "embedding_history dead_token_ids",
            steps=None, populations=("dead_token_ids",), scalars=_floats("init_sigma"),
        ),
        _layout("14.1a", _changes(), "recorded_steps grads deltas", scalars=_CHANGES, **_LISTS),
        _layout(
            "14.1a-dead", _changes("dead_"), "dead_grads dead_deltas",
            only_dead=True, scalars=_CHANGES, **_LISTS,
        ),
        _layout(
            "15.1a", _recorder_columns("float32"), "recorded_steps embeddings",
            scalars=_floats("init_sigma") | _ADAM | _INIT_CODE, **_LISTS,
        ),
        _layout(
            "13.1b", _BFLOAT16, "recorded_steps embeddings dead_token_ids",
            scalars=_floats("init_sigma") | _ADAM | _INIT_CODE, **_LISTS,
        ),
        _layout(
            "1.12f", _BFLOAT16, "recorded_steps embeddings",
            counts={"n_trained": False, "n_untrained": True},
            scalars=_floats("init_scale") | _ADAM, **_LISTS,
        ),
        _layout(
            "flannel-1", _BFLOAT16, "recorded_steps embeddings n_live n_dead",
            counts=_LIVE_AND_DEAD, scalars=_floats("init_scale") | _ADAM, **_LISTS,
        ),
        _layout(
            "1.12a", _1_12A, "W grads", steps=None,
            as_texts=tuple(_NUMBERS_OF_1_12A.split()),
        ),
        _layout("thimble-4", _thimble_columns("bfloat16"), "W grad_W losses", **_THIMBLE),
        _layout(
            "thimble-6", _thimble_columns("float16"), "W grad_W losses",
            format="hdf5", gzip=1, **_THIMBLE,
        ),
        _layout(
            "thimble-7", _thimble_columns("bfloat16", as_bits=True), "W grad_W losses",
            format="hdf5", chunk_rows=20, **_THIMBLE,
        ),
        _layout(
            "thimble-8", _THIMBLE_8, "W g dead_mask dead_indices",
            steps=None, only_dead=True, populations=("dead_mask", "dead_indices"),
        ),
        _layout(
            "goldilocks", _GOLDILOCKS, "W losses dead_mask",
            steps=None, populations=("dead_mask",),
        ),
    )
}  # fmt: skip
"""Layouts by name."""

EXPORT_LAYOUTS = ("native", *LAYOUTS)
"""The native layout, and those of the notebooks."""

IMPORT_LAYOUTS = (*EXPORT_LAYOUTS, "hdf5")
"""The layouts of exports, and any other HDF5."""

HDF5_KEYS = {
    "W": "W",
    "grad": "grad_W",
    "exp_avg": "momentum_W",
    "exp_avg_sq": "variance_W",
    "logits": "logits",
    "loss": "losses",
}
"""Names of variables in HDF5 files. The other variables keep their names."""

HDF5_TEXTS = {
    "attributes": "trajstore_json",
    "variables": "variables_json",
    "token_text": "token_text_json",
    "parameter": "parameter_json",
}
"""Names of strings in HDF5 files: attributes of the run and its variables, tokens, parameters."""

KEPT_ATTRIBUTES = ("config", "optimizer", "recording", "provenance", "imported", "created")
"""Attributes of the root that describe the origin of the values, and remain valid for a copy."""
