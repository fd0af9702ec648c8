"""`trajstore analyze` and `summary` on a real run, as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from bits_and_calls import Cli, random_bits

import trajstore
from trajstore import RunWriter, analysis
from trajstore.analysis.commands.analyze import print_description
from trajstore.analysis.results.write_results import describe
from trajstore.cli.output import out
from trajstore.schema import EVALUATION

pytest.importorskip("matplotlib")


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


def test_a_lattice_of_choice(run: Path, trajstore_cli: Cli) -> None:
    ds = trajstore.open_run(run)
    lattice = ("--lattice", "bfloat16")
    facts = json.loads(trajstore_cli("analyze", run, "ulp", *lattice, "--json").stdout)
    assert facts["ulp"]["min"] == float(analysis.ulp(ds, "bfloat16").min())
    said = trajstore_cli("summary", run, *lattice).stdout
    assert said.startswith("W is rounded to bfloat16.")
    facts = json.loads(trajstore_cli("summary", run, *lattice, "--json").stdout)
    expected = analysis.summary(ds, "bfloat16").displacement
    np.testing.assert_allclose(facts["displacement"]["values"], expected, rtol=1e-6)


def test_several_quantities_are_streamed_to_a_file(
    run: Path, trajstore_cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "motion.zarr"
    names = ["grad_norms", "regimes"]
    said = trajstore_cli("analyze", run, *names, "-o", file)
    assert str(file) in said.stdout
    expected = analysis.compute(trajstore.open_run(run), names).compute()
    with xr.open_zarr(file) as opened:
        xr.testing.assert_equal(opened.load(), expected)
        assert opened.regime.attrs["flag_meanings"] == expected.regime.attrs["flag_meanings"]
        assert opened.grad_norms.attrs["units"] == "nat"
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name], "nothing else is left"


def test_tables_have_one_shape_each(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
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


def test_options_and_populations_of_the_user(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    ids, file = tmp_path / "tracers.txt", tmp_path / "way.zarr"
    ids.write_text("1\n7\n")
    ours = ("--population", "late=token > 8", "--population", f"tracers={ids}")
    previous = ("--set", "since=previous", "--by-population")
    trajstore_cli("analyze", run, "displacement", *previous, *ours, "-o", file)
    way = analysis.displacement(trajstore.open_run(run), since="previous").values
    with xr.open_zarr(file) as opened:
        mean = opened["mean"].load()
    for name, members in (("dead", range(5)), ("late", range(9, 12)), ("tracers", [1, 7])):
        np.testing.assert_allclose(mean.sel(population=name), way[:, members].mean(1), 1e-6)
    assert "tracers (2)" in trajstore_cli("summary", run, *ours).stdout
    refused = trajstore_cli("summary", run, "--population", "late=tokens > 8", rc=2)
    assert "(did you mean 'token'?) in the population" in refused.stderr


def test_several_runs(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    other, written = tmp_path / "other.zarr", tmp_path / "speed.zarr"
    other.symlink_to(run)
    trajstore_cli("analyze", run, other, "speed", "-o", written)
    got = xr.open_zarr(written)
    assert got.speed.dims == ("run", "step", "token")
    assert got.run.values.tolist() == [run.stem, "other"]
    reported = trajstore_cli("analyze", tmp_path / "*.zarr", "divergence", rc=1).stderr
    assert "not a run" in reported, "a pattern finds what was written, too"
    assert "distance" in trajstore_cli("analyze", run, other, "divergence").stdout


@pytest.mark.nightly
def test_computing_on_a_cluster(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
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
        (["adam_update"], 1, "exp_avg, exp_avg_sq, lr"),
        (["displacement", "--set", "till=9"], 2, "'till=9'"),
        (["clusters", "--set", "ranks=abc"], 2, "'ranks=abc', expected whole numbers"),
        (["freeze", "speed", "--set", "min_unchanged=3"], 2, "single quantity"),
        (["freeze", "--by-population"], 2, "not have one number per token"),
    ],
)
def test_each_wrong_call_is_answered_by_one_sentence(
    run: Path, arguments: list[str], rc: int, message: str, trajstore_cli: Cli
) -> None:
    said = trajstore_cli("analyze", run, *arguments, rc=rc).stderr
    assert len(said.strip().splitlines()) == 1
    assert message in said


def test_summary_prints_the_tables(run: Path, trajstore_cli: Cli) -> None:
    text = trajstore_cli("summary", run).stdout
    for words in ("Gradient norms", "dead (5)", "Displacement from step 0 to 20", "Logits", "Loss"):
        assert words in text
    facts = json.loads(trajstore_cli("summary", run, "--json").stdout)
    ds = trajstore.open_run(run)
    norms = analysis.grad_norms(ds).sel(step=[1, 20])
    expected = norms.isel(token=ds.is_dead.values).mean("token")
    got = np.array(facts["grad_norms"]["values"])[0, :, 0]  # mean, first and last, dead
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_only_results_are_overwritten(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    own, result = tmp_path / "walk.zarr", tmp_path / "result.zarr"
    shutil.copytree(run, own)
    trajstore_cli("analyze", run, "freeze", "-o", result)
    trajstore_cli("analyze", run, "freeze", "-o", result, "--overwrite")
    (tmp_path / "home.token.csv").mkdir()
    for target in (own, tmp_path / "home.csv"):
        done = trajstore_cli("analyze", own, "freeze", "-o", target, "--overwrite", rc=2)
        assert "not an analysis result" in " ".join(done.stderr.split())
    assert trajstore.verify(own).clean


def test_a_summary_without_dead_tokens_is_one_of_all(trajstore_cli: Cli, tmp_path: Path) -> None:
    text = trajstore_cli("summary", record(tmp_path / "untold.zarr", 3)).stdout
    assert "all (5)" in text
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


def test_a_ranking_is_printed_and_its_tokens_are_not_averaged() -> None:
    near = xr.DataArray([[1000, 3], [7, -1]], {"step": [0, 9], "rank": [1, 2]}, ["step", "rank"])
    found = xr.Dataset({"nearest": near, "distance": near / 2})
    texts = np.array([["a", " b"], ["'", ""]])
    with out.capture() as captured:
        print_description(describe(found.assign_coords(text=(near.dims, texts))))
        print_description(describe(found.isel(rank=[0] * 999)))
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["0", "1000", "'a'", "3", "'", "b'"] in lines
    assert ["9", "3.5", "-0.5"] in lines
    assert captured.get().count("writes the values of nearest, distance, too many") == 1
    assert np.isnan(describe(found)["nearest"]["mean"])


def record(
    path: Path, rows: int, changed: tuple[int, int] | None = None, parameter: str = "W"
) -> Path:
    """A run of finite values, with one bit of W changed in one row at one token."""
    with RunWriter.create(
        path, token=np.arange(5), hidden=3, variables={"W": "bfloat16", "loss": "float32"},
        attributes={"recording": {"parameter": parameter}},
    ) as run:  # fmt: skip
        for step in range(rows):
            w = random_bits((5, 3), step) & 0xBFFF  # exponents that are finite
            if changed and step == changed[0]:
                w[changed[1], 0] ^= 1
            run.append(step=step, W=w, loss=np.float32(step))
    return path


def test_the_first_difference_is_named(tmp_path: Path, trajstore_cli: Cli) -> None:
    one, other = record(tmp_path / "a.zarr", 9), tmp_path / "b.zarr"
    variables = {"W": "bfloat16", "grad": "float32", "logits": "float32"}
    with RunWriter.create(other, token=np.arange(5), hidden=3, variables=variables) as run:
        for step, row in enumerate(trajstore.open_run(one).W.values[:7]):
            W = row.copy()
            W[2, 0] += step == 4
            run.append(step=step, W=W, grad=np.zeros((5, 3), "f4"), logits=np.zeros(5, "f4"))
    text = trajstore_cli("compare", one, other).stdout
    assert "Over 7 common steps and 1 common variable, the runs differ in W.\n" in text
    assert "The first run has 9 rows, the second 7.\n" in text
    assert "Only the first run has loss.\nOnly the second run has grad, logits.\n" in text
    facts = json.loads(trajstore_cli("compare", one, other, "--json").stdout)
    found = facts["variables"]["W"]
    assert (found["first_difference"], found["differing_steps"]) == (4, 1)
    assert [value > 0 for value in found["distance"]] == [step == 4 for step in range(7)]
    assert (facts["only_first"], facts["only_second"]) == (["loss"], ["grad", "logits"])


def test_over_names_the_step_from_which_losses_differ(tmp_path: Path, trajstore_cli: Cli) -> None:
    one, other = record(tmp_path / "a.zarr", 6), record(tmp_path / "b.zarr", 5)
    text = trajstore_cli("compare", one, other, "--over", "1%").stdout
    assert "are identical, bit for bit" in text
    assert "The losses never differ by more than 1%; the largest difference: 0.000%" in text
    with RunWriter.resume(other) as run:
        run.append(step=5, W=np.zeros((5, 3), "f4"), loss=np.float32(5.1))
    text = " ".join(trajstore_cli("compare", one, other, "--over", "1%").stdout.split())
    assert "differ by more than 1% from step 5 on, at 1 of 1 step; the largest" in text
    facts = json.loads(trajstore_cli("compare", one, other, "--over", "50%", "--json").stdout)
    assert facts["loss"]["first_over"] == -1
    wrong = trajstore_cli("compare", one, other, "--over", "1", rc=2).stderr
    assert "expected a percentage" in wrong


def test_a_name_stands_for_the_two_matrices_of_a_training(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    record(tmp_path / "un.E.zarr", 3, parameter="E")
    alone = trajstore_cli("compare", tmp_path / "un.zarr", rc=2).stderr
    assert "expected two runs" in alone
    record(tmp_path / "un.W.zarr", 3, (1, 2), parameter="W")
    text = trajstore_cli("compare", tmp_path / "un.zarr").stdout
    assert "Over 3 common steps and 2 common variables, the runs differ in W.\n" in text


def test_what_cannot_be_compared_says_why(tmp_path: Path, trajstore_cli: Cli) -> None:
    one = record(tmp_path / "a.zarr", 2)
    for token, rc, told in (
        ([4, 2, 9, 0, 1, 3], 0, "has 5 tokens, the second 6; only the 5 common tokens"),
        ([7, 8], 2, "no common token"),
    ):
        with RunWriter.create(
            tmp_path / f"{rc}.zarr", token=token, hidden=3, variables={"W": "bfloat16"}
        ) as run:
            run.append(step=0, W=np.zeros((len(token), 3), "f4"))
        done = trajstore_cli("compare", one, run.path, rc=rc)
        assert told in " ".join((done.stdout + done.stderr).split())


def test_figures(example_run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    one, sheet = tmp_path / "norms.svg", tmp_path / "sheet.svg"
    options = ("--style", "dark", "--population", "few=token < 9")
    out = trajstore_cli("plot", example_run, "grad-norms", "-o", one, *options).stdout
    assert "norms.svg: grad_norms." in out
    text = one.read_text()
    assert "gatsby.zarr · W 128 × 4, AdamW, bfloat16" in text
    assert "L2 norm of the gradient / nat" in text
    assert all(f"{name} tokens" in text for name in ("dead", "live", "few"))
    options = ("--select", "step=2:", "--select", "token=live", "--select", "population=live")
    centroid = ("--vectors", "centroid:all")
    names = ("displacement", "loss")
    out = trajstore_cli("plot", example_run, *names, "-o", sheet, *options[:2], *centroid).stdout
    assert "sheet.svg: displacement, loss." in out
    assert "centroid of all 1 × 4" in sheet.read_text()
    trajstore_cli("plot", example_run, "speed", "-o", sheet, *options, "--overwrite")
    assert "dead tokens" not in sheet.read_text()
    other, runs = tmp_path / "other.zarr", tmp_path / "runs.svg"
    other.symlink_to(example_run)
    options = ("--common-steps", "--lattice", "native")
    out = trajstore_cli("plot", example_run, other, "divergence", "-o", runs, *options).stdout
    assert "runs.svg: divergence." in out


def test_the_film(example_run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    still = tmp_path / "film.svg"
    options = ("--frames", "even:3", "--style", "dark")
    out = trajstore_cli("plot", example_run, "film", "-o", still, *options).stdout
    assert out.split() == ["Wrote", f"{still}:", "film."]
    assert "frozen (" in still.read_text()


def test_wrong_options_of_plot_are_errors(
    example_run: Path, trajstore_cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    for arguments, code, sentence in (
        (("film", "loss"), 2, "film is drawn alone, got film, loss; draw the others"),
        (("loss", "--frames", 5), 2, "--frames is for film, got loss; leave it out"),
        (("divergence",), 2, "divergence compares runs, got one"),
        (("loss", "--select", "step=5:2"), 2, "no recorded step is in '5:2'"),
        (("loss", "--lattice", "float32"), 2, "loss has no lattice"),
        (("freeze", "--select", "population=mostly_dead"), 2, "choose from dead, live, all"),
        (("trajectory", "--plane", "hidden_mean"), 1, "hidden_mean"),
    ):
        error = trajstore_cli("plot", example_run, *arguments, rc=code).stderr
        assert sentence in " ".join(error.split()), arguments
    file.write_text("mine")
    refused = trajstore_cli("plot", example_run, "loss", "-o", file, rc=2).stderr
    assert "replace it with --overwrite" in refused
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_results_of_an_evaluation(example_run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    results = tmp_path / "results.zarr"
    xr.Dataset(
        {"text_loss": ("step", [3.0, 2.0]), "text": ("step", np.array(["a", "b"], object))},
        {"step": [0, 1]},
        {EVALUATION: {"run": "gatsby.zarr", "function": "probe"}},
    ).to_zarr(results, zarr_format=3)
    file = tmp_path / "results.svg"
    out = trajstore_cli("plot", results, "all", "-o", file).stdout
    assert "results.svg: text_loss." in out
    assert "text is left out: text has texts" in out
    error = trajstore_cli("plot", results, "freeze", rc=2).stderr
    assert "expected one or more of all, text, text_loss" in error
    error = trajstore_cli("plot", results, example_run, "text_loss", rc=1).stderr
    assert "gatsby.zarr is not the store of an evaluation" in " ".join(error.split())
