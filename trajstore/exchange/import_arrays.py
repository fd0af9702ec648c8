"""The runs of a file that is recognised by its arrays: shapes, steps, tokens and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.file_numbers import STARTING_STEP, attributes_of, number_of, places_of
from trajstore.exchange.imported_file import (
    ImportedRun,
    ImportedVariable,
    Source,
    Time,
    Understood,
    checked_texts,
    first_row_is_blank,
    kept_attributes,
)
from trajstore.exchange.key_names import HDF5_TEXTS
from trajstore.exchange.layouts import LAYOUTS, Layout
from trajstore.exchange.learning_rates import completed_rule, scheduled_rates
from trajstore.exchange.recognition import Found, Recognised, Taken, abridged, recognise
from trajstore.exchange.roles import ROLES
from trajstore.exchange.step_labels import named_steps, true_steps, unlabelled_steps
from trajstore.exchange.token_tables import TABLES, TokenTable, Told, token_table, told_tables
from trajstore.formats.array_file import ArrayFile, values_of
from trajstore.schema import STEP, VARIABLES
from trajstore.values.native_types import NATIVE_TYPES, NativeType, is_zero_or_nan

__all__ = ["Overrules", "read_arrays"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Overrules:
    """What the user of an import says, in place of what is recognised or beside it.

    Attributes
    ----------
    layout : str, optional
        One of `trajstore.exchange.layouts.LAYOUTS`, whose keys and alignment the file has.
    mapped : dict of str to str
        Keys, and the roles that they have.
    ignored : tuple of str
        Keys that are left out.
    bits : {'bfloat16', 'float16'}, optional
        What 16 bits are.
    steps : str, optional
        Labels of the rows: a key, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
        Step of the first row, where nothing labels the rows.
    schedule : str, optional
        Of the learning rate.
    masks : tuple of Told
        Tables of tokens of another file.
    """

    layout: str | None = None
    mapped: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    bits: str | None = None
    steps: str | None = None
    first_row: int | None = None
    schedule: str | None = None
    masks: tuple[Told, ...] = ()


def read_arrays(file: ArrayFile, overrules: Overrules) -> Understood:
    """Understand a file.

    Raises
    ------
    FormatError
        If it holds no W and no changes of it, or shapes, types, labels or masks contradict.
    InvalidArgument
        If what the user says does not fit the file.
    """
    layout = _forced(file, overrules)
    mapped = dict(overrules.mapped)
    if layout is not None:
        mapped |= _columns(file, layout)
    if overrules.steps in file.keys:
        mapped[overrules.steps] = STEP.name
    hidden = tuple(key for key in HDF5_TEXTS.values() if key in file.keys)
    recognised = recognise(file, mapped, ignored=(*overrules.ignored, *hidden))
    own = file.format == "hdf5" and HDF5_TEXTS["attributes"] in file.keys
    _check_anchor(file, recognised)
    name = layout.name if layout else _layout_name(file, recognised)
    runs = tuple(
        _Reading(file, part, overrules, layout or LAYOUTS.get(name), own=own).run()
        for part in _parts(file, recognised)
    )
    table = (*_table(recognised, runs, overrules), *recognised.left_out)
    left = [line.name for line in recognised.left_out if line.name not in hidden]
    if left:
        runs = tuple(
            replace(run, notes=(*run.notes, f"left out: {', '.join(left)} (see the table)"))
            for run in runs
        )
    table = tuple(line for line in table if line.name not in hidden)
    return Understood(layout=name, runs=runs, table=table)


def _forced(file: ArrayFile, overrules: Overrules) -> Layout | None:
    """The layout that the user or the file itself names."""
    name = overrules.layout
    if name is None:
        said = file.attributes.get("layout")
        return LAYOUTS[said] if said in LAYOUTS and _fits(file, LAYOUTS[said]) else None
    if name == "hdf5":
        return None
    layout = LAYOUTS[name]
    missing = [key for key in layout.required if key not in file.keys]
    if missing:
        raise FormatError(
            f"{file.path}: layout {name} requires {', '.join(missing)}; it holds "
            f"{abridged(file.keys)}"
        )
    return layout


def _columns(file: ArrayFile, layout: Layout) -> dict[str, str]:
    """Keys of a layout, and their roles."""
    return {
        column.key: "delta" if column.time == "change" else column.variable
        for column in layout.columns
        if column.key in file.keys and not layout.only_dead
    }


def _fits(file: ArrayFile, layout: Layout) -> bool:
    return all(key in file.keys for key in layout.required)


def _layout_name(file: ArrayFile, recognised: Recognised) -> str:
    """The layout that a file is of, or its format."""
    series = {one.key for one in recognised.found if one.role.is_variable}
    fitting: dict[str, tuple[bool, int]] = {}
    for layout in LAYOUTS.values():
        first = layout.columns[0]
        is_known = series <= {column.key for column in layout.columns}
        if layout.format != file.format or not is_known or not _fits(file, layout):
            continue
        if layout.steps in (None, *file.keys) and first.key in file.keys:
            dtype = "uint16" if first.as_bits else first.dtype
            fitting[layout.name] = (file.dtype(first.key) == dtype, len(layout.required))
    return max(fitting, key=fitting.__getitem__) if fitting else file.format


def _check_anchor(file: ArrayFile, recognised: Recognised) -> None:
    if recognised.of("W") or recognised.of("delta"):
        return
    holds = f"it holds {abridged(file.keys)}"
    tables = [one.key for one in recognised.found if one.role.name in TABLES]
    more = ""
    if tables:
        more = f"; it tells tokens ({', '.join(tables)}), for --masks of another import"
    raise FormatError(
        f"{file.path} holds no W of (step, token, hidden), nor its changes: {holds}{more}; --map "
        "W=NAME says which array it is"
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What of a file makes one run.

    Attributes
    ----------
    label : str
    found : tuple of Found
    numbers : dict
    outer : int, optional
        Place along a first axis of runs, of arrays that have one.
    """

    label: str
    found: tuple[Found, ...]
    numbers: dict[str, Any]
    outer: int | None = None


def _parts(file: ArrayFile, recognised: Recognised) -> Iterator[_Part]:
    """What makes each run: numbers in names, a first axis, the matrices of untied models."""
    found = recognised.found
    anchors = [one for one in found if one.role.name in ("W", "delta")]
    numbered = sorted({one.run for one in anchors if one.run is not None})
    lengths = {one.key: one.shape[0] for one in found if one.extra == 1 and one.role.is_variable}
    along = [lengths[one.key] for one in anchors if one.extra == 1]
    if along:
        for key, length in lengths.items():
            if length != along[0]:
                raise FormatError(
                    f"{file.path}: {anchors[0].key} has {along[0]} runs along its first axis, and "
                    f"{key} {length}"
                )
        said = recognised.numbers.get("n_runs")
        if said is not None and said != along[0]:
            raise FormatError(f"{file.path}: n_runs is {said}, and {anchors[0].key} has {along[0]}")
    if numbered and along:
        raise FormatError(f"{file.path}: {anchors[0].key} has both a number and an axis of runs")
    for one in found:
        of_all = one.run is None and one.extra < 1
        if (numbered or along) and one.role.is_variable and of_all and one.role.name != "lr":
            raise FormatError(
                f"{file.path}: {anchors[0].key} is of one of {len(numbered) or along[0]} runs, and "
                f"{one.key} does not say of which; leave it out with --map ignore={one.key}"
            )
    matrices = sorted({one.matrix for one in anchors if one.matrix is not None})
    places: Sequence[tuple[int | None, int | None]] = (
        [(run, None) for run in numbered] if numbered
        else [(None, at) for at in range(along[0])] if along
        else [(None, None)]
    )  # fmt: skip
    for run, outer in places:
        number = run if run is not None else outer
        for matrix in matrices or (None,):
            mine = tuple(
                one for one in found
                if one.run in (None, run) and (one.matrix in (None, matrix) or not matrices)
            )  # fmt: skip
            for one in mine:
                if matrices and one.matrix is None and one.role.dims == VARIABLES["W"].dims:
                    raise FormatError(
                        f"{file.path}: {one.key} does not say whether it is of E or of W, which "
                        "are untied; leave it out with --map ignore=" + one.key
                    )
            numbers = dict(recognised.numbers)
            for key, values in recognised.vectors.items():
                if number is not None and len(values) == len(places):
                    numbers[key] = values[outer if outer is not None else places.index((run, None))]
            used = tuple(one for one in mine if one.key not in numbers or one.role.is_variable)
            labels = [str(each) for each in (number, matrix) if each is not None]
            yield _Part(label=".".join(labels), found=used, numbers=numbers, outer=outer)


class _Reading:
    """One run of a file, being put together."""

    def __init__(
        self,
        file: ArrayFile,
        part: _Part,
        overrules: Overrules,
        layout: Layout | None,
        *,
        own: bool,
    ) -> None:
        self.file = file
        self.part = part
        self.overrules = overrules
        self.layout = layout
        self.own = own
        self.notes: list[str] = []
        self.found = tuple(
            one for one in part.found
            if not (one.role.name == "lr" and one.key in part.numbers)
        )  # fmt: skip
        self.anchor = self._anchor()

    def run(self) -> ImportedRun:
        anchor, file = self.anchor, self.file
        self.single = len(anchor.shape) == 2
        shape = anchor.shape[anchor.extra :] if not self.single else (1, *anchor.shape)
        if not all(shape):
            raise FormatError(
                f"{file.path}: {anchor.key} has shape {anchor.shape}, expected (step, token, "
                "hidden), none of them 0"
            )
        self.rows, self.tokens, self.hidden = shape
        self.steps = self._steps()
        tokens = self._tokens()
        self.resumed = self._is_resumed()
        variables = self._variables(tokens)
        variables = self._aligned(variables)
        variables = tuple(self._with_first_row(held) for held in variables)
        attributes = self._attributes(variables)
        if self.overrules.schedule is not None:
            variables, attributes = self._with_rates(variables, attributes)
        coordinates: dict[str, Any] = dict(tokens.coordinates)
        key = HDF5_TEXTS["token_text"]
        if self.own and key in file.keys:
            text = file.read(key).tobytes().decode(errors="surrogateescape")
            coordinates["token_text"] = checked_texts(file, "token_text", text, len(tokens.token))
        self._say_what_is_missing(variables)
        return ImportedRun(
            label=self.part.label,
            steps=self.steps,
            token=tokens.token,
            coordinates=coordinates,
            variables=variables,
            attributes=attributes,
            notes=tuple(self.notes),
        )

    def _anchor(self) -> Found:
        """The array whose shape the others must have: W, or its changes."""
        for role in ("W", "delta"):
            held = [one for one in self.found if one.role.name == role]
            if held:
                return held[0]
        raise FormatError(f"{self.file.path}: run {self.part.label} holds no W, nor its changes")

    def _steps(self) -> Array:
        """Steps of the rows."""
        file, first_row = self.file, self.overrules.first_row
        labels = [one for one in self.found if one.role.name == STEP.name and one.shape]
        if self.overrules.steps is not None and self.overrules.steps not in file.keys:
            return named_steps(self.overrules.steps, self.rows)
        if self.overrules.steps in file.keys:
            labels = [one for one in labels if one.key == self.overrules.steps]
        if labels:
            told = {one.key: self._labels(one) for one in labels}
            key, steps = next(iter(told.items()))
            for other, values in told.items():
                if not np.array_equal(values, steps):
                    raise FormatError(
                        f"{file.path}: {key} and {other} label the rows differently; --labels "
                        f"steps={key} says which to take"
                    )
            trusted = self.own or file.attributes.get("steps") == "optimizer"
            steps, note = true_steps(steps, trusted=trusted or file.format == "folder")
            self.notes += [note] if note else []
            return steps
        start = self._starting_step()
        if self.single:
            step = self._step_number()
            if step is None:
                step = first_row or 0
                self.notes.append(
                    f"{self.anchor.key} is one state and the file names no step; it was taken as "
                    f"that of step {step} (--labels steps=N)"
                )
            return np.array([step], np.int64)
        steps, note = unlabelled_steps(self.rows, first=start or first_row or 0)
        if file.attributes.get("steps") != "optimizer":
            self.notes.append(note)
        return steps

    def _labels(self, one: Found) -> Array:
        """Labels of the rows; those of all runs have an axis of runs."""
        values = values_of(self.file, one.key)
        if values.ndim == 2 and self.part.outer is not None and len(values) > self.part.outer:
            values = values[self.part.outer]
        if values.shape != (self.rows,):
            raise FormatError(
                f"{self.file.path}: {one.key} has shape {values.shape}, and {self.anchor.key} has "
                f"{self.rows} rows, expected ({self.rows},)"
            )
        if (values.astype(object) >= 1 << 62).any():
            raise FormatError(f"{self.file.path}: {one.key} must be step numbers that increase")
        return values.astype(np.int64)

    def _step_number(self) -> int | None:
        """Step of a single state, of a number beside it."""
        for key, value in self.part.numbers.items():
            name = key.lower().rpartition(".")[2]
            if name in ROLES[STEP.name].names and isinstance(value, int) and 0 <= value < 1 << 62:
                return value
        return None

    def _starting_step(self) -> int | None:
        for key, value in self.part.numbers.items():
            if key.lower() in STARTING_STEP and isinstance(value, int) and 0 <= value < 1 << 61:
                return value
        return None

    def _is_resumed(self) -> bool:
        """Whether the first row is the state that a training went on from."""
        start = self._starting_step()
        if start is None or start == 0:
            return False
        if int(self.steps[0]) != start:
            self.notes.append(
                f"the file says that it was resumed at step {start}, and its first row is labelled "
                f"{self.steps[0]}"
            )
            return False
        return True

    def _tokens(self) -> TokenTable:
        populations = {one.population for one in self.found if one.role.dims == VARIABLES["W"].dims}
        own = recognise_tables(self.file, self.found)
        told = [*own, *self.overrules.masks]
        self.by_population = {"dead", "live"} <= populations
        tokens = self.tokens
        if populations & {"dead", "live"} and None in populations:
            raise FormatError(
                f"{self.file.path}: {self.anchor.key} and others have rows of different tokens; "
                "leave some out with --map ignore=NAME"
            )
        if self.by_population:
            tokens = sum(len(self._ids(told, each)) for each in ("dead", "live"))
            self.tokens = tokens
        elif populations & {"dead", "live"} and not any(one.role == "token" for one in told):
            (population,) = populations & {"dead", "live"}
            assert population is not None
            ids = self._ids(told, population)
            told.append(Told(name=f"the {population} tokens", role="token", values=ids))
        name = self.anchor.key
        exported = self.own or self.file.attributes.get("exporter") == "trajstore"
        by_place = exported and any(one.role == "token" for one in own)
        table = token_table(
            self.file.path, tokens, told, self.part.numbers, rows_of=name, by_place=by_place
        )
        if not self.own:
            self.notes += table.notes
        return table

    def _ids(self, told: Sequence[Told], population: str) -> Array:
        for each in told:
            if each.role == f"{population}_ids":
                return each.values
            if each.role == f"{population}_mask":
                return np.flatnonzero(each.values)
        raise FormatError(
            f"{self.file.path}: {self.anchor.key} has rows of the {population} tokens, and nothing "
            f"tells which they are; give a file that does with --masks"
        )

    def _variables(self, tokens: TokenTable) -> tuple[ImportedVariable, ...]:
        held: dict[str, ImportedVariable] = {}
        for one in self.found:
            if not one.role.is_variable:
                continue
            variable = self._variable(one, tokens)
            other = held.get(variable.variable)
            if other is not None:  # of the other population
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
                    f"{self.file.path}: {variable.key} has rows of some tokens only, other arrays "
                    "of all; leave it out with --map ignore=" + variable.key
                )
        return tuple(held[name] for name in VARIABLES if name in held)

    def _joined(self, one: ImportedVariable, other: ImportedVariable) -> ImportedVariable:
        if one.native != other.native or one.rows != other.rows:
            raise FormatError(
                f"{self.file.path}: {one.key} and {other.key} differ in type or in rows"
            )
        return replace(one, sources=(*one.sources, *other.sources))

    def _variable(self, one: Found, tokens: TokenTable) -> ImportedVariable:
        dims = one.role.dims
        shape = one.shape
        if self.single:
            shape = (1, *shape)
        outer = self.part.outer if len(shape) > len(dims) else None
        shape = shape[len(shape) - len(dims) :] if outer is not None else shape
        here = self.tokens
        places = pick = None
        if self.by_population and one.population is not None:
            places = self._ids([*recognise_tables(self.file, self.found), *self.overrules.masks],
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
        missing = len(shape) == len(dims) and shape[0] == self.rows - 1 and self.rows > 1
        if not self.single and missing and shape[1:] == expected[1:]:
            self.notes.append(
                f"{one.key} has one row less than {self.anchor.key}: its first is the second of "
                "the run"
            )
        elif shape != expected:
            raise FormatError(
                f"{self.file.path}: {one.key} has shape {one.shape}, and {self.anchor.key} "
                f"{self.anchor.shape}, expected {expected[1:] if self.single else expected} "
                f"({', '.join(dims[1:] if self.single else dims)})"
            )
        else:
            missing = False
        if not all(expected):
            raise FormatError(f"{self.file.path}: {one.key} has shape {one.shape}, holding nothing")
        native = self._native(one)
        return ImportedVariable(
            file=self.file,
            variable=one.role.name,
            sources=(Source(key=one.key, outer=outer, places=places, pick=pick),),
            native=native,
            wanted=native,
            rows=shape[0],
            row_shape=(shape[0], self.tokens, *shape[2:])[1 : len(dims)] if "token" in dims
            else tuple(shape[1:]),
            single=self.single,
            missing=missing,
        )  # fmt: skip

    def _native(self, one: Found) -> NativeType:
        """Type as which the values of an array are read."""
        if one.dtype in ("uint16", "int16"):
            return NATIVE_TYPES[self.overrules.bits or "bfloat16"]
        if one.dtype not in NATIVE_TYPES:
            raise FormatError(
                f"{self.file.path}: {one.key} is of type {one.dtype}, expected "
                f"{', '.join(NATIVE_TYPES)}, or 16 bits of one of them"
            )
        return NATIVE_TYPES[one.dtype]

    def _aligned(self, variables: tuple[ImportedVariable, ...]) -> tuple[ImportedVariable, ...]:
        """The variables, with those that are before the step of their row marked so."""
        state = ("W", "exp_avg", "exp_avg_sq")
        if self.own or self.single or not self._is_before(variables):
            return variables
        for held in variables:
            if held.variable in state and (np.diff(self.steps) != 1).any():
                raise FormatError(
                    f"{self.file.path}: {held.key} is that before the step of its row, so its "
                    "steps must follow one another; take the run that it was exported from"
                )
        time: Time = "before"
        return tuple(
            replace(held, time=time) if held.variable in state else held for held in variables
        )

    def _is_before(self, variables: tuple[ImportedVariable, ...]) -> bool:
        """Whether W and the moments are those before the step of their row.

        Then rows 0 and 1 of each are the same, both before step 1; and the moments know nothing of
        the gradient of row 1. A layout says it too, where there are no moments to tell.
        """
        said = self.layout is not None and any(c.time == "before" for c in self.layout.columns)
        forced = said and self.overrules.layout is not None
        if self.overrules.first_row is not None and not forced:
            return False
        held = {each.variable: each for each in variables}
        states = [held[name] for name in ("W", "exp_avg", "exp_avg_sq") if name in held]
        if "W" not in held or self.steps[0] != 0 or self.rows < 2:
            return said and "W" in held and "grad" in held
        same = [np.array_equal(each.read(0, 1), each.read(1, 2)) for each in states]
        if forced and not all(same):
            wrong = states[same.index(False)]
            raise FormatError(
                f"{self.file.path}: {wrong.key} differs between rows 0 and 1, but in layout "
                f"{self.overrules.layout} both come before step 1"
            )
        if not all(same) or "grad" not in held or held["grad"].missing:
            return False
        if said:
            return True
        labelled = any(one.role.name == STEP.name and one.shape for one in self.found)
        gradient = held["grad"]
        moved = not is_zero_or_nan(gradient.read(1, 2), gradient.native).all()
        return not labelled and len(states) > 1 and moved and first_row_is_blank(gradient)

    def _with_first_row(self, held: ImportedVariable) -> ImportedVariable:
        """The variable, its first row taken as NaN where no step had been taken yet."""
        if self.own or held.missing or held.time == "before":
            return held
        if VARIABLES[held.variable].row0 != "nan" or (self.steps[0] != 0 and not self.resumed):
            return held
        if first_row_is_blank(held):
            if self.resumed and held.variable == "grad":
                self.notes.append(
                    f"resumed at step {self.steps[0]}: what its first step made is not in the "
                    "file, and NaN in the run"
                )
            return replace(held, blank=True)
        if self.resumed:
            return held
        if held.variable == "logits":
            self.notes.append(
                f"{held.key} of row 0 are of a forward pass that no step made; they were left out"
            )
            return replace(held, blank=True)
        if held.variable == "hidden_mean":
            self.notes.append(f"{held.key} of row 0 is of a forward pass that no step made")
            return held
        raise FormatError(
            f"{self.file.path}: {held.key} has values in the row of step 0, where no step had been "
            "taken; a run holds in each row the gradient, logits and loss of its step, and the "
            "state after it. If the first row is that after step 1, say --first-row 1; or leave it "
            f"out with --map ignore={held.key}"
        )

    def _attributes(self, variables: tuple[ImportedVariable, ...]) -> dict[str, Any]:
        if self.own:
            key = HDF5_TEXTS["attributes"]
            if self.file.dtype(key) != "uint8" or len(self.file.shape(key)) != 1:
                raise FormatError(f"{self.file.path}: {key} is no text")
            try:
                text = self.file.read(key).tobytes().decode()
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"{self.file.path}: its attributes cannot be read ({error})"
                ) from None
            return kept_attributes(self.file, text)
        for key, axis in (("vocab_size", 0), ("hidden_dim", 1)):
            said = self.part.numbers.get(key)
            have = (self.tokens, self.hidden)[axis]
            if isinstance(said, int) and (said < have or (axis and said != have)):
                raise FormatError(
                    f"{self.file.path}: {key} is {said}, and {self.anchor.key} has shape "
                    f"{self.anchor.shape}; leave it out with --map ignore={key}"
                )
        return attributes_of(self.file.path, self.part.numbers, self.overrules.mapped)

    def _with_rates(
        self, variables: tuple[ImportedVariable, ...], attributes: dict[str, Any]
    ) -> tuple[tuple[ImportedVariable, ...], dict[str, Any]]:
        """The variables with `lr`, and the optimizer's rule as far as it is told."""
        schedule = self.overrules.schedule or ""
        if any(held.variable == "lr" for held in variables):
            raise InvalidArgument(f"{self.file.path} holds the learning rate of each step itself")
        peak = float(
            number_of(self.file.path, self.part.numbers, "learning_rate", self.overrules.mapped)
        )
        rates = scheduled_rates(schedule, peak, self.steps)
        moments = [held for held in variables if held.variable.startswith("exp_avg")]
        moved = any(
            not is_zero_or_nan(held.read(at, at + 1), held.native).all()
            for held in moments
            for at in {min(1, held.rows - 1), held.rows - 1}
        )
        rule, note = completed_rule(attributes.get("optimizer", {}), has_moments=moved)
        self.notes += [f"lr is given: {schedule} from learning_rate {peak}", note]
        given = {"lr": {"schedule": schedule, "learning_rate": peak}, "optimizer": note}
        double = NATIVE_TYPES["float64"]
        held = ImportedVariable(
            variable="lr",
            native=double,
            wanted=double,
            rows=len(rates),
            row_shape=(),
            given=rates.view(double.bits),
        )
        order = [*variables, held]
        made = tuple(each for name in VARIABLES for each in order if each.variable == name)
        return made, attributes | {"optimizer": rule, "imported": {"given": given}}

    def _say_what_is_missing(self, variables: tuple[ImportedVariable, ...]) -> None:
        names = {held.variable for held in variables}
        if self.own:
            return
        if "W" not in names:
            self.notes.append(
                f"{self.anchor.key} became delta; the file holds no initial W, hence no W"
            )
        if self.layout is not None:
            absent = [
                column.key for column in self.layout.columns if column.key not in self.file.keys
            ]
            if absent:
                self.notes.append(f"the file does not hold {', '.join(absent)}")


def recognise_tables(file: ArrayFile, found: Sequence[Found]) -> list[Told]:
    """Tables of tokens among the arrays of a run."""
    return told_tables(file, Recognised(found=tuple(found), numbers={}, vectors={}, left_out=()))


def _table(
    recognised: Recognised, runs: tuple[ImportedRun, ...], overrules: Overrules
) -> Iterator[Taken]:
    """What each array and each number was taken for."""
    read = {source.key: held for run in runs for held in run.variables for source in held.sources}
    for one in recognised.found:
        role, why = one.role.name, []
        held = read.get(one.key)
        if held is not None:
            why += [f"bits of {held.native.name}"] if one.dtype in ("uint16", "int16") else []
            why += ["before the step of its row"] if held.time == "before" else []
            why += ["without the first row"] if held.missing else []
            why += ["first row NaN"] if held.blank else []
        elif one.role.is_variable:
            role, why = "", ["a number of each run"]
        why += [f"run {one.run}"] if one.run is not None else []
        why += [f"runs along {one.shape[0]}"] if one.extra == 1 and held is not None else []
        why += [one.matrix] if one.matrix is not None else []
        why += [f"{one.population} tokens"] if one.population is not None else []
        yield Taken(name=one.key, dtype=one.dtype, shape=one.shape, role=role, why=", ".join(why))
    numbers = dict(recognised.numbers)
    places = places_of(numbers | dict.fromkeys(recognised.vectors, 0.0), overrules.mapped)
    for key, value in numbers.items():
        yield Taken(
            name=key,
            dtype=type(value).__name__,
            shape=(),
            role=places.get(key, "checked" if "." not in key else ""),
            why=str(value),
        )
    for key, values in recognised.vectors.items():
        if key not in [one.key for one in recognised.found]:
            shape = (len(values),)
            yield Taken(
                name=key, dtype="float", shape=shape, role=places.get(key, ""), why="one a run"
            )
