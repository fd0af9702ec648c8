"""The layouts of the notebooks' files: key names, types, alignment, extra scalars.

One table serves both ways out and in. What differs between the layouts and a run:

* 14.1a, 15.1a and 1.12f hold the state after each step, as a run does, and zeros where no step had
  been taken yet, where a run has NaN. 14.1a holds changes of W, not W.
* 1.12a holds W and the moments *before* the step of their row, beside the gradient, logits and loss
  of it; so its last row knows nothing of what the last step made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.bits import native_type
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.parts import Part, Tensor, constant, series_tensor
from trajstore.schema import VARIABLES
from trajstore.selection import Selection
from trajstore.source import Source, Tile, attribute, positions
from trajstore.version import __version__

__all__ = ["NOTEBOOKS", "Column", "Notebook", "notebook_tensors"]

Array = npt.NDArray[Any]


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
        writes it to the last.
    """

    key: str
    dtype: str
    paths: tuple[tuple[str, ...], ...]


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
    """

    name: str
    columns: tuple[Column, ...]
    required: tuple[str, ...]
    has_steps: bool = True
    has_populations: bool = False
    has_counts: bool = False
    scalars: tuple[Scalar, ...] = ()


_HYPERPARAMETERS = ("optimizer", "hyperparameters")
_LR = Scalar(
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
            scalars=(Scalar(key="init_sigma", dtype="float32", paths=(_SIGMA,)), _LR, _DECAY),
        ),
        Notebook(
            name="15.1a",
            columns=_recorder_columns("float32"),
            required=("recorded_steps", "embeddings"),
            has_populations=True,
            scalars=(
                Scalar(key="init_sigma", dtype="float32", paths=(_SIGMA,)),
                _LR,
                _DECAY,
                *_BETAS,
            ),
        ),
        Notebook(
            name="1.12f",
            columns=_recorder_columns("bfloat16"),
            required=("recorded_steps", "embeddings"),
            has_counts=True,
            scalars=(
                Scalar(key="init_scale", dtype="float32", paths=(_SIGMA,)),
                _LR,
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
        ),
    )
}


def notebook_tensors(
    notebook: Notebook, source: Source, selection: Selection
) -> tuple[list[Tensor], dict[str, str], list[str]]:
    """Tensors and metadata of a notebook's file, and what the reader of it should know.

    Raises
    ------
    VariableNotRecorded
        If the run lacks a variable that the layout holds and the selection did not leave out.
    InvalidArgument
        If the layout needs the row before a selected one, and the run does not hold it.
    """
    notes: list[str] = []
    steps = source.steps[selection.rows]
    tensors = _labels(notebook, source, selection, steps)
    columns = notebook.columns
    if "W" not in source.series:
        # A run that was imported from changes knows them, and nothing else of W.
        columns = tuple(
            replace(column, variable="delta", time="after") if column.time == "change" else column
            for column in columns
        )
    for column in columns:
        if column.variable not in source.series:
            raise VariableNotRecorded(
                f"layout {notebook.name} holds {column.key}, and {column.variable} was not "
                "recorded; export the native layout"
            )
        if column.variable in selection.variables:
            tensors.append(_column(notebook, column, source, selection, steps))
    told = {tensor.key for tensor in tensors}
    left_out = [column.key for column in notebook.columns if column.key not in told]
    if left_out:
        notes.append(f"{', '.join(left_out)} left out, as their variables were not selected")
    unknown = []
    for scalar in notebook.scalars:
        value = _first(source.attributes, scalar.paths)
        if value is None:
            unknown.append(scalar.key)
        else:
            tensors.append(constant(scalar.key, scalar.dtype, value))
    if notebook.name == "15.1a":
        # 0 means drawn in float32, then rounded, which is how the point-like start is made.
        if attribute(source.attributes, "config", "initialisation", "kind") == "point":
            tensors.append(constant("init_method_code", "int32", 0))
        else:
            unknown.append("init_method_code")
    if unknown:
        notes.append(f"{', '.join(unknown)} left out, as the run's attributes do not tell them")
    metadata = {
        "exporter": "trajstore",
        "trajstore_version": __version__,
        "layout": notebook.name,
        # The labels of the notebooks' own files counted callbacks; these are true.
        "steps": "optimizer",
    }
    if notebook.name == "1.12a":
        metadata = _metadata_1_12a(source) | metadata
        notes.append(
            "W, momentum and variance are those before the step of their row, so those after step "
            f"{steps[-1]} are not in the file"
        )
        if steps[0] == 0 and "logits" in told:
            notes.append("logits of step 0 are NaN: the run holds no forward pass before step 1")
    return tensors, metadata, notes


def _labels(notebook: Notebook, source: Source, selection: Selection, steps: Array) -> list[Tensor]:
    tensors = []
    if notebook.has_steps or not np.array_equal(steps, np.arange(len(steps))):
        tensors.append(constant("recorded_steps", "int64", steps))
    ids = selection.along_token(source.coordinates["token"])
    if not np.array_equal(ids, np.arange(len(ids))):
        tensors.append(constant("token", "int32", ids))
    if not (notebook.has_populations or notebook.has_counts):
        return tensors
    if "is_dead" not in source.coordinates:
        raise VariableNotRecorded(
            f"layout {notebook.name} tells dead tokens from live ones, and the run does not; "
            "export the native layout"
        )
    is_dead = selection.along_token(source.coordinates["is_dead"]).astype(bool)
    if notebook.has_populations:
        # The notebooks index the token axis with these: places, which are ids in a whole run.
        tensors.append(constant("dead_token_ids", "int64", np.flatnonzero(is_dead)))
        tensors.append(constant("live_token_ids", "int64", np.flatnonzero(~is_dead)))
    if notebook.has_counts:
        tensors.append(constant("n_trained", "int64", np.count_nonzero(~is_dead)))
        tensors.append(constant("n_untrained", "int64", np.count_nonzero(is_dead)))
    return tensors


def _column(
    notebook: Notebook, column: Column, source: Source, selection: Selection, steps: Array
) -> Tensor:
    series = source.series[column.variable]
    dtype = native_type(column.dtype)
    if column.time == "after":
        blank = _blank(column, steps)
        return series_tensor(column.key, series, selection, dtype=dtype, finish=blank)
    # Step 0 has no step before it: 1.12a repeats the initial state there, a change is zero.
    before = positions(source.steps, np.where(steps == 0, 0, steps - 1))
    if (before < 0).any():
        raise InvalidArgument(
            f"layout {notebook.name} needs W before step {steps[before < 0][0]}, and the run does "
            "not hold the step before it; leave that step out, or use another layout"
        )
    if column.time == "before":
        return series_tensor(column.key, series, selection, dtype=dtype, rows=before)
    whole = series_tensor(column.key, series, selection)
    every = np.arange(series.shape[1]) if selection.tokens is None else selection.tokens

    def parts() -> Iterator[Part]:
        for tile in series.tiles(selection.rows, every):

            def read(tile: Tile = tile) -> tuple[Array, int]:
                rows, tokens = before[tile.where[0]], every[tile.where[1]]
                then = [earlier.read() for earlier in series.tiles(rows, tokens)]
                change = np.subtract(tile.read(), np.concatenate(then), dtype=np.float32)
                return change.view(np.uint32), 0

            yield Part(where=tile.where, read=read)

    return Tensor(key=column.key, dtype=column.dtype, shape=whole.shape, parts=parts)


def _blank(column: Column, steps: Array) -> Callable[[Array, slice], None] | None:
    """Put zeros where no step had been taken yet, as the notebooks did."""
    first = np.flatnonzero(steps == 0)
    if column.blank != "zero" or VARIABLES[column.variable].row0 != "nan" or not len(first):
        return None
    row = int(first[0])
    native = native_type(column.dtype)

    def finish(bits: Array, at: slice) -> None:
        if at.start <= row < at.stop:
            values = bits[row - at.start : row - at.start + 1]
            if _is_nan(values, native.name).all():
                values[...] = 0

    return finish


def _is_nan(bits: Array, dtype: str) -> Array:
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    nan: Array = (bits & bits.dtype.type(sign - 1)) > bits.dtype.type(exponent)
    return nan


def _first(attributes: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]) -> Any:
    for path in paths:
        value = attribute(attributes, *path)
        if isinstance(value, int | float):
            return value
    return None


def _metadata_1_12a(source: Source) -> dict[str, str]:
    config = attribute(source.attributes, "config") or {}
    told = {
        "vocab_size": attribute(config, "model", "vocab_size"),
        "hidden_dim": attribute(config, "model", "hidden"),
        "n_layers": attribute(config, "model", "layers"),
        "n_heads": attribute(config, "model", "heads"),
        "n_steps": attribute(config, "training", "steps"),
        "batch_size": attribute(config, "training", "batch_size"),
        "learning_rate": _first(source.attributes, _LR.paths),
    }
    metadata = {key: str(value) for key, value in told.items() if value is not None}
    if "vocab_size" in metadata:
        metadata["model"] = "GPT2"
    if "loss" in source.series and len(source.steps):
        series = source.series["loss"]
        last = len(source.steps) - 1
        metadata["final_loss"] = str(float(series.get((slice(last, last + 1),))[0]))
    return metadata
