"""Layouts of files: names, types, alignment, and the numbers besides the arrays.

`layouts.toml` lists those of whole runs and of the notebooks; a TOML file can define another.
Export and import use the same table. `trajstore.exchange.guessed_layout` makes the layout of a file
without one. Differences between the layouts and a run:

* Most hold the state after each step, as a run does. Before the first step they hold zeros, where a
  run holds NaN. 14.1a holds changes of W instead of W; its first form holds dead tokens only.
* 1.12a holds W and the moments *before* the step of their row, with the gradient, logits and loss
  of that step. Its last row therefore lacks the result of the last step.
* From Thimble on, files also hold numbers and masks; in HDF5 the numbers are attributes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from trajstore.arguments import Bound, Count, check_fields
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.exchange.usual_names import ARRAY_KINDS, SCALARS, scalar_of
from trajstore.schema import OPTIMIZER_STATE, STEP, VARIABLES


@dataclass(frozen=True, kw_only=True)
class Column:
    """A tensor with one row per step. Most attributes are keys of an entry of ``arrays`` in TOML.

    Attributes
    ----------
    key, variable : str
        Names in the file and in a run.
    type : str
        Type in the file.
    bits : bool
        True if the file holds the bits of that type as uint16.
    row0 : {'zero', 'nan'}
        Value in the row of step 0, where a run has NaN.
    time : {'after', 'before', 'change', 'ulps', 'initial', 'centroid', 'last_motion'}
        The value after the step, the value before it, the difference, the difference in units of
        the spacing at the value before it, or one value: that of step 0. Of W also the mean over
        the tokens in each row, or the last step in which a token moved (int32; -1 for never).
    first_row : {0, 1}
        1 if the file omits the first row.
    tokens : {'all', 'dead', 'live'}
        Tokens of its rows, if the variable has a value per token.
    run : int, optional
        Number of its run, in a file that an import reads as several runs.
    matrix : {'E', 'W'}, optional
        Its matrix, in a file of both matrices of an untied model that an import reads.
    """

    key: str
    variable: str
    type: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    bits: bool = False
    row0: Literal["zero", "nan"] = "zero"
    time: Literal["after", "before", "change", "ulps", "initial", "centroid", "last_motion"] = (
        "after"
    )
    first_row: Literal[0, 1] = 0
    tokens: Literal["all", "dead", "live"] = "all"
    run: Annotated[int, Bound("of at least", 0)] | None = None
    matrix: Literal["E", "W"] | None = None

    @property
    def kind(self) -> str | None:
        """What an import reads from it, a name of `ARRAY_KINDS`; None if it is derived."""
        if self.time in ("after", "before"):
            return self.variable
        return "delta" if self.time == "change" else None

    @property
    def file_type(self) -> str:
        """Type of its array in the file."""
        return "int32" if self.time == "last_motion" else "uint16" if self.bits else self.type

    @property
    def has_tokens(self) -> bool:
        """True if the variable has a value per token."""
        return "token" in self._dims

    @property
    def is_matrix(self) -> bool:
        """True if the variable has a value for each element of W."""
        return self._dims == VARIABLES["W"].dims

    @property
    def _dims(self) -> tuple[str, ...]:
        is_kind = self.variable in ARRAY_KINDS
        return (ARRAY_KINDS if is_kind else VARIABLES)[self.variable].dims


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of the files of one family of notebooks. Most attributes are keys of a table in TOML.

    Attributes
    ----------
    name : str
        Number or name of the notebook, or the path of a TOML file.
    columns : tuple of Column
        Empty for a file of masks.
    required : tuple of str
        Keys that every file of this layout has.
    format : {'safetensors', 'hdf5'}
    steps : str, optional
        Key of the steps of the rows, or the steps themselves, such as ``0:2001:50``; None if rows
        are steps 0, 1, 2, ….
    first_step : {0, 1}, optional
        Step of the first row of a file without steps that an import reads.
    true_steps : bool
        True if the labels of the rows are kept also where they seem to count callbacks.
    runs : {'axis', 'keys', 'matrices'}, optional
        How a file holds several runs: along a first axis, under keys ``run_0_…``, or as both
        matrices of an untied model, ``…_E`` and ``…_W``. None for one run.
    marks : dict of str to str
        Kinds of the arrays that mark the dead tokens, count tokens, or hold ids, by their keys.
    tokens : {'all', 'dead', 'live'}
        Tokens that ``token_ids`` lists.
    numbers : tuple of str
        Numbers besides the arrays: of `COUNTS`, of the table of kinds (in the plural: one per run),
        those of `OF_RUNS`, or ``recorded_KEY`` (true if the file holds the array).
    texts : tuple of str
        Numbers that its metadata hold as strings.
    chunk_rows : int
        Rows of a chunk in HDF5.
    gzip : int
        Level of compression in HDF5; 0 for none.
    original : dict of str to str
        Types that 16-bit values had, bfloat16 or float16, by variable or key; `OTHERS` for the
        rest. An import reads them as this type.
    scalars : dict of str to str
        Numbers with names of their own, by key, and their usual names.
    ignore : tuple of str
        Keys that an import omits.
    omitted : dict of str to str
        Keys that it omits for another reason, which it finds in the file.
    whole : bool
        True if it holds everything else of a run under its own name, in native types, and describes
        it with texts of JSON: attributes, variables, token_text and parameter.
    """

    name: str
    columns: tuple[Column, ...] = ()
    required: Sequence[str] = ()
    format: Literal["safetensors", "hdf5"] = "safetensors"
    steps: str | None = None
    runs: Literal["axis", "keys", "matrices"] | None = None
    first_step: Literal[0, 1] | None = None
    true_steps: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)
    tokens: Literal["all", "dead", "live"] = "all"
    numbers: Sequence[str] = ()
    texts: Sequence[str] = ()
    chunk_rows: Count = 1
    gzip: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8, 9] = 0
    original: Mapping[str, Literal["bfloat16", "float16"]] = field(default_factory=dict)
    scalars: Mapping[str, str] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    omitted: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False

    @property
    def arrays(self) -> dict[str, Column]:
        """Columns, marks and labels of steps, by key."""
        kinds = dict(self.marks) | ({self.steps: STEP.name} if self.steps else {})
        others = {key: Column(key=key, variable=kind) for key, kind in kinds.items()}
        return others | {column.key: column for column in self.columns}

    @property
    def begins_late(self) -> bool:
        """True if no array has a row of step 0."""
        return bool(self.columns) and all(column.first_row for column in self.columns)

    @property
    def only(self) -> str | None:
        """The population whose rows it holds, if it holds no others."""
        populations = {column.tokens for column in self.columns if column.has_tokens}
        return populations.pop() if len(populations) == 1 and "all" not in populations else None

    @property
    def marks_dead(self) -> bool:
        """True if it distinguishes dead tokens from live ones."""
        by_rows = any(column.has_tokens and column.tokens != "all" for column in self.columns)
        return bool(self.marks or by_rows)


MARKS: dict[str, str] = {
    name: kind
    for kind in ("dead_mask", "live_mask", "dead_ids", "live_ids", "token_count")
    for name in ARRAY_KINDS[kind].names
}
"""Kind of each key that can mark or count tokens."""

_IDS = "token_ids"

TOKEN_KINDS = ("dead_mask", "live_mask", "dead_ids", "live_ids", "token_count", "token")
"""Kinds of arrays that describe the tokens."""

OTHERS = "*"
"""Key of all arrays without an entry in `Layout.original`."""

COUNTS = {"n_live": False, "n_dead": True, "n_trained": False, "n_untrained": True}
"""Names of the numbers of dead (True) and live tokens."""

RECORDED = "recorded_"
"""Prefix of the number that is true if a file holds the array."""

OF_RUNS = {"n_runs": None, "base_seed": "seed", "base_train_seed": "seed"}
"""Numbers of several runs, and the number of which it is the first, counted on from run to run."""

_TYPES = {
    **dict.fromkeys(("vocab_size", "hidden_dim", "n_layers", "n_heads", "num_steps"), "int64"),
    **dict.fromkeys(("batch_size", "seed", "init_seed"), "int64"),
    "init_method_code": "int32",
    "tied_weights": "bool",
}


def number_type(key: str) -> str | None:
    """Type of a number in a file; None if no layout knows its name."""
    if key in COUNTS or key in OF_RUNS:
        return "int64"
    if key.startswith(RECORDED):
        return "bool"
    scalar = scalar_of(key)
    return None if scalar is None else _TYPES.get(scalar.name, "float32")


_ALSO_OF_ARRAYS = ("type", "bits", "tokens", "time", "row0", "first_row")
"""Keys of a layout that hold for all its arrays."""

_OF_ARRAY = tuple(each.name for each in fields(Column) if each.name != "key")
_HIDDEN = ("name", "columns", "whole", "omitted", *_ALSO_OF_ARRAYS)
_OWN = tuple(each.name for each in fields(Layout) if each.name not in _HIDDEN)
_OF_LAYOUT = ("like", "arrays", *_ALSO_OF_ARRAYS, *_OWN)


def _layout(name: str, given: Mapping[str, Any], *, check: bool = False) -> Layout:
    """Layout of a table of TOML, whose types are checked on demand."""
    table = _whole(name, given)
    _refuse_unknown(name, "key", table, _OF_LAYOUT)
    marks = table.get("marks", {})
    if not isinstance(marks, list | dict):
        raise InvalidArgument(f"{name}: got marks={marks!r}, expected a list or table of names")
    if isinstance(marks, list):
        _refuse_unknown(name, "mark", marks, (*MARKS, _IDS))
        if _IDS in marks and table.get("tokens", "all") == "all":
            raise InvalidArgument(
                f'{name}: marks has {_IDS}; say of which: tokens = "dead" or "live"'
            )
        marks = {key: f"{table['tokens']}_ids" if key == _IDS else MARKS[key] for key in marks}
    arrays = table.get("arrays", {})
    if not isinstance(arrays, dict) or not (arrays or marks):
        raise InvalidArgument(
            f'{name}: got no arrays, expected a table such as [arrays] with W = "W", or marks'
        )
    columns = [_column(name, key, entry, table, check=check) for key, entry in arrays.items()]
    settings: dict[str, Any] = {"required": tuple([*arrays][:1] or marks)} | {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
        if key == "tokens" or key not in ("arrays", "like", *_ALSO_OF_ARRAYS)
    }
    settings |= {"columns": tuple(columns), "marks": marks}
    layout = Layout(name=name, whole=name in _WHOLE, **settings)
    if check:
        _check_fields(name, layout)
        _refuse_unknown(name, "kind of mark", layout.marks.values(), TOKEN_KINDS)
        _refuse_unknown(name, "number", layout.scalars.values(), SCALARS)
    for key in (*layout.numbers, *layout.texts):
        if number_type(key) is None:
            raise InvalidArgument(
                f"{name}: there is no number {key!r}; `trajstore import` lists the known ones"
            )
    if layout.runs == "axis" and layout.format == "hdf5":
        raise InvalidArgument(f"{name}: runs = 'axis' is for safetensors; omit format = 'hdf5'")
    return layout


def _column(name: str, key: str, given: Any, defaults: Mapping[str, Any], *, check: bool) -> Column:
    """Column of an entry of ``arrays``: the name of a variable, or a table."""
    table = given if isinstance(given, dict) else {"variable": given}
    where = f"{name}: arrays.{key}"
    _refuse_unknown(where, "key", table, _OF_ARRAY)
    if "variable" not in table:
        raise InvalidArgument(f'{where}: got no variable, expected a key such as variable = "W"')
    merged = {each: defaults[each] for each in _ALSO_OF_ARRAYS if each in defaults} | table
    column = Column(key=key, **merged)
    if check:
        _check_fields(where, column)
        _refuse_unknown(where, "variable", [column.variable], ARRAY_KINDS)
    if column.bits and column.type not in ("bfloat16", "float16"):
        if "bits" in table:
            raise InvalidArgument(
                f"{where}: got bits = true with type {column.type}, expected a type of 16 bits"
            )
        column = replace(column, bits=False)
    if column.time not in ("after", "before", "initial") and (column.variable, column.type) != (
        "W",
        "float32",
    ):
        raise InvalidArgument(
            f"{where}: got time = {column.time!r} for {column.variable} in {column.type}, expected "
            "W in float32"
        )
    return column


def _check_fields(where: str, made: Column | Layout) -> None:
    try:
        check_fields(made)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None


def _refuse_unknown(where: str, what: str, words: Iterable[str], known: Collection[str]) -> None:
    for word in words:
        if word not in known:
            raise InvalidArgument(
                f"{where}: there is no {what} {word!r}{did_you_mean(str(word), known)}; choose "
                f"from {', '.join(known)}"
            )


def _whole(name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table, with the keys of the layout that it is ``like``.

    Its own keys replace these, but its arrays are added; an array that is false is left out.
    """
    if "like" not in table:
        return table
    likes = [entry for entry in NAMES if entry not in _WHOLE]
    _refuse_unknown(name, "layout", [table["like"]], likes)
    base = _whole(name, _TABLES[NAMES[table["like"]]])
    changes = table.get("arrays", {})
    if not isinstance(changes, dict):
        return {**base, **table}  # `_layout` refuses it
    for key in changes:
        if changes[key] is False and key not in base.get("arrays", {}):
            raise InvalidArgument(
                f"{name}: arrays.{key} is false, but layout {table['like']} has no {key!r}"
                f"{did_you_mean(key, base.get('arrays', ()))}; it has "
                f"{', '.join(base.get('arrays', ()))}"
            )
    arrays = base.get("arrays", {}) | changes
    arrays = {key: entry for key, entry in arrays.items() if entry is not False}
    required = [key for key in base.get("required", ()) if key in arrays or key not in changes]
    return {**base, "required": required or [*arrays][:1], **table, "arrays": arrays}


_WHOLE = ("native", "hdf5")
_TABLES = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text("utf-8"))
NAMES: dict[str, str] = {
    also: name for name, table in _TABLES.items() for also in (name, *table.pop("names", ()))
}
"""Layout of each name, also of the names of other notebooks with such files."""

_ALL = {name: _layout(name, table) for name, table in _TABLES.items()}

LAYOUTS: dict[str, Layout] = {name: layout for name, layout in _ALL.items() if not layout.whole}
"""Layouts of the notebooks, by name."""

EXPORT_LAYOUTS = tuple(NAMES)
"""Names of the layouts of whole runs, and of those of the notebooks."""

MASKS = tuple(name for name, layout in LAYOUTS.items() if not layout.columns)
"""Layouts of files that hold masks only."""

IMPORT_LAYOUTS = tuple(name for name in EXPORT_LAYOUTS if name not in MASKS)
"""The layouts of files that hold a run."""


def layout_of(name: str, known: Collection[str] = EXPORT_LAYOUTS) -> Layout:
    """Layout of a name, or of a TOML file.

    Parameters
    ----------
    name : str
        A name, or a path that ends in ``.toml``.
    known : collection of str
        Names that are allowed.

    Raises
    ------
    InvalidArgument
        If the name is unknown, the file cannot be read, or it has a wrong key or value.
    """
    if name in known:
        return _ALL[NAMES[name]]
    if not name.endswith(".toml"):
        raise InvalidArgument(
            f"there is no layout {name!r}{did_you_mean(name, known)}; choose from "
            f"{', '.join(known)}, or give a TOML file"
        )
    try:
        table = tomllib.loads(Path(name).read_text("utf-8"))
    except FileNotFoundError as error:
        raise InvalidArgument(f"there is no file {name}; give the path of the layout") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read the layout {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{name} is not TOML: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{name} is not valid TOML: {error}; correct this place") from error
    return _layout(name, table, check=True)


def as_exported(layout: Layout) -> Layout:
    """A layout for an export: marks and steps among its arrays are written as these.

    Raises
    ------
    InvalidArgument
        If its steps are numbers, which an import alone reads.
    """
    if layout.steps and re.fullmatch(r"[\d:,]+", layout.steps):
        raise InvalidArgument(
            f"{layout.name}: got steps = {layout.steps!r}, which an import reads; expected the "
            "name of the labels to write"
        )
    marks = {each.key: each.variable for each in layout.columns if each.variable in TOKEN_KINDS}
    labels = [each.key for each in layout.columns if each.variable == STEP.name]
    return replace(
        layout,
        columns=tuple(c for c in layout.columns if c.key not in (*marks, *labels)),
        marks=dict(layout.marks) | marks,
        steps=layout.steps or next(iter(labels), None),
    )


def as_toml(layout: Layout) -> str:
    """A layout as the text of a TOML file for an import, which `layout_of` reads.

    >>> print(as_toml(layout_of("goldilocks")))
    [arrays]
    W = "W"
    losses = {variable = "loss", type = "float32", first_row = 1}
    dead_mask = "dead_mask"
    """
    top = {
        "format": layout.format if layout.format == "hdf5" else None,
        "steps": layout.steps,
        "first_step": layout.first_step,
        "true_steps": layout.true_steps or None,
        "original": dict(layout.original),
        "scalars": dict(layout.scalars),
        "ignore": [*layout.ignore],
    }
    lines = [f"{key} = {_toml(value)}" for key, value in top.items() if value not in (None, {}, [])]
    lines += [""] * bool(lines) + ["[arrays]"]
    usual = Column(key="", variable="")
    for column in (*layout.columns, *(layout.arrays[key] for key in layout.marks)):
        entry = {name: getattr(column, name) for name in _OF_ARRAY}
        entry = {name: each for name, each in entry.items() if each != getattr(usual, name)}
        value: Any = entry if len(entry) > 1 else column.variable
        lines.append(f"{_toml_key(column.key)} = {_toml(value)}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{_toml_key(key)} = {_toml(each)}' for key, each in value.items())}}}"
        )
    # TOML has no surrogates, and no plain DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def text_key(layout: Layout, name: str) -> str:
    """Key of a text of a whole run, such as ``attributes`` or ``token_text``."""
    if layout.format == "safetensors":
        return name
    return "trajstore_json" if name == "attributes" else f"{name}_json"


KEPT_ATTRIBUTES = (
    "config", "optimizer", OPTIMIZER_STATE, "recording", "provenance", "imported", "created"
)  # fmt: skip
"""Attributes of the root that describe the origin of the values, and remain valid for a copy."""
