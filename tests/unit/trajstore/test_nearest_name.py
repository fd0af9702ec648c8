from __future__ import annotations

import pytest

from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import resolve_variables, variable


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
