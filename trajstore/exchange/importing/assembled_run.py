"""One run, assembled from the arrays of a file: steps, tokens, variables, attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.guessing.detect_arrays import DetectedArray, DetectedArrays
from trajstore.exchange.guessing.kind_table import ARRAY_KINDS
from trajstore.exchange.importing.file_numbers import (
    STARTING_STEP,
    attributes_of,
    scalar_numbers,
)
from trajstore.exchange.importing.file_rows import (
    Alignment,
    aligned,
    check_size,
    checked_labels,
    named_steps,
    true_steps,
    unlabeled_steps,
)
from trajstore.exchange.importing.import_options import ImportOptions
from trajstore.exchange.importing.imported_file import (
    ImportedRun,
    ImportedVariable,
    Source,
)
from trajstore.exchange.importing.run_parts import RunPart
from trajstore.exchange.importing.token_tables import (
    TokenArray,
    TokenTable,
    token_arrays,
    token_table,
)
from trajstore.exchange.layouts import Layout
from trajstore.formats.array_file import ArrayFile, values_of
from trajstore.schema import STEP, TRAJECTORIES, VARIABLES
from trajstore.values.native_types import NATIVE_TYPES, NativeType

__all__ = ["RunReading"]

Array = npt.NDArray[Any]


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

    def __init__(
        self,
        file: ArrayFile,
        part: RunPart,
        options: ImportOptions,
        layout: Layout | None,
    ) -> None:
        self.file = file
        self.part = part
        self.options = options
        self.layout = layout
        self.notes: list[str] = []
        self.found = tuple(
            one for one in part.found
            if not (one.kind.name == "lr" and one.key in part.numbers)
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
        self.single = len(anchor.shape) == 2
        shape = anchor.shape[anchor.extra :] if not self.single else (1, *anchor.shape)
        if not all(shape):
            raise FormatError(
                f"{file.path}: {anchor.key} has shape {anchor.shape}, expected (step, token, "
                "hidden) without a length of 0"
            )
        self.rows, self.tokens, self.hidden = shape
        check_size(file.path, anchor.key, shape, anchor.dtype, memory)
        self.steps = self._steps()
        tokens = self._tokens()
        self.resumed = self._is_resumed()
        variables = self._variables(tokens)
        variables, notes = aligned(file.path, variables, self._alignment())
        self.notes += notes
        attributes = self._attributes()
        self._note_what_is_missing(variables)
        return ImportedRun(
            label=self.part.label,
            steps=self.steps,
            token=tokens.token,
            coordinates=tokens.coordinates,
            variables=variables,
            attributes=attributes,
            notes=tuple(self.notes),
        )

    def _anchor(self) -> DetectedArray:
        """The array that defines the shape of the others: W, or its changes."""
        for kind in TRAJECTORIES:
            held = [one for one in self.found if one.kind.name == kind]
            if held:
                return held[0]
        raise FormatError(
            f"{self.file.path}: run {self.part.label} holds none of {', '.join(TRAJECTORIES)}; "
            "name the array with --map W=NAME"
        )

    def _steps(self) -> Array:
        """Steps of the rows."""
        file, first_row = self.file, self.options.first_row
        labels = [one for one in self.found if one.kind.name == STEP.name and one.shape]
        if self.options.steps is not None and self.options.steps not in file.keys:
            return named_steps(self.options.steps, self.rows)
        if self.options.steps in file.keys:
            labels = [one for one in labels if one.key == self.options.steps]
        if labels:
            labeled = {one.key: self._labels(one) for one in labels}
            key, steps = next(iter(labeled.items()))
            for other, values in labeled.items():
                if not np.array_equal(values, steps):
                    raise FormatError(
                        f"{file.path}: {key} and {other} label the rows differently; choose with "
                        f"--labels steps={key}"
                    )
            trusted = file.attributes.get("steps") == "optimizer"
            trusted = trusted or file.format == "folder" or key == self.options.steps
            steps, note = true_steps(steps, name=key, trusted=trusted)
            self.notes += [note] if note else []
            return steps
        start = self._starting_step()
        if self.single:
            step = self._step_number()
            if step is None:
                step = first_row or 0
                self.notes.append(
                    f"{self.anchor.key} is one state without a step number; it was taken as the "
                    f"state after step {step} (--labels steps=N)"
                )
            return np.array([step], np.int64)
        steps, note = unlabeled_steps(self.rows, first=start or first_row or 0)
        if file.attributes.get("steps") != "optimizer":
            self.notes.append(note)
        return steps

    def _labels(self, one: DetectedArray) -> Array:
        """Labels of the rows. Labels of several runs have a first axis of runs."""
        if self.rows not in one.shape:
            raise self._misshapen(one.key, one.shape)
        values = values_of(self.file, one.key)
        if values.ndim == 2 and self.part.outer is not None and len(values) > self.part.outer:
            values = values[self.part.outer]
        if values.shape != (self.rows,):
            raise self._misshapen(one.key, values.shape)
        return checked_labels(self.file.path, one.key, values)

    def _misshapen(self, key: str, shape: tuple[int, ...]) -> FormatError:
        return FormatError(
            f"{self.file.path}: {key} has shape {shape}, expected ({self.rows},): "
            f"{self.anchor.key} has {self.rows} rows"
        )

    def _step_number(self) -> int | None:
        """Step of a single state, from a number in the file."""
        for key, value in self.part.numbers.items():
            name = key.lower().rpartition(".")[2]
            if (
                name in ARRAY_KINDS[STEP.name].names
                and isinstance(value, int)
                and 0 <= value < 1 << 62
            ):
                return value
        return None

    def _starting_step(self) -> int | None:
        for key, value in self.part.numbers.items():
            if key.lower() in STARTING_STEP and isinstance(value, int) and 0 <= value < 1 << 61:
                return value
        return None

    def _is_resumed(self) -> bool:
        """True if the first row is the state at which a training was resumed."""
        start = self._starting_step()
        if start is None or start == 0:
            return False
        if int(self.steps[0]) != start:
            self.notes.append(
                f"by a number in the file, the training was resumed at step {start}, but its first "
                f"row is labeled {self.steps[0]}"
            )
            return False
        return True

    def _tokens(self) -> TokenTable:
        populations = {one.population for one in self.found if one.kind.dims == VARIABLES["W"].dims}
        own = _tables(self.file, self.found)
        arrays = [*own, *self.options.masks]
        self.by_population = {"dead", "live"} <= populations
        tokens = self.tokens
        if populations & {"dead", "live"} and None in populations:
            raise FormatError(
                f"{self.file.path}: {self.anchor.key} and others have rows of different tokens; "
                "omit some with --map ignore=NAME"
            )
        if self.by_population:
            tokens = sum(len(self._ids(arrays, each)) for each in ("dead", "live"))
            self.tokens = tokens
        elif populations & {"dead", "live"} and not any(one.kind == "token" for one in arrays):
            (population,) = populations & {"dead", "live"}
            assert population is not None
            ids = self._ids(arrays, population)
            arrays.append(TokenArray(name=f"the {population} tokens", kind="token", values=ids))
        name = self.anchor.key
        exported = self.file.attributes.get("exporter") == "trajstore"
        by_place = exported and any(one.kind == "token" for one in own)
        table = token_table(
            self.file.path,
            tokens,
            arrays,
            self.part.numbers,
            sizes=self._sizes("vocab_size"),
            rows_of=name,
            by_place=by_place,
        )
        self.notes += table.notes
        return table

    def _ids(self, arrays: Sequence[TokenArray], population: str) -> Array:
        for each in arrays:
            if each.kind == f"{population}_ids":
                return each.values
            if each.kind == f"{population}_mask":
                return np.flatnonzero(each.values)
        raise FormatError(
            f"{self.file.path}: {self.anchor.key} has rows of {population} tokens with unknown "
            "ids; give a file of their ids or masks with --masks"
        )

    def _alignment(self) -> Alignment:
        layout = self.layout
        forced = self.options.layout is not None
        is_shifted = layout is not None and any(
            column.time == "before" for column in layout.columns
        )
        exported = layout is not None and self.file.attributes.get("layout") == layout.name
        return Alignment(
            steps=self.steps,
            single=self.single,
            resumed=self.resumed,
            labeled=any(one.kind.name == STEP.name and one.shape for one in self.found),
            fits_before=is_shifted,
            is_before=is_shifted and (forced or exported),
            forced=self.options.layout if is_shifted and forced else None,
            first_row_is_given=self.options.first_row is not None,
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
            covered = [source.places for source in variable.sources if source.places is not None]
            if (
                self.by_population
                and sum(map(len, covered)) != self.tokens
                and ("token" in VARIABLES[variable.variable].dims)
            ):
                raise FormatError(
                    f"{self.file.path}: {variable.key} has rows of some tokens only, but other "
                    f"arrays have rows of all; omit it with --map ignore={variable.key}"
                )
        return tuple(held[name] for name in VARIABLES if name in held)

    def _joined(self, one: ImportedVariable, other: ImportedVariable) -> ImportedVariable:
        if one.native != other.native or one.rows != other.rows:
            raise FormatError(
                f"{self.file.path}: {one.key} has {one.rows} rows of {one.native.name}, but "
                f"{other.key} has {other.rows} rows of {other.native.name}; omit one with --map "
                f"ignore={other.key}"
            )
        return replace(one, sources=(*one.sources, *other.sources))

    def _variable(self, one: DetectedArray, tokens: TokenTable) -> ImportedVariable:
        dims = one.kind.dims
        shape = one.shape
        if self.single:
            shape = (1, *shape)
        outer = self.part.outer if len(shape) > len(dims) else None
        shape = shape[len(shape) - len(dims) :] if outer is not None else shape
        here = self.tokens
        places = pick = None
        if self.by_population and one.population is not None:
            places = self._ids([*_tables(self.file, self.found), *self.options.masks],
                               one.population)  # fmt: skip
            here = len(places)
        expected = tuple(
            {"step": self.rows, "token": here, "hidden": self.hidden}[dim] for dim in dims
        )
        if (
            len(shape) == 2
            and dims[1:] == ("token",)
            and shape[1] != here
            and (shape[1] == tokens.vocabulary)
        ):
            pick, shape = tokens.token, (shape[0], here)
        lacks_first = self.rows > 1 and shape == (self.rows - 1, *expected[1:])
        if lacks_first:
            self.notes.append(
                f"{one.key} has one row less than {self.anchor.key}: its first row is the second "
                "row of the run"
            )
        elif shape != expected:
            raise FormatError(
                f"{self.file.path}: {one.key} has shape {one.shape}, expected "
                f"{expected[1:] if self.single else expected} "
                f"({', '.join(dims[1:] if self.single else dims)}), as {self.anchor.key} has shape "
                f"{self.anchor.shape}"
            )
        if not all(expected):
            raise FormatError(
                f"{self.file.path}: {one.key} has shape {one.shape}, expected no length of 0"
            )
        native = self._native(one)
        return ImportedVariable(
            file=self.file,
            variable=one.kind.name,
            sources=(Source(key=one.key, outer=outer, places=places, pick=pick),),
            native=native,
            wanted=native,
            rows=shape[0],
            row_shape=(shape[0], self.tokens, *shape[2:])[1 : len(dims)] if "token" in dims
            else tuple(shape[1:]),
            single=self.single,
            shift=-1 if lacks_first else 0,
        )  # fmt: skip

    def _native(self, one: DetectedArray) -> NativeType:
        """Native type of the values of an array."""
        if one.dtype in ("uint16", "int16"):
            return NATIVE_TYPES[self.options.bits_of(one.kind.name, one.key) or "bfloat16"]
        if one.dtype not in NATIVE_TYPES:
            raise FormatError(
                f"{self.file.path}: {one.key} has type {one.dtype}, expected "
                f"{', '.join(NATIVE_TYPES)}, or the 16 bits of one of them"
            )
        return NATIVE_TYPES[one.dtype]

    def _attributes(self) -> dict[str, Any]:
        for key, size in self._sizes("hidden_dim").items():
            if size != self.hidden:
                raise FormatError(
                    f"{self.file.path}: {key} is {size}, but {self.anchor.key} has shape "
                    f"{self.anchor.shape}; omit it with --map ignore={key}"
                )
        numbers = dict(self.part.numbers)
        for key, number in self._sizes("num_steps").items():
            if number == self.rows - 1:  # it counts the rows, of which not every step has one
                numbers[key] = int(self.steps[-1])
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
        if self.layout is not None:
            absent = [
                column.key for column in self.layout.columns if column.key not in self.file.keys
            ]
            if absent:
                self.notes.append(f"the file does not hold {', '.join(absent)}")


def _tables(file: ArrayFile, found: Sequence[DetectedArray]) -> list[TokenArray]:
    """Arrays of a run that describe the tokens."""
    return token_arrays(
        file, DetectedArrays(found=tuple(found), numbers={}, vectors={}, omitted=())
    )
