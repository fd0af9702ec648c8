from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore.errors import InvalidArgument
from trajstore.populations import select_tokens

TEXTS = ["a", " B", "12", "\x00", " ", "", "éa", "a1", "!"]
COUNTS = np.array([5, 0, 3, 0, 9, 1, 2, 2, 7])


@pytest.fixture
def ds() -> xr.Dataset:
    return xr.Dataset(
        coords={
            "token": np.arange(9) * 10,
            "token_text": ("token", np.array(TEXTS, np.dtypes.StringDType())),
            "token_count": ("token", COUNTS),
            "is_dead": ("token", COUNTS == 0),
            "cohort": ("token", np.array(list("xxyyzzxyz"))),
        }
    )


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("token_count > 4", COUNTS > 4),
        ("0 < token_count <= 3", (COUNTS > 0) & (COUNTS <= 3)),
        ("4 >= token_count != 2", (COUNTS <= 4) & (COUNTS != 2)),
        ("not is_dead and token >= 40", (COUNTS > 0) & (np.arange(9) >= 4)),
        ("dead or cohort == 'z'", (COUNTS == 0) | np.isin(np.arange(9), (4, 5, 8))),
        ("token_count < quantile(token_count, 0.5)", COUNTS < 2),
        ("token in (10, 30, 77)", np.isin(np.arange(9), (1, 3))),
        ("token_count not in [0]", COUNTS != 0),
        ("token_count > -1", COUNTS >= 0),
        ("live", COUNTS > 0),
        ("category(token_text) == 'Lu'", np.isin(np.arange(9), 1)),
        ("major(token_text) in ('L', 'N')", np.isin(np.arange(9), (0, 1, 2, 6))),
        ("category(token_text) == 'mixed'", np.isin(np.arange(9), (5, 7))),
        ("category(token_text) in ('Zs', 'Cc')", np.isin(np.arange(9), (3, 4))),
        ("token_text == '\\x00'", np.isin(np.arange(9), 3)),
    ],
)
def test_an_expression_selects_tokens(
    expression: str, expected: np.ndarray, ds: xr.Dataset
) -> None:
    assert select_tokens(ds, expression).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "token_count <",
        "token_count < \x00",
        "token_count",
        "3 < 4",
        "True",
        "count > 3",
        "token_count == 'a'",
        "token_text in (1, 2)",
        "token_count in token",
        "3 in (3, 4)",
        "token_count is 3",
        "token_count + 1 > 3",
        "-token_text == 'a'",
        "quantile(token_count, 2) > 1",
        "quantile(token_text, 0.5) > 1",
        "quantile(token_count, token_count) > 1",
        "category(token_count) == 'Lu'",
        "__import__('os').system('true')",
        "token_count.size > 3",
        "is_dead == (0 == 1)",
        "quantile(x=token_count)",
        "(" * 300 + "1" + ")" * 300,
    ],
)
def test_a_wrong_expression_names_the_population(expression: str, ds: xr.Dataset) -> None:
    with pytest.raises(InvalidArgument, match="population"):
        select_tokens(ds, expression)
    with pytest.raises(InvalidArgument, match=r'such as token_text in \("a", "e"\)$'):
        select_tokens(ds, 'token_text in "aeiou"')
