"""Runs of a file, as its layout says: steps, tokens, variables, attributes.

The layout names every array that is read. Sources that contradict each other are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.file_numbers import attributes_of, numbers_of, places_of, scalar_numbers
from trajstore.exchange.file_rows import check_size, number_of_steps, steps_of
from trajstore.exchange.guessed_layout import BITS, described, extra, fits, unfit
from trajstore.exchange.imported_run import (
    ImportedFile,
    ImportedRun,
    ImportedVariable,
    RunPart,
    TableLine,
    reader,
)
from trajstore.exchange.layouts import OTHERS, TOKEN_KINDS, Column, Layout, as_toml
from trajstore.exchange.token_tables import TokenArray, TokenTable, token_arrays, token_table
from trajstore.exchange.usual_names import STARTING_STEP
from trajstore.formats.array_file import ArrayFile, contradiction
from trajstore.schema import STEP, TRAJECTORIES, VARIABLES
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]

UNKNOWN = "unknown name"
"""Reason for the omission of an array without a usual name."""

_MOST_NAMED = 12
_RUN_COUNTS = tuple(
    f"{prefix}{noun}"
    for noun in ("runs", "trials", "replicates")
    for prefix in ("n_", "num_", "number_of_")
)
"""Names of the number of runs of a file."""


def load(
    file: ArrayFile, layout: Layout, *, masks: Sequence[TokenArray] = (), memory: int
) -> ImportedFile:
    """Interpret a file. Of its values, only labels and tables of tokens are read.

    Parameters
    ----------
    file : ArrayFile
    layout : Layout
        Layout that names all its arrays, as `guess` returns it.
    masks : sequence of TokenArray, optional
        Labels of tokens from another file.
    memory : int
        Bytes that one of its rows must fit into.

    Raises
    ------
    FormatError
        If it holds neither W nor its changes, or shapes, types, labels or masks contradict.
    InvalidArgument
        If the layout does not fit the file, or a row does not fit into the memory.
    """
    _check_columns(file, layout)
    besides = {*(column.key for column in layout.columns), *layout.ignore}
    numbers, lists = numbers_of(file, besides)
    runs = tuple(
        _Assembly(file, layout, part, masks).run(memory)
        for part in _parts(file, layout, numbers, lists)
    )
    lines = tuple(_table(file, layout, runs, numbers, lists))
    left = [line for line in lines if not line.kind and line.shape]
    left += [line for line in lines if line.name in file.unread]
    hint = "; map={'KIND': 'NAME'} reads one" * any(line.why == UNKNOWN for line in left)
    names = [*dict.fromkeys(line.name for line in left)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    omitted = (
        [f"omitted: {', '.join(names[:_MOST_NAMED])}{more} (see the table{hint})"] if left else []
    )
    runs = tuple(replace(run, notes=(*run.notes, *omitted)) for run in runs)
    return ImportedFile(layout=layout.name, runs=runs, table=lines, toml=as_toml(layout))


def _check_columns(file: ArrayFile, layout: Layout) -> None:
    """Refuse arrays whose types or ranks do not fit, and two arrays that are one variable."""
    columns = [column for column in layout.columns if column.kind]
    first: dict[Any, Column] = {}
    for column in columns:
        if not fits(file, column):
            raise unfit(file, column)
        place = (column.kind, column.run, column.matrix, column.tokens)
        other = first.setdefault(place, column)
        if other is not column and column.kind in VARIABLES and column.kind != STEP.name:
            raise FormatError(
                f"{file.path}: {other.key} and {column.key} both have names of {column.kind}; "
                f"choose with map={{{column.kind!r}: {column.key!r}}}, or give each its run, "
                "matrix or tokens in a layout"
            )
    for name in layout.original:
        alike = [column for column in columns if name in (column.key, column.kind)]
        types = {file.dtype(column.key) for column in alike}
        if name != OTHERS and types.isdisjoint((*BITS, "float16")):
            what = f"{alike[0].key} is {types.pop()}" if alike else f"the file holds no {name}"
            raise InvalidArgument(
                f"{file.path}: bits={{{name!r}: '…'}} applies to uint16 and float16, but {what}; "
                "omit it"
            )
    if any(column.kind in TRAJECTORIES for column in columns):
        return
    tables = [column.key for column in columns if column.kind in TOKEN_KINDS]
    labels = f"; its labels of tokens ({', '.join(tables)}) can be the masks of another import"
    raise FormatError(
        f"{file.path} holds no array with a usual name of W (step, token, hidden) or of its "
        f"changes{labels if tables else ''}. It holds:\n{described(file)}"
    )


def _parts(
    file: ArrayFile, layout: Layout, numbers: Mapping[str, Any], lists: Mapping[str, list[Any]]
) -> Iterator[RunPart]:
    """Split a file into runs, by their numbers, a first axis, or the matrices of untied models."""
    columns = [column for column in layout.columns if column.kind]
    series = [column for column in columns if column.kind in VARIABLES]
    anchors = [column for column in series if column.kind in TRAJECTORIES]
    numbered = sorted({column.run for column in anchors if column.run is not None})
    lengths = {each.key: file.shape(each.key)[0] for each in series if extra(file, each) == 1}
    along = [lengths[column.key] for column in anchors if column.key in lengths]
    first = f"{file.path}: {anchors[0].key}"
    for key, length in lengths.items() if along else ():
        if length != along[0]:
            raise FormatError(
                f"{first} has {along[0]} runs along its first axis, but {key} has {length}; omit "
                f"one with map={{'ignore': {key!r}}}"
            )
    if numbered and along:
        raise FormatError(
            f"{first} has the number of a run in its name and an axis of runs, expected only one "
            "of them"
        )
    places: list[tuple[int | None, int | None]] = (
        [(run, None) for run in numbered] or [(None, at) for at in range(max(along, default=0))]
        or [(None, None)]
    )  # fmt: skip
    for column in series:
        if column.run is not None and column.run not in numbered:
            fault = f"{column.key} belongs to run {column.run}, of which the file holds no W"
            raise contradiction(file.path, fault, column.key)
    count = len(places)
    what = (
        f"the names of arrays give {count} runs ({', '.join(map(str, numbered[:12]))})" if numbered
        else f"{anchors[0].key} of shape {file.shape(anchors[0].key)} has {count} runs"
    )  # fmt: skip
    _check_counts(file, numbers, lists, count, what)
    for column in series:
        shared = column.run is None and column.key not in lengths and column.kind != "lr"
        if (numbered or along) and shared:
            raise FormatError(
                f"{first} belongs to one of {count} runs, but {column.key} has no number of a run; "
                f"omit it with map={{'ignore': {column.key!r}}}"
            )
    matrices = sorted({column.matrix for column in anchors if column.matrix is not None})
    for column in series:
        if matrices and column.matrix is None and column.is_matrix:
            raise contradiction(
                file.path,
                f"{column.key} belongs to E or W, which are untied, but its name does not end "
                "with _E or _W",
                column.key,
            )
    for at, (run, outer) in enumerate(places):
        number = run if run is not None else outer
        own = {key: each[at] for key, each in lists.items() if count > 1 and len(each) == count}
        for matrix in matrices or (None,):
            mine = tuple(
                column for column in columns
                if column.run in (None, run) and (column.matrix in (None, matrix) or not matrices)
            )  # fmt: skip
            anchor = next(
                (each for kind in TRAJECTORIES for each in mine if each.kind == kind), None
            )
            label = ".".join(str(each) for each in (number, matrix) if each is not None)
            if anchor is None:
                raise FormatError(
                    f"{file.path}: run {label} holds none of {', '.join(TRAJECTORIES)}; name the "
                    "array with map={'W': 'NAME'}"
                )
            yield RunPart(
                label=label, anchor=anchor, columns=mine, numbers=dict(numbers) | own, outer=outer
            )


def _check_counts(
    file: ArrayFile,
    numbers: Mapping[str, Any],
    lists: Mapping[str, list[Any]],
    count: int,
    what: str,
) -> None:
    """Refuse a number of runs, or lists of one number per run, that differ from the arrays."""
    for key, value in numbers.items():
        if key.lower() in _RUN_COUNTS and value != count:
            raise contradiction(file.path, f"{key} is {value}, but {what}", key)
    for key, values in lists.items():
        if len(values) != count and count > 1:
            raise contradiction(file.path, f"{key} has {len(values)} values, but {what}", key)


@dataclass(eq=False)
class _Assembly:
    """Assembly of one run from a file."""

    file: ArrayFile
    layout: Layout
    part: RunPart
    masks: Sequence[TokenArray]
    notes: list[str] = field(default_factory=list)

    def run(self, memory: int) -> ImportedRun:
        """Assemble the run. At most `memory` bytes of values are read at once."""
        self.anchor, self.single = self.part.anchor, self.part.is_single(self.file)
        whole = self.file.shape(self.anchor.key)
        shape = (1, *whole) if self.single else whole[-3:]
        if not all(shape):
            raise FormatError(
                f"{self.file.path}: {self.anchor.key} has shape {whole}, expected (step, token, "
                "hidden) without a length of 0"
            )
        self.count, self.width, self.hidden = shape
        check_size(self.file.path, self.anchor.key, shape, self.file.dtype(self.anchor.key), memory)
        self.steps, notes = steps_of(self.file, self.layout, self.part)
        self.notes += notes
        start = number_of_steps(self.part.numbers, STARTING_STEP)
        self.resumed = bool(start) and int(self.steps[0]) == start
        if start and not self.resumed:
            self.notes.append(
                f"by a number in the file, the training was resumed at step {start}, but its first "
                f"row is labeled {self.steps[0]}"
            )
        tokens = self._tokens()
        variables = tuple(self._with_first_row(each) for each in self._variables(tokens))
        self._note_what_is_missing({each.variable for each in variables})
        return ImportedRun(
            label=self.part.label,
            steps=self.steps,
            token=tokens.token,
            coordinates=tokens.coordinates,
            variables=variables,
            attributes=self._attributes(),
            notes=tuple(self.notes),
        )

    def _tokens(self) -> TokenTable:
        """Tokens of the rows; of rows of dead or live tokens, the ids that a mask or list gives."""
        of_file = token_arrays(self.file, self.part.columns)
        self.marks = [*of_file, *self.masks]
        populations = {each.tokens for each in self.part.columns if each.kind and each.is_matrix}
        self.by_population = populations == {"dead", "live"}
        if len(populations) > 1 and not self.by_population:
            raise FormatError(
                f"{self.file.path}: {self.anchor.key} and others have rows of different tokens; "
                "omit some with map={'ignore': 'NAME'}"
            )
        if self.by_population:
            self.width = sum(len(self._ids(each)) for each in ("dead", "live"))
        elif "all" not in populations and not any(each.kind == "token" for each in self.marks):
            (population,) = populations
            name = f"the {population} tokens"
            self.marks.append(TokenArray(name=name, kind="token", values=self._ids(population)))
        table = token_table(
            self.file.path,
            self.width,
            self.marks,
            self.part.numbers,
            sizes=self._sizes("vocab_size"),
            rows_of=self.anchor.key,
            by_place=self.file.attributes.get("exporter") == "trajstore"
            and any(each.kind == "token" for each in of_file),
        )
        self.notes += table.notes
        return table

    def _ids(self, population: str) -> Array:
        for each in self.marks:
            if each.kind == f"{population}_ids":
                return each.values
            if each.kind.endswith("_mask"):
                return np.flatnonzero(each.values == each.kind.startswith(population))
        key = next(c.key for c in self.part.columns if c.is_matrix and c.tokens == population)
        raise FormatError(
            f"{self.file.path}: {key} has rows of {population} tokens with unknown ids; give a "
            f"file of their ids ({population}_ids) or of a mask of all tokens with masks='FILE'"
        )

    def _variables(self, tokens: TokenTable) -> tuple[ImportedVariable, ...]:
        made: dict[str, ImportedVariable] = {}
        populations: dict[str, str] = {}
        for column in self.part.columns:
            if column.kind not in VARIABLES or column.kind == STEP.name:
                continue
            variable = self._variable(column, tokens)
            if column.kind in made:
                variable = self._joined(
                    made[column.kind], variable, populations[column.kind], column.tokens
                )
            made[column.kind], populations[column.kind] = variable, column.tokens
        for variable in made.values():
            of_token = "token" in VARIABLES[variable.variable].dims
            if of_token and variable.row_shape[0] != self.width:
                raise contradiction(
                    self.file.path,
                    f"{variable.key} has rows of some tokens only, but other arrays have rows of "
                    "all",
                    variable.key,
                )
        return tuple(made[name] for name in VARIABLES if name in made)

    def _joined(
        self, first: ImportedVariable, second: ImportedVariable, *populations: str
    ) -> ImportedVariable:
        """Rows of all tokens, from those of dead and those of live tokens."""
        if first.native != second.native or first.rows != second.rows:
            raise contradiction(
                self.file.path,
                f"{first.key} has {first.rows} rows of {first.native.name}, but {second.key} has "
                f"{second.rows} rows of {second.native.name}",
                second.key,
            )
        row_shape = (self.width, *first.row_shape[1:])
        reads = zip(map(self._ids, populations), (first.read, second.read), strict=True)
        parts = tuple(reads)

        def read(start: int, stop: int) -> Array:
            whole = np.empty((stop - start, *row_shape), first.native.bits)
            for places, of_some in parts:
                whole[:, places] = of_some(start, stop)
            return whole

        return replace(first, keys=(first.key, second.key), row_shape=row_shape, read=read)

    def _variable(self, column: Column, tokens: TokenTable) -> ImportedVariable:
        original = self.layout.original
        key, dtype, dims = column.key, self.file.dtype(column.key), VARIABLES[str(column.kind)].dims
        given = self.file.shape(key)
        shape = (1, *given) if self.single and len(given) < len(dims) else given
        outer = self.part.outer if len(shape) > len(dims) else None
        shape = shape[-len(dims) :] if outer is not None else shape
        of_some = self.by_population and column.tokens != "all"
        here, pick = len(self._ids(column.tokens)) if of_some else self.width, None
        lengths = {"step": self.count, "token": here, "hidden": self.hidden}
        expected = tuple(lengths[dim] for dim in dims)
        if dims[1:] == ("token",) and len(shape) == 2 and here != shape[1] == tokens.vocabulary:
            pick, shape = tokens.token, (shape[0], here)
        lacks_first = self.count > 1 and shape == (self.count - 1, *expected[1:])
        if lacks_first:
            self.notes.append(
                f"{key} has one row less than {self.anchor.key}: its first row is the second row "
                "of the run"
            )
        elif shape != expected:
            raise FormatError(
                f"{self.file.path}: {key} has shape {given}, expected {expected[self.single :]} "
                f"({', '.join(dims[self.single :])}), as {self.anchor.key} has shape "
                f"{self.file.shape(self.anchor.key)}"
            )
        native = NATIVE_TYPES.get(dtype)  # its type, or None for 16 bits
        if native is None:
            names = (key, column.variable, OTHERS)
            own = column.type if column.type in ("bfloat16", "float16") else "bfloat16"
            native = NATIVE_TYPES[next((original[name] for name in names if name in original), own)]
        variable = ImportedVariable(
            variable=str(column.kind),
            keys=(key,),
            native=native,
            wanted=native,
            rows=shape[0],
            row_shape=tuple(shape[1:]),
            read=reader(self.file, key, native, single=self.single, outer=outer, pick=pick),
            shift=-1 if lacks_first else 0,
        )
        if self.single or column.time != "before":
            return variable
        self._check_before(variable)
        return replace(variable, shift=variable.shift + 1)

    def _check_before(self, variable: ImportedVariable) -> None:
        """Refuse states that are not those before the step of their row.

        Rows 0 and 1 are both before step 1, so they are equal. Steps are consecutive.
        """
        if (np.diff(self.steps) != 1).any():
            raise FormatError(
                f"{self.file.path}: {variable.key} is the value before the step of its row, so its "
                "steps must be consecutive; use the run from which it was exported"
            )
        both = self.steps[0] == 0 and len(self.steps) > 1
        if both and not np.array_equal(variable.read(0, 1), variable.read(1, 2)):
            raise FormatError(
                f"{self.file.path}: {variable.key} differs between rows 0 and 1, but in layout "
                f"{self.layout.name} both come before step 1; pass first_row=0 if rows are states "
                "after their step"
            )

    def _with_first_row(self, variable: ImportedVariable) -> ImportedVariable:
        """The variable. Its first row becomes NaN if no step precedes it."""
        first = self.steps[0]
        if variable.shift or VARIABLES[variable.variable].row0 != "nan":
            return variable
        if first != 0 and not self.resumed:
            if variable.variable == "grad" and len(self.steps) > 1 and variable.is_blank(0):
                self.notes.append(
                    f"{variable.key} of step {first}, the first row, is 0 or NaN everywhere and "
                    "was kept; if a training was resumed there, add the number starting_step "
                    f"{first} to the file"
                )
            return variable
        if variable.is_blank(0):
            note = (
                f"resumed at step {first}: the file does not hold the results of that step, which "
                "are NaN in the run"
            )
            self.notes += [note] if self.resumed and note not in self.notes else []
            return replace(variable, blank=True)
        if self.resumed:
            return variable
        forward = "a forward pass before the first step"
        if variable.variable == "logits":
            self.notes.append(f"{variable.key} of row 0 omitted: they come from {forward}")
            return replace(variable, blank=True)
        if variable.variable == "hidden_mean":
            self.notes.append(f"{variable.key} of row 0 comes from {forward}")
            return variable
        is_labeled = self.layout.steps or any(c.kind == STEP.name for c in self.part.columns)
        fix = f"labels={{'steps': '1:{self.count + 1}'}}" if is_labeled else "first_row=1"
        raise FormatError(
            f"{self.file.path}: {variable.key} has values in the row of step 0, before the first "
            "step; a row of a run holds the gradient, logits and loss of its step, and the state "
            f"after it. If the first row belongs to step 1, pass {fix}; or omit it with "
            f"map={{'ignore': {variable.key!r}}}"
        )

    def _attributes(self) -> dict[str, Any]:
        for key, size in self._sizes("hidden_dim").items():
            if size != self.hidden:
                raise contradiction(
                    self.file.path,
                    f"{key} is {size}, but {self.anchor.key} has shape "
                    f"{self.file.shape(self.anchor.key)}",
                    key,
                )
        numbers = dict(self.part.numbers)
        for key, number in self._sizes("num_steps").items():
            if number == self.count - 1:  # it counts the rows, of which not every step has one
                numbers[key] = int(self.steps[-1])
        return attributes_of(self.file.path, numbers, self.layout.scalars)

    def _sizes(self, name: str) -> dict[str, int]:
        """Numbers that are a given size of the table of scalars, by their keys."""
        numbers = scalar_numbers(self.part.numbers, name, self.layout.scalars)
        return {key: size for key, size in numbers.items() if isinstance(size, int)}

    def _note_what_is_missing(self, names: set[str]) -> None:
        if self.anchor.kind == "cells":
            self.notes.append("the file holds cells (W rounded to bfloat16), but no W")
        elif "W" not in names:
            key = self.anchor.key
            self.notes.append(
                "the file holds delta, but no initial W, hence no W" if key == "delta"
                else f"{key} became delta; the file holds no initial W, hence no W"
            )  # fmt: skip


def _table(
    file: ArrayFile,
    layout: Layout,
    runs: tuple[ImportedRun, ...],
    numbers: Mapping[str, Any],
    lists: Mapping[str, list[Any]],
) -> Iterator[TableLine]:
    """What all arrays and numbers become."""
    read = {key: variable for run in runs for variable in run.variables for key in variable.keys}
    columns = {column.key: column for column in layout.columns}
    read_as = {key: column.kind for key, column in columns.items() if column.kind is not None}
    for key, kind in read_as.items():
        column = columns[key]
        shape, dtype, variable = file.shape(key), file.dtype(key), read.get(key)
        details: list[str] = []
        if variable is not None:
            details += [f"bits of {variable.native.name}"] if dtype in BITS else []
            details += ["before the step of its row"] if variable.shift > 0 else []
            details += ["without the first row"] if variable.shift < 0 else []
            details += ["first row NaN"] if variable.blank else []
            details += [f"runs along {shape[0]}"] if extra(file, column) == 1 else []
        details += [f"run {column.run}"] if column.run is not None else []
        details += [column.matrix] if column.matrix is not None else []
        details += (
            [f"{column.tokens} tokens"] if column.tokens != "all" and column.has_tokens else []
        )
        yield TableLine(name=key, dtype=dtype, shape=shape, kind=kind, why=", ".join(details))
    places = places_of(dict(numbers) | dict.fromkeys(lists, 0.0), layout.scalars)
    for key, value in numbers.items():
        place = places.get(key, "checked" if "." not in key else "")
        yield TableLine(name=key, dtype=type(value).__name__, shape=(), kind=place, why=str(value))
    for key, values in lists.items():
        place = places.get(key, "") if len(runs) > 1 else ""
        reason = "one number per run" if len(runs) > 1 else "several numbers, but one run"
        yield TableLine(name=key, dtype="float", shape=(len(values),), kind=place, why=reason)
    ignored = dict.fromkeys(layout.ignore, "ignored")
    for key, why in file.unread.items():
        yield TableLine(name=key, dtype="", shape=(), why=ignored.get(key, why))
    omitted = dict(layout.omitted) | ignored
    omitted |= dict.fromkeys(
        (key for key in columns if key not in read_as), "derived from other arrays"
    )
    for key in file.keys:
        if key not in {*read_as, *numbers, *lists} and f"{key}[0]" not in numbers:
            shape = file.shape(key)
            why = omitted.get(key, UNKNOWN if shape else "not a number")
            yield TableLine(name=key, dtype=file.dtype(key), shape=shape, why=why)
