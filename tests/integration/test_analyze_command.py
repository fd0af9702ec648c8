"""`trajstore analyze` and `summary` on a real run, as a user calls them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import trajstore
from trajstore import analysis
from trajstore.analysis.commands.analyze import print_description
from trajstore.analysis.results.write_results import describe
from trajstore.cli.output import out

ROWS, TOKENS, HIDDEN = 21, 12, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A walk into rest, in blocks of 6 rows."""
    path = tmp_path_factory.mktemp("runs") / "walk.zarr"
    rng = np.random.default_rng(0)
    W = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    with trajstore.RunWriter.create(
        path,
        token=np.arange(TOKENS),
        hidden=HIDDEN,
        variables={"W": "float32", "grad": "float32", "loss": "float32", "logits": "float32"},
        is_dead=np.arange(TOKENS) < 5,
        token_text=[f"«{number}»" for number in range(TOKENS)],
        block_rows=6,
    ) as writer:
        for step in range(ROWS):
            moving = step < 10 + np.arange(TOKENS)
            W = W + np.float32(0.01) * moving[:, None] * rng.normal(size=W.shape).astype("f4")
            grad = np.full_like(W, np.nan) if step == 0 else W / 10
            logits = np.full(TOKENS, np.nan, "f4") if step == 0 else W[:, 0]
            loss = np.float32("nan" if step == 0 else 3 - step / 10)
            writer.append(step, W=W.astype("f4"), grad=grad, loss=loss, logits=logits)
    return path


def test_a_quantity_is_described(run: Path, trajstore_cli: Callable[..., Any]) -> None:
    text = trajstore_cli("analyze", run, "freeze").stdout
    assert "last_motion" in text
    assert "token 12" in text
    facts = json.loads(trajstore_cli("analyze", run, "freeze", "grad_norms", "--json").stdout)
    assert facts["last_motion"]["max"] == 20
    assert facts["grad_norms"]["sizes"] == {"step": ROWS, "token": TOKENS}
    assert facts["grad_norms"]["nan"] == TOKENS


def test_a_lattice_of_choice(run: Path, trajstore_cli: Callable[..., Any]) -> None:
    ds = trajstore.open_run(run)
    lattice = ("--lattice", "bfloat16")
    facts = json.loads(trajstore_cli("analyze", run, "ulp", *lattice, "--json").stdout)
    assert facts["ulp"]["min"] == float(analysis.ulp(ds, "bfloat16").min())
    refused = trajstore_cli("analyze", run, "speed", *lattice, rc=2)
    assert "for speed; only these have it: distinct" in refused.stderr
    assert "float8" in trajstore_cli("analyze", run, "freeze", "--lattice", "float8", rc=2).stderr

    said = trajstore_cli("summary", run, *lattice).stdout
    assert said.startswith("W is rounded to bfloat16.")
    facts = json.loads(trajstore_cli("summary", run, *lattice, "--json").stdout)
    W = ds.W.values[[0, -1]].view(np.uint32)
    cells = ((W + 0x7FFF + ((W >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)
    moved = np.linalg.norm(cells[1] - cells[0], axis=-1).max()
    at = [str(name) for name in analysis.summary(ds).displacement.statistic.values].index("max")
    assert facts["displacement"]["values"][at][2] == pytest.approx(moved, rel=1e-6)


def test_several_quantities_are_streamed_to_a_file(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "motion.zarr"
    names = ["grad_norms", "freeze", "regimes", "velocity"]
    said = trajstore_cli("analyze", run, *names, "-o", file)
    assert str(file) in said.stdout
    expected = analysis.compute(trajstore.open_run(run), names).compute()
    with xr.open_zarr(file) as opened:
        xr.testing.assert_equal(opened.load(), expected)
        assert opened.regime.attrs["flag_meanings"] == expected.regime.attrs["flag_meanings"]
        assert opened.grad_norms.attrs["units"] == "nat"
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name], "nothing else is left"
    trajstore_cli("analyze", run, "freeze", "-o", file, rc=2)
    trajstore_cli("analyze", run, "freeze", "-o", file, "--overwrite")


def test_tables_have_one_shape_each(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    ds = trajstore.open_run(run)
    trajstore_cli("analyze", run, "grad_norms", "-o", tmp_path / "norms.csv")
    table = pd.read_csv(tmp_path / "norms.csv").set_index(["step", "token"])["grad_norms"]
    expected = analysis.grad_norms(ds).to_series()
    np.testing.assert_allclose(table.to_numpy(), expected.to_numpy(), rtol=1e-6)
    assert table.index.tolist() == expected.index.tolist()
    done = trajstore_cli("analyze", run, "freeze", "-o", tmp_path / "freeze.csv", "--json")
    files = json.loads(done.stdout)["files"]
    assert sorted(Path(file).name for file in files) == [
        "freeze.step.population.csv",
        "freeze.token.csv",
    ]
    tokens = pd.read_csv(tmp_path / "freeze.token.csv")
    assert tokens["last_motion"].tolist() == analysis.freeze(ds).last_motion.values.tolist()
    assert tokens["token_text"].tolist() == [f"«{number}»" for number in range(TOKENS)]


def test_options_and_populations(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "way.zarr"
    trajstore_cli(
        "analyze", run, "displacement", "--set", "since=previous", "--by-population", "-o", file
    )
    ds = trajstore.open_run(run)
    expected = analysis.by_population(analysis.displacement(ds, since="previous"))
    xr.testing.assert_allclose(xr.open_zarr(file).load(), expected.compute())
    trajstore_cli("analyze", run, "grad_norms", "--set", "ord=inf", "--json")


def test_populations_of_the_user(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    ids = tmp_path / "tracers.txt"
    ids.write_text("1\n7\n")
    ours = ("--population", "late=token > 8", "--population", f"tracers={ids}")
    file = tmp_path / "centroid.zarr"
    trajstore_cli("analyze", run, "centroid", *ours, "-o", file)
    W = trajstore.open_run(run).W.values.astype(np.float64)
    with xr.open_zarr(file) as opened:
        centroid = opened.centroid.load()
    np.testing.assert_allclose(centroid.sel(population="late"), W[:, 9:].mean(1))
    np.testing.assert_allclose(centroid.sel(population="tracers"), W[:, [1, 7]].mean(1))
    assert "tracers (2)" in trajstore_cli("summary", run, *ours).stdout
    refused = trajstore_cli("summary", run, "--population", "late=tokens > 8", rc=2)
    assert "got 'tokens' (did you mean 'token'?) in the population" in refused.stderr


def test_several_runs(run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path) -> None:
    other = tmp_path / "other.zarr"
    shutil.copytree(run, other)
    written = tmp_path / "speed.zarr"
    trajstore_cli("analyze", run, other, "speed", "-o", written)
    got = xr.open_zarr(written)
    assert got.speed.dims == ("run", "step", "token")
    assert got.run.values.tolist() == [run.stem, "other"]
    reported = trajstore_cli("analyze", tmp_path / "*.zarr", "divergence", rc=1).stderr
    assert "not a run" in reported, "a pattern finds what was written, too"
    assert "distance" in trajstore_cli("analyze", run, other, "divergence").stdout


def test_computing_on_a_cluster(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    file = tmp_path / "life.zarr"
    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        address = cluster.scheduler_address
        trajstore_cli("analyze", run, "lifecycle", "--scheduler", address, "-o", file)
    expected = analysis.lifecycle(trajstore.open_run(run)).compute()
    xr.testing.assert_equal(xr.open_zarr(file).load(), expected)


@pytest.mark.parametrize(
    ("arguments", "rc", "message"),
    [
        (["wobble"], 2, "unknown quantity 'wobble'"),
        (["adam_update"], 1, "exp_avg, exp_avg_sq, lr"),
        (["displacement", "--set", "till=9"], 2, "'till=9'"),
        (["clusters", "--set", "ranks=abc"], 2, "'ranks=abc', expected whole numbers"),
        (["freeze", "speed", "--set", "min_unchanged=3"], 2, "single quantity"),
        (["freeze", "--by-population"], 2, "not have one number per token"),
        (["freeze", "-o", "motion.txt"], 2, r"\.zarr, \.nc, \.csv"),
        pytest.param(  # it waits ten seconds
            ["freeze", "--scheduler", "tcp://127.0.0.1:1"],
            2,
            "no dask scheduler answers",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_each_wrong_call_is_answered_by_one_sentence(
    run: Path, arguments: list[str], rc: int, message: str, trajstore_cli: Callable[..., Any]
) -> None:
    said = trajstore_cli("analyze", run, *arguments, rc=rc).stderr
    assert len(said.strip().splitlines()) == 1
    assert re.search(message, said)


def test_summary_prints_the_tables(run: Path, trajstore_cli: Callable[..., Any]) -> None:
    text = trajstore_cli("summary", run).stdout
    for words in ("Gradient norms", "dead (5)", "Displacement from step 0 to 20", "Logits", "Loss"):
        assert words in text
    facts = json.loads(trajstore_cli("summary", run, "--json").stdout)
    ds = trajstore.open_run(run)
    norms = analysis.grad_norms(ds).sel(step=[1, 20])
    expected = norms.isel(token=ds.is_dead.values).mean("token")
    got = np.array(facts["grad_norms"]["values"])[0, :, 0]  # mean, first and last, dead
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_only_results_are_overwritten(
    run: Path, trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    own, result = tmp_path / "walk.zarr", tmp_path / "result.zarr"
    shutil.copytree(run, own)
    trajstore_cli("analyze", run, "freeze", "-o", result)
    trajstore_cli("analyze", run, "freeze", "-o", result, "--overwrite")
    (tmp_path / "home.token.csv").mkdir()
    for target in (own, tmp_path / "home.csv"):
        done = trajstore_cli("analyze", own, "freeze", "-o", target, "--overwrite", rc=2)
        assert "not an analysis result" in " ".join(done.stderr.split())
    assert trajstore.verify(own).clean


def test_a_summary_without_dead_tokens_is_one_of_all(
    trajstore_cli: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "untold.zarr"
    variables = {"W": "float32", "grad": "float32", "loss": "float32"}
    with trajstore.RunWriter.create(path, token=[1, 2], hidden=2, variables=variables) as writer:
        for step in range(3):
            values = np.full((2, 2), step, "f4")
            writer.append(step, W=values, grad=values, loss=1.0)
    text = trajstore_cli("summary", path).stdout
    assert "all (2)" in text
    assert "trajstore annotate" in text
    assert "dead (" not in text


def test_counts_are_printed() -> None:
    labels = {"cause": ["lr", "moments"], "outcome": ["moves", "rests"]}
    counts = xr.DataArray([[1, 2000], [3, 4]], labels, [*labels], name="counts").to_dataset()
    facts = describe(counts)
    assert facts["counts"]["values"] == [[1, 2000], [3, 4]]
    assert facts["counts"]["labels"] == labels
    assert "values" not in describe(counts.astype(float))["counts"]
    with out.capture() as captured:
        print_description(facts)
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["cause", "moves", "rests"] in lines
    assert ["lr", "1", "2,000"] in lines
