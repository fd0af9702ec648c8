"""Runs of a file of named arrays, and the table of its arrays and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.importing.assembled_run import RunReading
from trajstore.exchange.importing.file_numbers import places_of
from trajstore.exchange.importing.import_options import OTHERS, ImportOptions
from trajstore.exchange.importing.imported_file import ImportedFile, ImportedRun
from trajstore.exchange.importing.named_arrays import (
    UNKNOWN,
    NamedArrays,
    TableLine,
    described,
    named_arrays,
)
from trajstore.exchange.importing.run_parts import run_parts
from trajstore.exchange.importing.token_tables import TOKEN_KINDS
from trajstore.exchange.layouts import LAYOUTS, Layout
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import STEP, TRAJECTORIES


def read_arrays(file: ArrayFile, options: ImportOptions, memory: int) -> ImportedFile:
    """Interpret a file. One of its rows must fit into `memory` bytes.

    Raises
    ------
    FormatError
        If it holds neither W nor its changes, or shapes, types, labels or masks contradict.
    InvalidArgument
        If an option does not fit the file, or a row does not fit into the memory.
    """
    own = file.attributes.get("layout")
    named = (one for one in LAYOUTS.values() if one.name == own and _fits(file, one))
    layout = options.layout or next(named, None)
    mapped = dict(options.mapped)
    derived: list[str] = []
    if layout is not None:
        mapped |= {one.key: one.kind for one in layout.columns if one.key in file.keys and one.kind}
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


def _fits(file: ArrayFile, layout: Layout) -> bool:
    return all(key in file.keys for key in layout.required)


def _layout_name(file: ArrayFile, content: NamedArrays) -> str:
    """The layout of a file, or its format."""
    series = {one.key for one in content.arrays if one.kind.is_variable}
    fitting: dict[str, tuple[bool, int]] = {}
    for layout in LAYOUTS.values():
        columns = {column.key: column for column in layout.columns}
        first = next(iter(columns), None)
        is_known = layout.format == file.format and series <= columns.keys()
        is_known = is_known and _fits(file, layout) and layout.steps in (None, *file.keys)
        is_known = is_known and all(text in file.attributes for text in layout.texts)
        if is_known and first in file.keys:
            same = file.dtype(first) == columns[first].file_type
            fitting[layout.name] = (same, len(layout.required))
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
        alike = [one for one in content.arrays if name in (one.key, one.kind.name)]
        if name == OTHERS or any(one.dtype in ("uint16", "int16", "float16") for one in alike):
            continue
        what = f"{alike[0].key} is {alike[0].dtype}" if alike else f"the file holds no {name}"
        raise InvalidArgument(
            f"{file.path}: --bits {name}=… applies to uint16 and float16, but {what}; omit it"
        )


def _table(
    content: NamedArrays, runs: tuple[ImportedRun, ...], options: ImportOptions
) -> Iterator[TableLine]:
    """What all arrays and numbers become."""
    read = {key: held for run in runs for held in run.variables for key in held.keys}
    for one in content.arrays:
        kind, why = one.kind.name, []
        held = read.get(one.key)
        if held is not None:
            why += [f"bits of {held.native.name}"] if one.dtype in ("uint16", "int16") else []
            why += ["before the step of its row"] if held.shift > 0 else []
            why += ["without the first row"] if held.shift < 0 else []
            why += ["first row NaN"] if held.blank else []
        elif one.kind.is_variable:
            kind, why = "", ["one number per run"]
        elif one.kind.name == STEP.name and options.steps not in (None, one.key):
            kind, why = "", ["replaced by --labels"]
        why += [f"run {one.run}"] if one.run is not None else []
        why += [f"runs along {one.shape[0]}"] if one.extra == 1 and held is not None else []
        why += [one.matrix] if one.matrix is not None else []
        why += [f"{one.population} tokens"] if one.population is not None else []
        yield TableLine(
            name=one.key, dtype=one.dtype, shape=one.shape, kind=kind, why=", ".join(why)
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
        if key not in [one.key for one in content.arrays]:
            kind = places.get(key, "") if len(runs) > 1 else ""
            reason = "one number per run" if len(runs) > 1 else "several numbers, but one run"
            yield TableLine(name=key, dtype="float", shape=(len(values),), kind=kind, why=reason)
