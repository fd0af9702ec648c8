"""Layout of a file for an import: what the user says, what its layout says, then usual names.

Nothing is inferred from values: arrays with other names are omitted and listed.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from trajstore.errors import FormatError, InvalidArgument, did_you_mean
from trajstore.exchange.layouts import LAYOUTS, OTHERS, Column, Layout
from trajstore.exchange.usual_names import ARRAY_KINDS, SCALARS, named, scalar_of
from trajstore.formats.array_file import ArrayFile, is_number
from trajstore.schema import STEP, TRAJECTORIES, VARIABLES
from trajstore.values.native_types import NATIVE_TYPES

IGNORE = "ignore"
"""Kind of arrays to omit."""

KINDS = (*ARRAY_KINDS, *SCALARS, IGNORE)
"""All words that ``map`` accepts."""

_MOST_LISTED = 24

BITS = ("uint16", "int16")
"""Types of arrays that hold the bits of 16-bit floating-point numbers."""

_OTHER_PARAMETER = "belongs to another parameter"
_MARKS_IN_ATTRIBUTES = ("dead_mask", "live_mask", "dead_ids", "live_ids")


def guess(file: ArrayFile, given: Layout | None = None) -> Layout:
    """Complete a layout by the usual names of the other arrays of a file.

    Without a layout, a known one that fits the file says how its arrays are aligned.

    Parameters
    ----------
    file : ArrayFile
    given : Layout, optional
        What `with_options` returns. Keys that the file lacks are left out.

    Returns
    -------
    Layout
        Its columns name all arrays that an import reads.

    Raises
    ------
    FormatError
        If masks or lists of tokens are attributes.
    """
    given = given or with_options(file, recorded_layout(file))
    _check_attributes(file, given)
    columns = {
        key: _placed(file, each)
        for key, each in given.arrays.items()
        if key in file.keys and key not in given.ignore
    }
    taken = {column.kind: key for key, column in columns.items()}
    taken |= {STEP.name: "the given steps"} if given.steps else {}
    omitted: dict[str, str] = {}
    for key in file.keys:
        name = named(key)
        if name is None or key in columns or key in given.ignore or key in given.scalars:
            continue
        if name.kind.name in taken and (name.kind.is_variable or name.kind.name == STEP.name):
            omitted[key] = f"replaced by {taken[name.kind.name]}"
            continue
        column = _column(file, key, name.kind.name, tokens=given.only or "all")
        column = _placed(file, column)
        if "." in key and file.shape(key) and not fits(file, column):
            omitted[key] = _OTHER_PARAMETER  # one of the many arrays of a checkpoint
        elif file.shape(key) or fits(file, column) or not is_number(file.dtype(key)):
            columns[key] = column
    _keep_one_parameter(file, columns, omitted)
    _keep_rows(file, columns, given)
    _part_matrices(columns)
    known = given if given.name else _fitting(file, columns, given)
    labeled = any(column.kind == STEP.name for column in columns.values())
    for key, exact in known.arrays.items() if known is not given else ():
        own = columns.get(key)
        if own is not None and (key not in given.arrays or own.kind == exact.kind):
            # Files of 1.12a, with states before the step of their row, have no labels.
            is_after = exact.time == "before" and (labeled or given.first_step is not None)
            time = "after" if is_after else exact.time
            made = replace(exact, time=time, matrix=own.matrix, type=own.type, bits=own.bits)
            columns[key] = _placed(file, made)
    return replace(
        given,
        name=known.name or file.format,
        columns=tuple(columns.values()),
        marks={},
        omitted=omitted,
        format="hdf5" if file.format == "hdf5" else "safetensors",
    )


def _column(file: ArrayFile, key: str, kind: str, **place: Any) -> Column:
    """An array of a file that is read as a kind, in its own type."""
    dtype = file.dtype(key)
    type: Any = dtype if dtype in NATIVE_TYPES else "bfloat16"
    return Column(key=key, variable=kind, type=type, bits=dtype in BITS, **place)


def recorded_layout(file: ArrayFile) -> Layout | None:
    """The layout that a file names, as an export writes it."""
    known = LAYOUTS.get(str(file.attributes.get("layout")))
    return known if known and _has(file, known) else None


def _has(file: ArrayFile, layout: Layout) -> bool:
    return all(key in file.keys for key in layout.required)


def _placed(file: ArrayFile, column: Column) -> Column:
    """A column of a layout, with what the name of the array says about its place."""
    name = named(column.key)
    made = column if column.has_tokens else replace(column, tokens="all")
    if name is not None:
        run = name.run if column.run is None else column.run
        tokens = name.tokens if column.tokens == "all" else column.tokens
        tokens = tokens if column.has_tokens else "all"
        made = replace(column, run=run, matrix=column.matrix or name.matrix, tokens=tokens)
    if column.tokens != "all" and column.has_tokens:
        # A mask as long as its token axis has the tokens of its rows, which are all then.
        dims = ARRAY_KINDS[column.variable].dims
        at = dims.index("token") - len(dims)
        shape = file.shape(column.key)
        masks = [file.shape(key) for key in file.keys if _is_mask(key)]
        if len(shape) >= -at and (shape[at],) in masks:
            made = replace(made, tokens="all")
    return made


def _is_mask(key: str) -> bool:
    name = named(key)
    return name is not None and name.kind.dims == ("vocabulary",)


def _keep_one_parameter(
    file: ArrayFile, columns: dict[str, Column], omitted: dict[str, str]
) -> None:
    """Keep the moments of W from an optimizer's state, which has those of all parameters."""
    shapes = {file.shape(key) for key, column in columns.items() if column.kind == "W"}
    alike = Counter((column.kind, file.shape(key)) for key, column in columns.items())
    for key, column in [*columns.items()]:
        if column.kind not in ("exp_avg", "exp_avg_sq", "grad") or "." not in key:
            continue
        if file.shape(key) not in shapes:
            omitted[key] = _OTHER_PARAMETER
        elif alike[column.kind, file.shape(key)] > 1:
            omitted[key] = "several parameters have this shape; choose with map={…}"
        if key in omitted:
            del columns[key]


def _keep_rows(file: ArrayFile, columns: dict[str, Column], given: Layout) -> None:
    """Leave out values that are numbers of the whole file, although they have names of variables.

    One value is that of the only row, if there is one row. As many rates as runs are one per run.
    """
    anchors = [each for each in columns.values() if each.kind in TRAJECTORIES]
    lengths = [file.shape(each.key)[-3] for each in anchors if len(file.shape(each.key)) > 2]
    runs = {each.run for each in anchors if each.run is not None}
    outer = {file.shape(each.key)[0] for each in anchors if extra(file, each) == 1}
    count = len(runs) or max(outer, default=1)
    for key, column in [*columns.items()]:
        shape = file.shape(key)
        is_row = ARRAY_KINDS[column.kind or "W"].dims == (STEP.name,)
        if key in given.arrays or column.run is not None or not is_row or not fits(file, column):
            continue
        of_file = shape == () and (bool(lengths) or column.kind in (STEP.name, "lr"))
        of_file |= shape == (1,) and max(lengths, default=1) > 1
        if of_file or (column.kind == "lr" and count > 1 and shape == (count,)):
            del columns[key]


def _part_matrices(columns: dict[str, Column]) -> None:
    """Keep the matrices of untied models. If there is an E, a W is the other matrix."""
    matrices = {each.matrix for each in columns.values() if each.kind == "W"}
    untied = "E" in matrices and len(matrices) > 1
    for key, column in columns.items():
        other = column.matrix or ("W" if column.kind == "W" else None)
        columns[key] = replace(column, matrix=other if untied else None)


def _fitting(file: ArrayFile, columns: Mapping[str, Column], given: Layout) -> Layout:
    """The known layout that has all arrays of a file, with most types equal."""
    series = {key for key, each in columns.items() if each.kind in VARIABLES}
    fitting: dict[str, tuple[int, int]] = {}
    for layout in LAYOUTS.values():
        exact = {column.key: column for column in layout.columns}
        if (
            exact and layout.format == file.format and series <= exact.keys() and _has(file, layout)
            and layout.steps in (None, *file.keys)
            and all(text in file.attributes for text in layout.texts)
        ):  # fmt: skip
            held = [key for key in exact if key in file.keys]
            alike = sum(file.dtype(key) == exact[key].file_type for key in held)
            fitting[layout.name] = (alike, len(layout.required))
    return LAYOUTS[max(fitting, key=fitting.__getitem__)] if fitting else given


def extra(file: ArrayFile, column: Column) -> int:
    """Number of axes of an array beyond those of its kind."""
    return len(file.shape(column.key)) - len(ARRAY_KINDS[column.kind or "W"].dims)


def fits(file: ArrayFile, column: Column) -> bool:
    """True if the type and rank of an array fit its kind."""
    kind, dtype = ARRAY_KINDS[column.kind or "W"], file.dtype(column.key)
    rank = len(file.shape(column.key))
    is_type = {
        "float": dtype in NATIVE_TYPES or (dtype in BITS and rank > 1),
        "whole": "int" in dtype,
        "truth": dtype == "bool" or "int" in dtype,
    }
    least = len(kind.dims) - ("step" in kind.dims)
    return is_type[kind.values] and least <= rank <= len(kind.dims) + 1


def unfit(file: ArrayFile, column: Column) -> FormatError:
    """The error of an array whose type or rank does not fit its kind."""
    kind = ARRAY_KINDS[column.kind or "W"]
    expected = {"float": "floating-point numbers or their 16 bits", "whole": "whole numbers",
                "truth": "booleans"}[kind.values]  # fmt: skip
    return FormatError(
        f"{file.path}: {column.key} has type {file.dtype(column.key)} and shape "
        f"{file.shape(column.key)}, but is read as {kind.name}, expected {expected} of "
        f"({', '.join(kind.dims)}); name its kind with map={{'KIND': {column.key!r}}}, or omit it "
        f"with map={{'ignore': {column.key!r}}}"
    )


def with_options(
    file: ArrayFile,
    layout: Layout | None,
    *,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: Literal[0, 1] | None = None,
) -> Layout:
    """A layout in which the options of an import replace what they name.

    Parameters
    ----------
    file : ArrayFile
    layout : Layout, optional
    map, bits, labels, first_row
        As for `trajstore.import_file`.

    Raises
    ------
    InvalidArgument
        If an option has an invalid value, or names an array that the file does not hold.
    """
    layout = layout or Layout(name="")
    types: dict[str, Any] = {OTHERS: bits} if isinstance(bits, str) else dict(bits or {})
    for type in types.values():
        if type not in ("bfloat16", "float16"):
            raise InvalidArgument(f"got bits {type!r}, expected bfloat16 or float16")
    if unknown := set(labels or {}) - {"steps"}:
        raise InvalidArgument(f"got labels of {', '.join(sorted(unknown))}, expected steps only")
    kinds = _kinds_by_key(file, map or {})
    written = layout.steps if re.fullmatch(r"[\d:,]+", layout.steps or "") else None
    steps = (labels or {}).get("steps", written)
    is_key = steps is not None and steps in file.keys
    if steps is not None and is_key:
        kinds[steps], steps = STEP.name, None
    chosen = {kind for kind in kinds.values() if kind in (*VARIABLES, STEP.name)}
    columns = [
        column for key, column in layout.arrays.items()
        if key not in kinds and column.kind not in chosen
        and not (column.kind == STEP.name and steps)
    ]  # fmt: skip
    columns += [
        _mapped(file, layout, key, kind) for key, kind in kinds.items() if kind in ARRAY_KINDS
    ]
    if first_row is not None:  # rows are states after their step
        columns = [replace(c, time="after") if c.time == "before" else c for c in columns]
    return replace(
        layout,
        columns=tuple(columns),
        marks={},
        steps=steps,
        first_step=first_row if first_row in (0, 1) else layout.first_step,
        true_steps=layout.true_steps or is_key,
        original=dict(layout.original) | types,
        scalars=dict(layout.scalars) | {k: v for k, v in kinds.items() if v in SCALARS},
        ignore=(*layout.ignore, *(key for key, kind in kinds.items() if kind == IGNORE)),
    )


def _mapped(file: ArrayFile, layout: Layout, key: str, kind: str) -> Column:
    """An array that the user maps to a kind, aligned as the layout aligns that kind."""
    made = _column(file, key, kind)
    exact = layout.arrays.get(key)
    if exact is None or exact.variable != kind:
        alike = (each for each in layout.arrays.values() if each.kind == kind)
        exact = next(alike, made)
    return replace(made, time=exact.time, tokens=exact.tokens)


def _kinds_by_key(file: ArrayFile, map: Mapping[str, str | Iterable[str]]) -> dict[str, str]:
    """Kind of each key of ``map``."""
    kinds: dict[str, str] = {}
    for kind, keys in map.items():
        if kind not in KINDS:
            raise InvalidArgument(
                f"there is no kind {kind!r}{did_you_mean(kind, KINDS)}; choose from "
                f"{', '.join(KINDS)}"
            )
        for key in [keys] if isinstance(keys, str) else keys:
            if key in kinds:
                raise InvalidArgument(
                    f"got {key} mapped to {kinds[key]} and to {kind}, expected one of them"
                )
            known = (*file.keys, *file.attributes)
            if kind in ARRAY_KINDS and key in file.attributes and key not in file.keys:
                raise InvalidArgument(
                    f"{file.path}: {key} is a number besides the arrays, but {kind} is read from "
                    f"arrays only; map it to one of {', '.join(SCALARS)}"
                )
            if key not in known and not (kind == IGNORE and key in file.unread):
                raise InvalidArgument(
                    f"{file.path} holds no {key!r}; it holds {abridged(file.keys)}"
                )
            kinds[key] = kind
    return kinds


def _check_attributes(file: ArrayFile, given: Layout) -> None:
    """Refuse masks and lists of tokens in attributes: they are read from arrays only."""
    for key, value in file.attributes.items():
        name = named(key)
        is_list = isinstance(value, list) or (isinstance(value, str) and value[:1] in ("[", "("))
        if key in given.ignore or not is_list or name is None:
            continue
        if name.kind.name in _MARKS_IN_ATTRIBUTES:
            kind = name.kind.name
            raise FormatError(
                f"{file.path}: {key} is an attribute, but {kind} is read from arrays only; save it "
                f"as an array, or save {kind}.npy and pass masks='{kind}.npy' and "
                f"map={{'ignore': {key!r}}}"
            )


def described(file: ArrayFile) -> str:
    """The arrays of a file with types and shapes, and the command that names them, to be edited."""
    listed = [f"  {key}  {file.dtype(key)} {file.shape(key)}" for key in file.keys[:_MOST_LISTED]]
    listed += ["  …"] if len(file.keys) > _MOST_LISTED else []
    listed += [f"  {key}  not read: {why}" for key, why in [*file.unread.items()][:_MOST_LISTED]]
    matrices = [
        key
        for key in file.keys
        if (file.dtype(key) in (*NATIVE_TYPES, *BITS)) and len(file.shape(key)) > 1
    ]
    if not matrices:
        return "\n".join(listed or ["  nothing"])
    matrix = max(matrices, key=lambda key: (named(key) is None, len(file.shape(key))))
    others = [key for key in file.keys if key != matrix and file.shape(key)]
    unnamed = [key for key in others if named(key) is None and scalar_of(key) is None]
    words = [f"W={matrix}", *(f"KIND={key}" for key in unnamed[:4])]
    options = " ".join(f"--map {shlex.quote(word)}" for word in words)
    return (
        "\n".join(listed)
        + "\nReplace each KIND by a word that `trajstore import` lists, or delete its --map; add "
        "your other options:\n"
        + f"  trajstore import {shlex.quote(str(file.path))} {options} -o run.zarr"
    )


def abridged(keys: Any) -> str:
    """Keys for a message, at most twelve."""
    names = sorted(map(str, keys))
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"
