"""The one table of the variables of a run: names, dimensions, units and the value of row 0.

Writer, reader, exporter and documentation read this table. Nothing else repeats a name or a unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trajstore.errors import InvalidArgument, did_you_mean

FORMAT = 3
"""Number of the store format: the attribute `trajstore_format` of the root of a new run."""

WITH_SETTINGS = 4
"""Number of a run with blocks that are computed with changing hyperparameters."""

FORMATS = (FORMAT, WITH_SETTINGS)
"""Numbers that this version reads."""

EXPORTED = "written_by_trajstore"
"""Attribute of the root of an ordinary Zarr store that an export wrote. No run has it."""

EVALUATION = "trajstore_evaluation"
"""Attribute of the root of the results of an evaluation: the run and the function."""

OF_RUN = "of_run"
"""Attribute of a Dataset of several runs: the attributes of each run."""

OPTIMIZER_STATE = "optimizer_state"
"""Attribute of the root: what the optimizer keeps, if that is not the state of Adam or plain SGD.

A list of objects with ``name`` and ``of``: ``element`` for tensors of the parameter's shape,
``parameter`` for one number, whose ``type`` is given, or ``other``, which no run holds.
"""

NUMBERS = ("bool", "int", "float", "bfloat16", "float16", "float32", "float64",
           "int8", "int16", "int32", "int64", "uint8")  # fmt: skip
"""Types of numbers that an optimizer keeps: of Python, and of tensors."""

Encoding = Literal["delta", "compact"]
ENCODINGS: tuple[str, ...] = get_args(Encoding)
"""How arrays are encoded: each by itself, or W and the moments computed from the gradient."""

LATTICES = ("native", "bfloat16", "float16", "float32")
"""Lattices (floating-point grids) that quantities accept: of the native type, or of another."""

MIN_UNCHANGED = 50
"""Optimizer steps that leave a frozen token unchanged, by default. In Lil Gatsby, 6 % of the tokens
that are unchanged for 50 steps at the end of a recording move again when the training continues,
and 19 % of those unchanged for one step."""


State = Literal["before the step", "after the step", "in the step"]
Row0 = Literal["initial", "zero", "nan"]


@dataclass(frozen=True)
class Variable:
    """A quantity with one row per recorded optimizer step.

    Attributes
    ----------
    name : str
    dims : tuple of str
        Always begins with ``step``.
    state : {'before the step', 'after the step', 'in the step'}
        State of the training that a row belongs to: before its step, whose weights computed it;
        after its step; or neither, but what the step used or did.
    row0 : {'initial', 'zero', 'nan'}
        Value before the first step: the initial state, 0, or NaN for results of a step.
    units, long_name : str
        CF attributes. ``1`` is dimensionless.
    """

    name: str
    dims: tuple[str, ...]
    state: State
    row0: Row0
    units: str
    long_name: str


@dataclass(frozen=True)
class Coordinate:
    """A coordinate, mostly along ``token``. It is written once, when the run is created."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    fill_value: Any
    attributes: dict[str, Any] = field(default_factory=dict)


_STEP = ("step",)
_TOKEN = ("step", "token")
_MATRIX = ("step", "token", "hidden")
_HIDDEN = ("step", "hidden")
_EXAMPLE = ("step", "example")
_STATES = ("step", "example", "position", "hidden")
_MODEL = ("step", "parameter")
_ELEMENT = ("step", "element")

_BEFORE: State = "before the step"
_AFTER: State = "after the step"
_IN: State = "in the step"

STEP = Variable("step", _STEP, _AFTER, "zero", "1", "optimizer steps taken")
"""The coordinate of the rows. It grows with them."""

_TABLE: tuple[tuple[str, tuple[str, ...], State, Row0, str, str], ...] = (
    ("W", _MATRIX, _AFTER, "initial", "1", "recorded parameter after the step"),
    ("grad", _MATRIX, _BEFORE, "nan", "nat",
     "gradient of the loss consumed by the step, before clipping"),
    ("exp_avg", _MATRIX, _AFTER, "zero", "nat", "Adam's first moment after the step"),
    ("exp_avg_sq", _MATRIX, _AFTER, "zero", "nat2", "Adam's second moment after the step"),
    ("logits", _TOKEN, _BEFORE, "nan", "nat", "logits of the forward pass of the step"),
    ("loss", _STEP, _BEFORE, "nan", "nat",
     "training loss of the step, mean over its micro-batches"),
    ("lr", _STEP, _IN, "nan", "1", "learning rate that the step used"),
    ("hyperparameters", ("step", "hyperparameter"), _IN, "nan", "1",
     "hyperparameters that the step used"),
    ("grad_norm", _STEP, _BEFORE, "nan", "nat",
     "global gradient norm before clipping, over all parameters"),
    ("clip_coef", _STEP, _IN, "nan", "1",
     "factor that clipping multiplied the gradients by before the step"),
    ("delta", _MATRIX, _IN, "nan", "1", "change of the recorded parameter in the step"),
    ("skipped", _STEP, _IN, "nan", "1",
     "1 if the gradient scaler skipped the optimizer's step, else 0"),
    ("step_count", _STEP, _AFTER, "zero", "1",
     "steps that the optimizer has counted with the recorded parameter"),
    ("hidden_mean", _HIDDEN, _BEFORE, "nan", "1",
     "mean over batch and position of the hidden state that is unembedded"),
    ("hidden_trace", _STEP, _BEFORE, "nan", "1",
     "trace of the covariance of the hidden states that are unembedded"),
    ("hidden_cosine", _STEP, _BEFORE, "nan", "1",
     "mean cosine of the hidden states that are unembedded to their mean"),
    ("batch", _EXAMPLE, _IN, "nan", "1", "indices in the data set of the examples of the step"),
    ("example_loss", _EXAMPLE, _BEFORE, "nan", "nat",
     "training loss of each example of the step, mean over its targets"),
    ("hidden_states", _STATES, _BEFORE, "nan", "1",
     "hidden states of the step that are unembedded"),
    ("grad_token_norm", _TOKEN, _BEFORE, "nan", "nat",
     "L2 norm over hidden of the gradient before clipping"),
    ("W_step_norm", _TOKEN, _IN, "nan", "1",
     "L2 norm over hidden of the change of W since the previous row"),
    ("W_ulp_l1", _TOKEN, _IN, "nan", "1",
     "L1 norm over hidden of the change of W since the previous row, in ulp"),
    ("cells", _MATRIX, _AFTER, "initial", "1",
     "recorded parameter after the step, rounded to bfloat16"),
    ("param_grad_norm", _MODEL, _BEFORE, "nan", "nat",
     "L2 norm of the gradient of each parameter, before clipping"),
    ("param_norm", _MODEL, _AFTER, "initial", "1", "L2 norm of each parameter after the step"),
    ("param_update_norm", _MODEL, _IN, "nan", "1",
     "L2 norm of the change of each parameter in the step"),
    ("param_update_lost", _MODEL, _IN, "nan", "1",
     "fraction of a parameter's elements with a gradient that the step did not change"),
    ("params", _ELEMENT, _AFTER, "initial", "1",
     "all other parameters after the step, one after another"),
    ("params_grad", _ELEMENT, _BEFORE, "nan", "nat",
     "gradients of the other parameters consumed by the step, before clipping"),
    ("params_exp_avg", _ELEMENT, _AFTER, "zero", "nat",
     "Adam's first moments of the other parameters after the step"),
    ("params_exp_avg_sq", _ELEMENT, _AFTER, "zero", "nat2",
     "Adam's second moments of the other parameters after the step"),
    ("params_lr", ("step", "group"), _IN, "nan", "1",
     "learning rate of each group of the optimizer that the step used"),
    ("params_count", _MODEL, _AFTER, "zero", "1",
     "steps that the optimizer has taken with each parameter"),
    ("random_state", ("step", "byte"), _BEFORE, "nan", "1",
     "state of the random generator before the first forward pass of the step"),
    ("buffers", ("step", "buffer_element"), _AFTER, "initial", "1",
     "buffers that change, after the step, one after another"),
    ("scale", _STEP, _IN, "nan", "1", "factor of the gradient scaler in the step"),
    ("inputs", ("step", "word"), _IN, "zero", "1",
     "tensors that the forward passes of the step got, after their description"),
    ("params_digest", _MODEL, _AFTER, "initial", "1", "digest of each parameter after the step"),
    ("step_digest", _STEP, _IN, "zero", "1",
     "digest of the gradients that the step used, and of the buffers after it"),
)  # fmt: skip

KEPT = Variable("param_kept", _MODEL, _AFTER, "zero", "1",
                "what the optimizer keeps of each parameter: the sum of 2**position in "
                f"the attribute {OPTIMIZER_STATE}")  # fmt: skip
"""Marks the parameters that lack a value of the optimizer."""

_UNITS = {"momentum_buffer": "nat", "square_avg": "nat2", "grad_avg": "nat", "sum": "nat2",
          "exp_inf": "nat", "max_exp_avg_sq": "nat2"}  # fmt: skip
_KEPT_AS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("params_", _ELEMENT, "of the other parameters"),
    ("param_", _MODEL, "of each parameter"),
    ("", _MATRIX, "of the recorded parameter"),
)


class _Table(dict[str, Variable]):
    """The table. An identifier that is not in it names a value that an optimizer keeps."""

    def __missing__(self, name: str) -> Variable:
        if name == KEPT.name:
            return KEPT
        if not name.isidentifier() or coordinate(name):
            raise KeyError(name)
        prefix, dims, whose = next(form for form in _KEPT_AS if name.startswith(form[0]))
        kept = name.removeprefix(prefix)
        text = f"{kept} that the optimizer keeps {whose}, after the step"
        return Variable(name, dims, _AFTER, "zero", _UNITS.get(kept, "1"), text)


VARIABLES: dict[str, Variable] = _Table((row[0], Variable(*row)) for row in _TABLE)

IMPORTED = ("delta",)
"""Variables of imported runs only. A recorded run holds W, from which they follow."""

TRAJECTORIES = ("W", "delta", "cells")
"""Variables with the values or the changes of the parameter. Every run holds one of them."""

INTEGERS = ("inputs", "params_digest", "step_digest")
"""Variables of int64. All others are floating-point numbers."""

KEYFRAMES = "keyframes"
"""The tier with the whole state in some rows only, and the name of the group that holds them."""

OF_EXAMPLES = tuple(name for name, entry in VARIABLES.items() if "example" in entry.dims)
"""Variables of single examples of a step, all in the same order along ``example``.

If a step has fewer examples or positions than a row has room for, the rest is NaN.
"""

RECORDED = tuple(name for name in VARIABLES if name not in IMPORTED)
"""Variables that a recording can hold."""

_COORDINATES = (
    Coordinate("token", ("token",), "int32", -1, {"long_name": "vocabulary id"}),
    Coordinate("is_dead", ("token",), "bool", False,
               {"long_name": "the id occurs nowhere in the training corpus"}),
    Coordinate("token_count", ("token",), "int64", -1,
               {"long_name": "occurrences in the training corpus", "units": "1"}),
    Coordinate("token_text", ("token",), "string", "", {"long_name": "text of the token"}),
    Coordinate("parameter", ("parameter",), "string", "",
               {"long_name": "name of a parameter of the model"}),
    Coordinate("hyperparameter", ("hyperparameter",), "string", "",
               {"long_name": "name of a hyperparameter of the optimizer"}),
)  # fmt: skip

COORDINATES: dict[str, Coordinate] = {entry.name: entry for entry in _COORDINATES}

POPULATION = "is_"
"""Prefix of the names of populations: coordinates of booleans along token."""

POPULATION_FILES = (".txt", ".npy", ".npz", ".pt", ".h5", ".hdf5", ".safetensors")
"""Suffixes of the files that can define a population."""

_OF_PARAMETERS = tuple(name for name, entry in VARIABLES.items() if entry.dims == _MODEL)
OF_PARAMETERS = (*_OF_PARAMETERS, KEPT.name)
"""Variables with one number per parameter of the model."""

NAMES = {"parameter": OF_PARAMETERS, "hyperparameter": ("hyperparameters",)}
"""Coordinates of distinct names, each with the variables that need it."""

MODEL = tuple(name for name in _OF_PARAMETERS if name.startswith("param_"))
"""Summaries of all parameters of the model."""

EVERYTHING = (
    *(name for name in VARIABLES if name.startswith("params") and name not in INTEGERS),
    "random_state",
    "buffers",
    "scale",
)
"""Variables of the tier ``everything``: the state of the model except the recorded parameter."""

ALONG_TOKEN = tuple(name for name, entry in COORDINATES.items() if entry.dims == ("token",))
"""Coordinates of the tokens."""

_SMALL = (
    "logits", "loss", "lr", "hyperparameters", "grad_norm", "clip_coef", "skipped", "step_count",
)  # fmt: skip

_STATE = (
    *("W", "exp_avg", "exp_avg_sq"),
    *(name for name in EVERYTHING if name != "params_grad"),
    *(name for name in _SMALL if name != "logits"),
)

TIERS: dict[str, tuple[str, ...]] = {
    "weights": ("W", *_SMALL),
    "weights+grads": ("W", "grad", *_SMALL),
    "matrix": ("W", "grad", "exp_avg", "exp_avg_sq", *_SMALL),
    "norms": ("W", *MODEL, *_SMALL),
    "everything": ("W", "grad", "exp_avg", "exp_avg_sq", "batch", *EVERYTHING, *_SMALL),
    "state": _STATE,
    KEYFRAMES: ("W", "grad", "exp_avg", "exp_avg_sq", "batch", "params_lr", "random_state", "scale",
                *INTEGERS, *_SMALL),
}  # fmt: skip
"""Values of ``variables`` that stand for a list. Scalars per step cost almost nothing.

A tier omits whatever follows from its other variables. The summaries per token
(``grad_token_norm``, ``W_step_norm``, ``W_ulp_l1``) are therefore recorded only if they are named.
So are the variables of hidden states (``hidden_mean``, ``hidden_trace``, ``hidden_cosine``), those
of single examples, and ``cells``, which can also replace W.
"""


def coordinate(name: str) -> Coordinate | None:
    """Entry of a coordinate: one of the table, or a population (``is_NAME``). Otherwise None."""
    if name in COORDINATES or not name.startswith(POPULATION) or not name.isidentifier():
        return COORDINATES.get(name)
    attributes = {"long_name": f"the token is in the population {name[len(POPULATION) :]}"}
    return Coordinate(name, ("token",), "bool", False, attributes)


def entry_of(name: str) -> Variable | Coordinate:
    """Entry of an array of a run by name."""
    return STEP if name == STEP.name else coordinate(name) or VARIABLES[name]


def kept_as(name: str, of: str) -> tuple[str, ...]:
    """Names of the variables with a value that an optimizer keeps.

    >>> kept_as("momentum_buffer", "element"), kept_as("mu_product", "parameter")
    (('momentum_buffer', 'params_momentum_buffer'), ('param_mu_product',))
    """
    if of == "element":
        return (name, f"params_{name}")
    if of == "parameter":
        return ("params_count" if name == "step" else f"param_{name}",)
    return ()


def variables_of(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the variables that a run can hold, those of the table first.

    Parameters
    ----------
    attributes : mapping
        Attributes of its root. A damaged attribute `OPTIMIZER_STATE` names nothing.
    """
    listed = attributes.get(OPTIMIZER_STATE)
    if not isinstance(listed, list):
        return tuple(VARIABLES)
    names = [
        name
        for value in listed
        if isinstance(value, dict)
        for name in kept_as(str(value.get("name")), str(value.get("of")))
        if name.isidentifier() and coordinate(name) is None
    ]
    return tuple(dict.fromkeys([*VARIABLES, *names, KEPT.name]))


def belongs(name: str, variables: Collection[str]) -> bool:
    """True if an array is part of a run that can hold these variables."""
    return name == STEP.name or name in variables or coordinate(name) is not None


def along_token(names: Iterable[str]) -> tuple[str, ...]:
    """Names of coordinates along ``token`` among the given names, those of the table first."""
    given = set(names)
    further = sorted(name for name in given - COORDINATES.keys() if coordinate(name))
    return (*(name for name in ALONG_TOKEN if name in given), *further)


def variable(name: str, known: Collection[str] = VARIABLES) -> Variable:
    """Entry of a variable, one of the known ones.

    Raises
    ------
    InvalidArgument
        If there is no variable of that name.
    """
    if name not in known:
        raise InvalidArgument(
            f"there is no variable {name!r}{did_you_mean(name, known)}; "
            f"choose from {', '.join(known)}"
        )
    return VARIABLES[name]


def row_lengths(rows: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Lengths of the dimensions that the shapes of the rows define.

    Parameters
    ----------
    rows : mapping of str to tuple of int
        Shape of one row of each variable.

    Returns
    -------
    dict of str to object
        Keywords of `RunWriter.create`: ``examples`` and ``positions``, each only if a variable has
        that dimension, and ``lengths`` of all others (``element``, ``group`` …), if there are any.

    Examples
    --------
    >>> row_lengths({"W": (128, 64), "batch": (32,), "params": (1000,)})
    {'examples': 32, 'lengths': {'element': 1000}}
    """
    lengths: dict[str, Any] = {}  # Any: callers pass it as keywords next to others of other types
    others = {}
    for name, shape in rows.items():
        for dim, length in zip(VARIABLES[name].dims[1:], shape, strict=True):
            if dim in ("example", "position"):
                lengths[f"{dim}s"] = length
            elif dim not in ("token", "hidden", *NAMES):
                others[dim] = length
    return lengths | ({"lengths": others} if others else {})


def resolve_variables(variables: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Names of the variables in a tier, a comma-separated list or a sequence.

    Returns
    -------
    tuple of str
        In the order of the table, without repetition.

    Raises
    ------
    InvalidArgument
        If a name is neither a tier nor a variable, or neither ``W`` nor ``cells`` is among them.
    """
    names = variables.split(",") if isinstance(variables, str) else list(variables)
    wanted: set[str] = set()
    for name in (n.strip() for n in names):
        if name not in TIERS and name not in RECORDED:
            raise InvalidArgument(
                f"cannot record {name!r}{did_you_mean(name, [*TIERS, *RECORDED])}; "
                f"choose a tier ({', '.join(TIERS)}) "
                f"or variables ({', '.join(RECORDED)})"
            )
        wanted.update(TIERS.get(name, (name,)))
    if not wanted & {"W", "cells"}:
        raise InvalidArgument(
            f"got {', '.join(n.strip() for n in names)!r} without W; add W or cells: every run "
            "holds one of them"
        )
    return tuple(name for name in VARIABLES if name in wanted)
