"""One run, assembled from the arrays of a file: steps, tokens, variables, attributes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.importing.file_numbers import attributes_of, scalar_numbers
from trajstore.exchange.importing.file_rows import FileRows, check_size
from trajstore.exchange.importing.import_options import ImportOptions
from trajstore.exchange.importing.imported_file import (
    ImportedRun,
    ImportedVariable,
    reader,
)
from trajstore.exchange.importing.named_arrays import NamedArray
from trajstore.exchange.importing.run_parts import RunPart
from trajstore.exchange.importing.token_tables import (
    TokenArray,
    TokenTable,
    token_arrays,
    token_table,
)
from trajstore.exchange.layouts import Layout
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import TRAJECTORIES, VARIABLES
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
        self.found = tuple(
            one for one in self.part.found
            if not (one.kind.name == "lr" and one.key in self.part.numbers)
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
            held = [one for one in self.found if one.kind.name == kind]
            if held:
                return held[0]
        raise FormatError(
            f"{self.file.path}: run {self.part.label} holds none of {', '.join(TRAJECTORIES)}; "
            "name the array with --map W=NAME"
        )

    def _tokens(self) -> TokenTable:
        """Tokens of the rows; of rows of dead or live tokens, the ids that a mask or list gives."""
        own = token_arrays(self.file, self.found)
        self.arrays = [*own, *self.options.masks]
        held = {one.population for one in self.found if one.kind.dims == VARIABLES["W"].dims}
        if self.layout is not None and self.layout.only and not self._has_all_rows():
            held = {self.layout.only}
        populations = held - {None}
        self.by_population = len(populations) == 2
        if populations and None in held:
            raise FormatError(
                f"{self.file.path}: {self.anchor.key} and others have rows of different tokens; "
                "omit some with --map ignore=NAME"
            )
        if self.by_population:
            self.tokens = sum(len(self._ids(each)) for each in ("dead", "live"))
        elif populations and not any(one.kind == "token" for one in self.arrays):
            (population,) = populations
            name = f"the {population} tokens"
            self.arrays.append(TokenArray(name=name, kind="token", values=self._ids(population)))
        table = token_table(
            self.file.path,
            self.tokens,
            self.arrays,
            self.part.numbers,
            sizes=self._sizes("vocab_size"),
            rows_of=self.anchor.key,
            by_place=self.file.attributes.get("exporter") == "trajstore"
            and any(one.kind == "token" for one in own),
        )
        self.notes += table.notes
        return table

    def _has_all_rows(self) -> bool:
        """True if a mask is as long as the token axis, so that the rows are the vocabulary."""
        return any(one.is_dense and len(one.values) == self.tokens for one in self.arrays)

    def _ids(self, population: str | None) -> Array:
        for each in self.arrays:
            if each.kind in (f"{population}_ids", f"{population}_mask"):
                return each.ids
        raise FormatError(
            f"{self.file.path}: {self.anchor.key} has rows of {population} tokens with unknown "
            "ids; give a file of their ids or masks with --masks"
        )

    def _variables(self, tokens: TokenTable) -> tuple[ImportedVariable, ...]:
        held: dict[str, ImportedVariable] = {}
        for one in self.found:
            if not one.kind.is_variable:
                continue
            variable = self._variable(one, tokens)
            other = held.get(variable.variable)
            if other is not None:  # the rows of the other population
                variable = self._joined(other, variable)
            held[variable.variable] = variable
        for variable in held.values():
            of_token = "token" in VARIABLES[variable.variable].dims
            if of_token and variable.row_shape[0] != self.tokens:
                raise FormatError(
                    f"{self.file.path}: {variable.key} has rows of some tokens only, but other "
                    f"arrays have rows of all; omit it with --map ignore={variable.key}"
                )
        return tuple(held[name] for name in VARIABLES if name in held)

    def _joined(self, one: ImportedVariable, other: ImportedVariable) -> ImportedVariable:
        """Rows of all tokens, from those of dead and those of live tokens."""
        if one.native != other.native or one.rows != other.rows:
            raise FormatError(
                f"{self.file.path}: {one.key} has {one.rows} rows of {one.native.name}, but "
                f"{other.key} has {other.rows} rows of {other.native.name}; omit one with --map "
                f"ignore={other.key}"
            )
        row_shape = (self.tokens, *one.row_shape[1:])
        population = {each.key: each.population for each in self.found}
        parts = [(self._ids(population[each.key]), each.read) for each in (one, other)]

        def read(start: int, stop: int) -> Array:
            whole = np.empty((stop - start, *row_shape), one.native.bits)
            for places, of_some in parts:
                whole[:, places] = of_some(start, stop)
            return whole

        return replace(one, keys=(one.key, other.key), row_shape=row_shape, read=read)

    def _variable(self, one: NamedArray, tokens: TokenTable) -> ImportedVariable:
        dims, single = one.kind.dims, self.rows.single
        shape = (1, *one.shape) if single else one.shape
        outer = self.part.outer if len(shape) > len(dims) else None
        shape = shape[-len(dims) :] if outer is not None else shape
        here, pick = self.tokens, None
        if self.by_population and one.population is not None:
            here = len(self._ids(one.population))
        expected = tuple(
            {"step": self.rows.count, "token": here, "hidden": self.hidden}[dim] for dim in dims
        )
        if dims[1:] == ("token",) and len(shape) == 2 and here != shape[1] == tokens.vocabulary:
            pick, shape = tokens.token, (shape[0], here)
        lacks_first = self.rows.count > 1 and shape == (self.rows.count - 1, *expected[1:])
        if lacks_first:
            self.notes.append(
                f"{one.key} has one row less than {self.anchor.key}: its first row is the second "
                "row of the run"
            )
        elif shape != expected:
            raise FormatError(
                f"{self.file.path}: {one.key} has shape {one.shape}, expected "
                f"{expected[single:]} ({', '.join(dims[single:])}), as {self.anchor.key} has "
                f"shape {self.anchor.shape}"
            )
        native = NATIVE_TYPES.get(one.dtype)  # its type, or None for 16 bits
        if native is None:
            native = NATIVE_TYPES[self.options.bits_of(one.kind.name, one.key) or "bfloat16"]
        return ImportedVariable(
            variable=one.kind.name,
            keys=(one.key,),
            native=native,
            wanted=native,
            rows=shape[0],
            row_shape=tuple(shape[1:]),
            read=reader(self.file, one.key, native, single=single, outer=outer, pick=pick),
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
        names = {held.variable for held in variables}
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
