"""The runs of a file that is recognised by its arrays, and what each array was taken for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.guessing.array_roles import Recognised, Taken, abridged, recognise
from trajstore.exchange.importing.file_numbers import places_of
from trajstore.exchange.importing.import_options import OTHERS, Overrules
from trajstore.exchange.importing.imported_file import ImportedRun, Understood
from trajstore.exchange.importing.run_parts import run_parts
from trajstore.exchange.importing.run_reading import RunReading
from trajstore.exchange.importing.token_tables import TABLES
from trajstore.exchange.key_names import HDF5_TEXTS
from trajstore.exchange.layouts import LAYOUTS, Layout
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import STEP, TRAJECTORIES

__all__ = ["read_arrays"]


def read_arrays(file: ArrayFile, overrules: Overrules, memory: int) -> Understood:
    """Understand a file, whose rows are to fit into so many bytes of memory.

    Raises
    ------
    FormatError
        If it holds no W and no changes of it, or shapes, types, labels or masks contradict.
    InvalidArgument
        If what the user says does not fit the file, or a row of it not into the memory.
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
    _check_bits(file, recognised, overrules)
    name = layout.name if layout else file.format if own else _layout_name(file, recognised)
    runs = tuple(
        RunReading(file, part, overrules, layout or LAYOUTS.get(name), own=own).run(memory)
        for part in run_parts(file, recognised)
    )
    table = (*_table(recognised, runs, overrules), *recognised.left_out)
    left = [line.name for line in recognised.left_out if line.name not in hidden]
    if recognised.guessed:
        note = f"{recognised.guessed[0]} was taken for W by its shape alone (--map W=NAME)"
        runs = tuple(replace(run, notes=(note, *run.notes)) for run in runs)
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
    if any(recognised.of(role) for role in TRAJECTORIES):
        return
    holds = f"it holds {abridged(file.keys)}"
    tables = [one.key for one in recognised.found if one.role.name in TABLES]
    more = ""
    if tables:
        more = f"; it tells tokens ({', '.join(tables)}), for --masks of another import"
    if file.passed_over:
        more += f"; not read: {abridged(f'{key} ({why})' for key, why in file.passed_over.items())}"
    raise FormatError(
        f"{file.path} holds no W of (step, token, hidden), nor its changes: {holds}{more}; --map "
        "W=NAME says which array it is"
    )


def _check_bits(file: ArrayFile, recognised: Recognised, overrules: Overrules) -> None:
    """Whether what the user says of 16 bits is said of arrays that have them."""
    for name in overrules.bits:
        alike = [one for one in recognised.found if name in (one.key, one.role.name)]
        if name == OTHERS or any(one.dtype in ("uint16", "int16", "float16") for one in alike):
            continue
        what = f"{alike[0].key} is {alike[0].dtype}" if alike else "it holds none"
        raise InvalidArgument(
            f"{file.path}: --bits {name}=… says what uint16 or float16 are, and {what}; leave it "
            "out"
        )


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
        elif one.role.name == STEP.name and overrules.steps not in (None, one.key):
            role, why = "", ["the steps are as you said"]
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
            role = places.get(key, "") if len(runs) > 1 else ""
            told = "one a run" if len(runs) > 1 else "several numbers, and one run"
            yield Taken(name=key, dtype="float", shape=(len(values),), role=role, why=told)
