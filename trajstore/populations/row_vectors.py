"""The rows of one parameter in place of the tokens of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import xarray as xr

from trajstore.errors import InvalidArgument, VariableNotRecorded

T = TypeVar("T", bound=xr.DataArray | xr.Dataset)

_NAMES = {"token": "row", "hidden": "column", "tokens": "rows"}


def row_vectors(ds: xr.Dataset) -> xr.Dataset:
    """Rename the dimensions of a parameter to those of a run; return other Datasets unchanged.

    Parameters
    ----------
    ds : Dataset
        A run, or one parameter from ``ds.traj.parameter``, of dims (step, row, column).

    Returns
    -------
    Dataset
        Of dims (step, token, hidden). ``token`` is the number of the row. The attribute
        ``parameter`` is the name of the parameter.

    Raises
    ------
    InvalidArgument
        If the parameter has no elements.
    """
    if not {"row", "column"} <= set(ds.dims) or {"token", "hidden"} & set(ds.dims):
        return ds
    name = ds.attrs.get("recording", {}).get("parameter", "W")
    if not ds.sizes["row"] * ds.sizes["column"]:
        raise InvalidArgument(f"the parameter {name} has no elements; choose another one")
    found = ds.rename(row="token", column="hidden")
    found.encoding = dict(ds.encoding)
    return found.assign_attrs(parameter=name)


def is_of_parameter(ds: xr.Dataset) -> bool:
    """True for the result of `row_vectors` if the vectors are rows of a parameter."""
    return "parameter" in ds.attrs


def row_words(text: str) -> str:
    """A text about tokens, as one about the rows of a parameter.

    >>> row_words("tokens of token_text, one token")
    'parameter rows of token_text, one parameter row'
    """
    rows = re.sub(r"\btoken(s?)\b(?!=)", r"parameter row\1", text)
    return re.sub(r"\bToken(s?)\b", r"Parameter row\1", rows)


def named_as_rows(result: T, ds: xr.Dataset) -> T:
    """Name tokens in a result of a parameter as rows, and hidden as column; others are returned.

    Parameters
    ----------
    result : DataArray or Dataset
    ds : Dataset
        What it was computed from, after `row_vectors`.
    """
    if not is_of_parameter(ds):
        return result
    known = {*result.dims, *result.coords, *getattr(result, "data_vars", ())}
    renamed: Any = result.rename({old: new for old, new in _NAMES.items() if old in known})
    for one in (renamed, *(renamed[name] for name in getattr(renamed, "data_vars", ()))):
        if "long_name" in one.attrs:
            one.attrs = {**one.attrs, "long_name": row_words(one.attrs["long_name"])}
    return cast(T, renamed)


@contextmanager
def errors_about_rows(ds: xr.Dataset) -> Iterator[None]:
    """Name tokens as rows in the errors of a computation from a parameter."""
    try:
        yield
    except (InvalidArgument, VariableNotRecorded) as error:
        if is_of_parameter(ds):
            raise type(error)(row_words(str(error))) from error
        raise
