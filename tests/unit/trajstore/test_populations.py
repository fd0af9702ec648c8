"""Populations by masks, ids, labels, files and expressions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import FormatError, InvalidArgument
from trajstore.populations import populations_from, row_vectors, select_tokens, with_populations

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
        ("live and token_count > -1", COUNTS > 0),
        ("major(token_text) in ('L', 'N')", np.isin(np.arange(9), (0, 1, 2, 6))),
        ("category(token_text) == 'mixed'", np.isin(np.arange(9), (5, 7))),
        ("category(token_text) in ('Zs', 'Cc', 'Lu')", np.isin(np.arange(9), (1, 3, 4))),
    ],
)
def test_an_expression_selects_tokens(
    expression: str, expected: np.ndarray, ds: xr.Dataset
) -> None:
    assert select_tokens(ds, expression).tolist() == expected.tolist()


WRONG = (
    "",
    "token_count < \x00",
    "token_count",
    "3 < 4",
    "count > 3",
    "token_count == 'a'",
    "token_text in (1, 2)",
    "token_count in token",
    "token_count is 3",
    "token_count + 1 > 3",
    "token_count.T > 3",
    "-token_text == 'a'",
    "quantile(token_count, 2) > 1",
    "quantile(token_count, token_count) > 1",
    "quantile(x=token_count)",
    "category(token_count) == 'Lu'",
    "__import__('os').system('true')",
    "is_dead == (0 == 1)",
    "(" * 300 + "1" + ")" * 300,
)


@pytest.mark.parametrize("expression", WRONG)
def test_a_wrong_expression_names_the_population(expression: str, ds: xr.Dataset) -> None:
    with pytest.raises(InvalidArgument, match="population"):
        select_tokens(ds, expression)


def test_populations_from_files(tmp_path: Path) -> None:
    mask = np.arange(8) == 2
    np.save(tmp_path / "mask.npy", mask)
    np.savez(tmp_path / "ids.npz", ids=np.array([4, 9]))
    (tmp_path / "ids.txt").write_text("0\n# a comment\n3 # another\n")
    given = [f"one={tmp_path}/mask.npy", f"two={tmp_path}/ids.npz", f"three={tmp_path}/ids.txt"]
    got = populations_from([*given, "four = token == 3"])
    assert got["one"].tolist() == mask.tolist()
    assert got["two"].tolist() == [4, 9]
    assert got["three"].tolist() == [0, 3]
    assert got["four"] == "token == 3"
    np.savez(tmp_path / "several.npz", a=mask, b=mask)
    np.save(tmp_path / "wide.npy", np.zeros((8, 2), bool))
    (tmp_path / "text.txt").write_text("three\n")
    for name in ("several.npz", "wide.npy", "text.txt"):
        with pytest.raises(FormatError, match=name):
            populations_from([f"one={tmp_path}/{name}"])


def test_what_is_no_population(ds: xr.Dataset) -> None:
    with pytest.raises(InvalidArgument, match=r'such as token_text in \("a", "e"\)$'):
        select_tokens(ds, 'token_text in "aeiou"')
    for assignments in (["odd"], ["=token > 3"], ["a=token > 3", "a=token > 4"]):
        with pytest.raises(InvalidArgument, match="NAME=EXPRESSION"):
            populations_from(assignments)
    with pytest.raises(InvalidArgument, match=r"there is no file nowhere\.txt"):
        populations_from(["one=nowhere.txt"])


@pytest.fixture
def run():
    walk = np.random.default_rng(0).normal(0, 1e-3, (6, 8, 3)).cumsum(axis=0).astype("f4")
    W = (walk.view("u4") & 0xFFFF0000).view("f4")  # bfloat16 values
    return xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16", "units": "1"})},
        coords={
            "step": np.arange(6),
            "token": np.arange(8)[::-1] * 3,  # neither sorted nor positions
            "is_dead": ("token", np.arange(8) < 3),
        },
    ).chunk({"step": 4, "token": 3})


def test_every_function_takes_and_gives_them(run):
    mask = np.arange(8) % 2 == 0
    ds = run.traj.with_populations(even=mask, first=run.token.values[:2], late="token < 9")
    names = ["dead", "live", "all", "even", "first", "late"]
    W = run.W.values.astype(np.float64)
    got = analysis.centroid(ds).compute()
    assert got.population.values.tolist() == names
    np.testing.assert_allclose(got.centroid.sel(population="even"), W[:, mask].mean(1))
    np.testing.assert_allclose(got.centroid.sel(population="first"), W[:, :2].mean(1))
    np.testing.assert_allclose(got.centroid.sel(population="late"), W[:, -3:].mean(1))
    results = [
        getattr(analysis, name)(ds)
        for name in "freeze regimes clusters autocorrelation alignment inertia summary".split()
    ]
    results += [analysis.by_population(analysis.speed(ds))]
    results += [ds.traj.by_population(analysis.speed(run))]
    for result in results:
        assert result.population.values.tolist() == names
    one = analysis.pca(ds, "even", components=1).compute()
    alone = analysis.pca(run.isel(token=mask), components=1).compute()
    np.testing.assert_allclose(one.spectrum, alone.spectrum)


def test_labels_and_any_mask_along_token_make_populations(run):
    cohorts = np.array(["old", "", "new", "old", "new", "", "old", "new"])
    ds = with_populations(run, {"cohort": cohorts})
    assert ds.is_cohort_old.values.tolist() == (cohorts == "old").tolist()
    assert analysis.coherence(ds, "cohort_new").sizes == {"step": 5}
    assert "is_cohort_" not in ds.coords
    ds = run.assign_coords(reachable=("token", np.arange(8) > 5))
    assert "reachable" in analysis.distinct(ds).population
    with pytest.raises(InvalidArgument, match="second population 'reachable'"):
        analysis.distinct(ds.assign_coords(is_reachable=ds.reachable))


def test_wrong_populations_are_errors(run):
    for name, given, message in (
        ("dead", "token > 3", "name 'dead'"),
        ("a b", "token > 3", "name 'a b'"),
        ("token", "token > 3", "already"),
        ("odd", np.ones(3, bool), "3 values of bool"),
        ("odd", np.ones(8), "8 values of float64"),
        ("odd", np.ones((8, 1), bool), "one dimension"),
        ("odd", [3, 4], "1 unknown token ids .* the first is 4"),
        ("odd", "no such file.npy", "got the file name"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            with_populations(run, {name: given})


def history(*dims: str) -> xr.Dataset:
    rng = np.random.default_rng(5)
    attrs = {"native_dtype": "float32", "units": "1"}
    names = {name: rng.normal(size=(9, 6, 4)).astype("f4") for name in ("W", "grad")}
    ds = xr.Dataset({name: (("step", *dims), values, attrs) for name, values in names.items()})
    return ds.assign_coords({"step": np.arange(9), dims[0]: np.arange(6)})


def test_rows_of_a_parameter_are_tokens_with_their_numbers_and_the_name():
    ds = history("row", "column").assign_attrs(recording={"parameter": "a.b"})
    grouped = analysis.with_populations(ds, first="row < 2", odd=[1, 3, 5])
    found = analysis.centroid(grouped).centroid
    assert found.population.values.tolist() == ["all", "first", "odd"]
    np.testing.assert_allclose(found.sel(population="first"), ds.W.values[:, :2].mean(1, "f8"))
    np.testing.assert_allclose(found.sel(population="odd"), ds.W.values[:, 1::2].mean(1, "f8"))
    selected = row_vectors(ds.isel(row=[4, 1]))
    assert selected.token.values.tolist() == [4, 1]
    assert selected.attrs["parameter"] == "a.b"
    of_tokens = history("token", "hidden")
    assert row_vectors(of_tokens) is of_tokens
    expected = analysis.vectors(of_tokens, "grad").W
    xr.testing.assert_equal(analysis.vectors(ds, "grad").W, expected)
    with pytest.raises(InvalidArgument, match=r"a\.b has no elements"):
        row_vectors(ds.isel(column=[]))
