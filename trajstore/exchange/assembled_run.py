"""Runs assembled from named arrays: steps, tokens, variables, attributes.

`RunReading` assembles one run, `read_arrays` all runs of a file. The table lists what each array
and number becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.file_rows import FileRows, check_size
from trajstore.exchange.imported_file import (
    OTHERS,
    ImportedFile,
    ImportedRun,
    ImportedVariable,
    ImportOptions,
    RunPart,
    reader,
    run_parts,
)
from trajstore.exchange.layouts import LAYOUTS, Layout
from trajstore.exchange.named_arrays import (
    UNKNOWN,
    NamedArray,
    NamedArrays,
    TableLine,
    described,
    named_arrays,
)
from trajstore.exchange.token_tables import (
    TOKEN_KINDS,
    TokenArray,
    TokenTable,
    token_arrays,
    token_table,
)
from trajstore.exchange.usual_names import attributes_of, places_of, scalar_numbers
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import STEP, TRAJECTORIES, VARIABLES
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]


@dataclass(eq=False)
class RunReading:
    """Assembly of one run from a file.

    Parameters
    ----------
    file : ArrayFile
    part : RunPart
    options : ImportOptions
    layout : Layout, optional
        Layout of the file.
    """

    file: ArrayFile
    part: RunPart
    options: ImportOptions
    layout: Layout | None

    def __post_init__(self) -> None:
        self.named = tuple(
            array for array in self.part.arrays
            if not (array.kind.name == "lr" and array.key in self.part.numbers)
        )  # fmt: skip
        self.anchor = self._anchor()

    def run(self, memory: int) -> ImportedRun:
        """Assemble the run. At most `memory` bytes of values are read at once.

        Raises
        ------
        FormatError
            If arrays contradict each other, or have wrong shapes or types.
        InvalidArgument
            If an option does not fit them, or a row does not fit into the memory.
        """
        anchor, file = self.anchor, self.file
        shape = anchor.shape[anchor.extra :] if len(anchor.shape) > 2 else (1, *anchor.shape)
        if not all(shape):
            raise FormatError(
                f"{file.path}: {anchor.key} has shape {anchor.shape}, expected (step, token, "
                "hidden) without a length of 0"
            )
        _, self.tokens, self.hidden = shape
        check_size(file.path, anchor.key, shape, anchor.dtype, memory)
        self.rows = FileRows(file, self.part, self.options, self.layout, anchor)
        self.notes = self.rows.notes
        tokens = self._tokens()
        variables = self.rows.aligned(self._variables(tokens))
        attributes = self._attributes()
        self._note_what_is_missing(variables)
        return ImportedRun(
            label=self.part.label,
            steps=self.rows.steps,
            token=tokens.token,
            coordinates=tokens.coordinates,
            variables=variables,
            attributes=attributes,
            notes=tuple(self.notes),
        )

    def _anchor(self) -> NamedArray:
        """The array that defines the shape of the others: W, or its changes."""
        for kind in TRAJECTORIES:
            arrays = [array for array in self.named if array.kind.name == kind]
            if arrays:
                return arrays[0]
        raise FormatError(
            f"{self.file.path}: run {self.part.label} holds none of {', '.join(TRAJECTORIES)}; "
            "name the array with --map W=NAME"
        )

    def _tokens(self) -> TokenTable:
        """Tokens of the rows; of rows of dead or live tokens, the ids that a mask or list gives."""
        of_file = token_arrays(self.file, self.named)
        self.token_arrays = [*of_file, *self.options.masks]
        labeled = {
            array.population for array in self.named if array.kind.dims == VARIABLES["W"].dims
        }
        if self.layout is not None and self.layout.only and not self._has_all_rows():
            labeled = {self.layout.only}
        populations = labeled - {None}
        self.by_population = len(populations) == 2
        if populations and None in labeled:
            raise FormatError(
                f"{self.file.path}: {self.anchor.key} and others have rows of different tokens; "
                "omit some with --map ignore=NAME"
            )
        if self.by_population:
            self.tokens = sum(len(self._ids(each)) for each in ("dead", "live"))
        elif populations and not any(array.kind == "token" for array in self.token_arrays):
            (population,) = populations
            name = f"the {population} tokens"
            self.token_arrays.append(
                TokenArray(name=name, kind="token", values=self._ids(population))
            )
        table = token_table(
            self.file.path,
            self.tokens,
            self.token_arrays,
            self.part.numbers,
            sizes=self._sizes("vocab_size"),
            rows_of=self.anchor.key,
            by_place=self.file.attributes.get("exporter") == "trajstore"
            and any(array.kind == "token" for array in of_file),
        )
        self.notes += table.notes
        return table

    def _has_all_rows(self) -> bool:
        """True if a mask is as long as the token axis, so that the rows are the vocabulary."""
        return any(
            table.is_dense and len(table.values) == self.tokens for table in self.token_arrays
        )

    def _ids(self, population: str | None) -> Array:
        for each in self.token_arrays:
            if each.kind in (f"{population}_ids", f"{population}_mask"):
                return each.ids
        raise FormatError(
            f"{self.file.path}: {self.anchor.key} has rows of {population} tokens with unknown "
            "ids; give a file of their ids or masks with --masks"
        )

    def _variables(self, tokens: TokenTable) -> tuple[ImportedVariable, ...]:
        variables: dict[str, ImportedVariable] = {}
        for array in self.named:
            if not array.kind.is_variable:
                continue
            variable = self._variable(array, tokens)
            other = variables.get(variable.variable)
            if other is not None:  # the rows of the other population
                variable = self._joined(other, variable)
            variables[variable.variable] = variable
        for variable in variables.values():
            of_token = "token" in VARIABLES[variable.variable].dims
            if of_token and variable.row_shape[0] != self.tokens:
                raise FormatError(
                    f"{self.file.path}: {variable.key} has rows of some tokens only, but other "
                    f"arrays have rows of all; omit it with --map ignore={variable.key}"
                )
        return tuple(variables[name] for name in VARIABLES if name in variables)

    def _joined(self, first: ImportedVariable, second: ImportedVariable) -> ImportedVariable:
        """Rows of all tokens, from those of dead and those of live tokens."""
        if first.native != second.native or first.rows != second.rows:
            raise FormatError(
                f"{self.file.path}: {first.key} has {first.rows} rows of {first.native.name}, but "
                f"{second.key} has {second.rows} rows of {second.native.name}; omit one with --map "
                f"ignore={second.key}"
            )
        row_shape = (self.tokens, *first.row_shape[1:])
        population = {each.key: each.population for each in self.named}
        parts = [(self._ids(population[each.key]), each.read) for each in (first, second)]

        def read(start: int, stop: int) -> Array:
            whole = np.empty((stop - start, *row_shape), first.native.bits)
            for places, of_some in parts:
                whole[:, places] = of_some(start, stop)
            return whole

        return replace(first, keys=(first.key, second.key), row_shape=row_shape, read=read)

    def _variable(self, array: NamedArray, tokens: TokenTable) -> ImportedVariable:
        dims, single = array.kind.dims, self.rows.single
        shape = (1, *array.shape) if single else array.shape
        outer = self.part.outer if len(shape) > len(dims) else None
        shape = shape[-len(dims) :] if outer is not None else shape
        here, pick = self.tokens, None
        if self.by_population and array.population is not None:
            here = len(self._ids(array.population))
        expected = tuple(
            {"step": self.rows.count, "token": here, "hidden": self.hidden}[dim] for dim in dims
        )
        if dims[1:] == ("token",) and len(shape) == 2 and here != shape[1] == tokens.vocabulary:
            pick, shape = tokens.token, (shape[0], here)
        lacks_first = self.rows.count > 1 and shape == (self.rows.count - 1, *expected[1:])
        if lacks_first:
            self.notes.append(
                f"{array.key} has one row less than {self.anchor.key}: its first row is the second "
                "row of the run"
            )
        elif shape != expected:
            raise FormatError(
                f"{self.file.path}: {array.key} has shape {array.shape}, expected "
                f"{expected[single:]} ({', '.join(dims[single:])}), as {self.anchor.key} has "
                f"shape {self.anchor.shape}"
            )
        native = NATIVE_TYPES.get(array.dtype)  # its type, or None for 16 bits
        if native is None:
            native = NATIVE_TYPES[self.options.bits_of(array.kind.name, array.key) or "bfloat16"]
        return ImportedVariable(
            variable=array.kind.name,
            keys=(array.key,),
            native=native,
            wanted=native,
            rows=shape[0],
            row_shape=tuple(shape[1:]),
            read=reader(self.file, array.key, native, single=single, outer=outer, pick=pick),
            shift=-1 if lacks_first else 0,
        )

    def _attributes(self) -> dict[str, Any]:
        for key, size in self._sizes("hidden_dim").items():
            if size != self.hidden:
                raise FormatError(
                    f"{self.file.path}: {key} is {size}, but {self.anchor.key} has shape "
                    f"{self.anchor.shape}; omit it with --map ignore={key}"
                )
        numbers = dict(self.part.numbers)
        for key, number in self._sizes("num_steps").items():
            if number == self.rows.count - 1:  # it counts the rows, of which not every step has one
                numbers[key] = int(self.rows.steps[-1])
        return attributes_of(self.file.path, numbers, self.options.mapped)

    def _sizes(self, name: str) -> dict[str, int]:
        """Numbers that are a given size of the table of scalars, by their keys."""
        numbers = scalar_numbers(self.part.numbers, name, self.options.mapped)
        return {key: size for key, size in numbers.items() if isinstance(size, int)}

    def _note_what_is_missing(self, variables: tuple[ImportedVariable, ...]) -> None:
        names = {variable.variable for variable in variables}
        if self.anchor.kind.name == "cells":
            self.notes.append("the file holds cells (W rounded to bfloat16), but no W")
        elif "W" not in names:
            key = self.anchor.key
            self.notes.append(
                "the file holds delta, but no initial W, hence no W" if key == "delta"
                else f"{key} became delta; the file holds no initial W, hence no W"
            )  # fmt: skip
        columns = () if self.layout is None else self.layout.columns
        absent = [column.key for column in columns if column.key not in self.file.keys]
        if absent:
            self.notes.append(f"the file does not hold {', '.join(absent)}")


def read_arrays(file: ArrayFile, options: ImportOptions, memory: int) -> ImportedFile:
    """Interpret a file. One of its rows must fit into `memory` bytes.

    Raises
    ------
    FormatError
        If it holds neither W nor its changes, or shapes, types, labels or masks contradict.
    InvalidArgument
        If an option does not fit the file, or a row does not fit into the memory.
    """
    recorded = file.attributes.get("layout")
    named = (
        known for known in LAYOUTS.values() if known.name == recorded and _has_required(file, known)
    )
    layout = options.layout or next(named, None)
    mapped = dict(options.mapped)
    derived: list[str] = []
    if layout is not None:
        mapped |= {
            column.key: column.kind
            for column in layout.columns
            if column.key in file.keys and column.kind
        }
        derived = [column.key for column in layout.columns if column.kind is None]
    if options.steps in file.keys:
        mapped[options.steps] = STEP.name
    content = named_arrays(file, mapped, ignored=options.ignored, derived=derived)
    _check_anchor(file, content)
    _check_bits(file, content, options)
    name = layout.name if layout else _layout_name(file, content)
    runs = tuple(
        RunReading(file, part, options, layout or LAYOUTS.get(name)).run(memory)
        for part in run_parts(file, content)
    )
    table = (*_table(content, runs, options), *content.omitted)
    left = ", ".join(line.name for line in content.omitted)
    hint = "; --map KIND=NAME reads one" * any(line.why == UNKNOWN for line in content.omitted)
    omitted = [f"omitted: {left} (see the table{hint})"] if left else []
    runs = tuple(replace(run, notes=(*run.notes, *omitted)) for run in runs)
    return ImportedFile(layout=name, runs=runs, table=table)


def _has_required(file: ArrayFile, layout: Layout) -> bool:
    return all(key in file.keys for key in layout.required)


def _layout_name(file: ArrayFile, content: NamedArrays) -> str:
    """The layout of a file, or its format."""
    series = {array.key for array in content.arrays if array.kind.is_variable}
    fitting: dict[str, tuple[int, int]] = {}
    for layout in LAYOUTS.values():
        columns = {column.key: column for column in layout.columns}
        is_known = layout.format == file.format and series <= columns.keys()
        is_known = is_known and _has_required(file, layout) and layout.steps in (None, *file.keys)
        is_known = is_known and all(text in file.attributes for text in layout.texts)
        if is_known and columns:
            held = [key for key in columns if key in file.keys]
            alike = sum(file.dtype(key) == columns[key].file_type for key in held)
            fitting[layout.name] = (alike, len(layout.required))
    return max(fitting, key=fitting.__getitem__) if fitting else file.format


def _check_anchor(file: ArrayFile, content: NamedArrays) -> None:
    if any(array.kind.name in TRAJECTORIES for array in content.arrays):
        return
    tables = [array.key for array in content.arrays if array.kind.name in TOKEN_KINDS]
    more = ""
    if tables:
        more = f"; its labels of tokens ({', '.join(tables)}) can be the --masks of another import"
    raise FormatError(
        f"{file.path} holds no array with a usual name of W (step, token, hidden) or of its "
        f"changes{more}. It holds:\n{described(file)}"
    )


def _check_bits(file: ArrayFile, content: NamedArrays, options: ImportOptions) -> None:
    """Refuse `bits` for arrays whose type is not one of 16 bits."""
    for name in options.bits:
        alike = [array for array in content.arrays if name in (array.key, array.kind.name)]
        if name == OTHERS or any(array.dtype in ("uint16", "int16", "float16") for array in alike):
            continue
        what = f"{alike[0].key} is {alike[0].dtype}" if alike else f"the file holds no {name}"
        raise InvalidArgument(
            f"{file.path}: --bits {name}=… applies to uint16 and float16, but {what}; omit it"
        )


def _table(
    content: NamedArrays, runs: tuple[ImportedRun, ...], options: ImportOptions
) -> Iterator[TableLine]:
    """What all arrays and numbers become."""
    read = {key: variable for run in runs for variable in run.variables for key in variable.keys}
    for array in content.arrays:
        kind, why = array.kind.name, []
        variable = read.get(array.key)
        if variable is not None:
            why += [f"bits of {variable.native.name}"] if array.dtype in ("uint16", "int16") else []
            why += ["before the step of its row"] if variable.shift > 0 else []
            why += ["without the first row"] if variable.shift < 0 else []
            why += ["first row NaN"] if variable.blank else []
        elif array.kind.is_variable:
            kind, why = "", ["one number per run"]
        elif array.kind.name == STEP.name and options.steps not in (None, array.key):
            kind, why = "", ["replaced by --labels"]
        why += [f"run {array.run}"] if array.run is not None else []
        why += [f"runs along {array.shape[0]}"] if array.extra == 1 and variable is not None else []
        why += [array.matrix] if array.matrix is not None else []
        why += [f"{array.population} tokens"] if array.population is not None else []
        yield TableLine(
            name=array.key, dtype=array.dtype, shape=array.shape, kind=kind, why=", ".join(why)
        )
    numbers = dict(content.numbers)
    places = places_of(numbers | dict.fromkeys(content.vectors, 0.0), options.mapped)
    for key, value in numbers.items():
        yield TableLine(
            name=key,
            dtype=type(value).__name__,
            shape=(),
            kind=places.get(key, "checked" if "." not in key else ""),
            why=str(value),
        )
    for key, values in content.vectors.items():
        if key not in [array.key for array in content.arrays]:
            kind = places.get(key, "") if len(runs) > 1 else ""
            reason = "one number per run" if len(runs) > 1 else "several numbers, but one run"
            yield TableLine(name=key, dtype="float", shape=(len(values),), kind=kind, why=reason)
