"""Errors of missing extras, and which calls need which extra."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from trajstore.errors import InvalidArgument, MissingExtra, did_you_mean, needs_extra
from trajstore.schema import resolve_variables, variable

TESTS = Path(__file__).parents[2]


def test_a_missing_package_names_its_extra_with_a_command_to_paste() -> None:
    with pytest.raises(MissingExtra) as raised, needs_extra("a file", "hdf5", "write .csv"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    sentence = str(pickle.loads(pickle.dumps(raised.value)))
    command = "pip install -c constraints.txt '.[hdf5]'"
    assert sentence == f"a file needs the extra hdf5: {command}; or write .csv"


def test_a_missing_module_of_trajstore_needs_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"trajstore\.nothing"), needs_extra("a", "b"):
        import trajstore.nothing  # noqa: F401


@pytest.mark.parametrize(
    ("typed", "known", "suggestion"),
    [
        ("w", ["W", "grad"], " (did you mean 'W'?)"),
        ("exp-avg", ["exp_avg", "exp_avg_sq"], " (did you mean 'exp_avg'?)"),
        ("thimble7", ["thimble-6", "thimble-7"], " (did you mean 'thimble-7'?)"),
        ("rl", ["name", "lr"], " (did you mean 'lr'?)"),
        ("nothing", ["W", "grad"], ""),
        ("", ["W"], ""),
        ("W", [], ""),
    ],
)
def test_the_nearest_name_is_suggested(typed: str, known: list[str], suggestion: str) -> None:
    assert did_you_mean(typed, known) == suggestion


def test_mistyped_variables_get_a_suggestion() -> None:
    with pytest.raises(InvalidArgument, match="'gard' \\(did you mean 'grad'\\?\\)"):
        variable("gard")
    with pytest.raises(InvalidArgument, match="'weigths' \\(did you mean 'weights'\\?\\)"):
        resolve_variables("weigths")
    with pytest.raises(InvalidArgument, match="got 'loss, lr' without W"):
        resolve_variables(("loss", "lr"))
