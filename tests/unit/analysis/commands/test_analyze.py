"""`info`, `summary`, `analyze`, `compare` and `plot`: their words, what they print, their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from bits_and_calls import Cli
from growing_runs import HOSTILE, TOKENS, begin, extend, values

from trajstore import RunWriter, analysis, open_run, verify
from trajstore.analysis.commands.analyze import print_description
from trajstore.analysis.results.write_results import describe
from trajstore.analysis.several_quantities import ACROSS_RUNS, ALONE, QUANTITIES
from trajstore.cli import output
from trajstore.schema import EVALUATION


def recorded(path: Path, **options: Any) -> Path:
    with begin(path, **options) as run:
        extend(run, range(10))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten rows, which is only read."""
    return recorded(tmp_path_factory.mktemp("runs") / "run.zarr")


def test_the_codec_info_verify_and_a_small_export_wait_for_no_xarray(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "from trajstore.cli.main import main\n"
        "(codec,) = entry_points(group='zarr.codecs', name='trajstore.block')\n"
        "assert codec.load().__name__ == 'BlockCodec'\n"
        "for command in (['info'], ['verify'], ['export', '-o', sys.argv[1] + '.safetensors']):\n"
        "    main([*command, sys.argv[1]], standalone_mode=False)\n"
        "print({'xarray', 'pandas', 'dask', 'matplotlib'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, recorded(tmp_path / "run.zarr")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("set()\n")


def test_info_names_the_parameter_and_a_recorder_that_is_gone(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    run = begin(tmp_path / "run.zarr", attributes={"recording": {"parameter": "lm_head.weight"}})
    extend(run, range(4))
    printed = trajstore_cli("info", run.path).stdout
    assert "run.zarr: recording, 4 rows" in printed
    assert "Recorded parameter: lm_head.weight." in printed
    run._lock.release()  # as the system does if a process dies
    for runs in ([run.path], [run.path, run.path]):
        assert "recording, but its process is gone" in trajstore_cli("info", *runs).stdout
    assert json.loads(trajstore_cli("info", run.path, "--json").stdout)["written_to"] is False


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns of the terminal."""
    monkeypatch.setattr(output.out, "width", 80)
    return 80


def test_info_fits_80_columns_and_cuts_no_name(
    tmp_path: Path, columns: int, trajstore_cli: Cli
) -> None:
    names = ["W", "grad", "grad_token_norm", "W_step_norm", "exp_avg_sq"]
    shapes = {name: (TOKENS,) if name.endswith("_norm") else (TOKENS, 3) for name in names}
    with begin(tmp_path / "run.zarr", variables=dict.fromkeys(names, "float32")) as run:
        run.append(step=0, **{name: np.zeros(shape, "f4") for name, shape in shapes.items()})
    lines = trajstore_cli("info", run.path).stdout.splitlines()
    table = lines[[line.split()[:1] == ["array"] for line in lines].index(True) :]
    for name in (*names, "token_text", "text"):
        assert any(name in line.split() for line in table), name
    assert max(len(line.rstrip()) for line in table if "×" in line) <= columns
    assert "…" not in "".join(lines)


def test_texts_of_others_do_no_harm(tmp_path: Path, columns: int, trajstore_cli: Cli) -> None:
    hostile = {text: {text: text} for text in (*HOSTILE[:3], "[bold red]x[/bold red]")}
    path = recorded(tmp_path / "\x1b[31m[red]run\u202e.zarr", config=hostile)
    for name in ("summary", "info"):
        printed = trajstore_cli(name, path).stdout
        assert not [sign for sign in printed if not sign.isprintable() and sign != "\n"]
    assert r"\x1b[31mred\x1b]0;title" in printed
    assert "<script>alert(1)</script>" in printed
    assert "[bold red]x[/bold red] = " in printed
    assert "\x1b" not in trajstore_cli("info", tmp_path / "\x1b[2Jnothing", rc=2).stderr


def test_summary_prints_the_tables(example_run: Path, trajstore_cli: Cli) -> None:
    text = trajstore_cli("summary", example_run).stdout
    for words in (
        "Gradient norms",
        "dead (118)",
        "Displacement from step 0 to 20",
        "Logits",
        "Loss",
    ):
        assert words in text
    ds = open_run(example_run)
    facts = json.loads(trajstore_cli("summary", example_run, "--json").stdout)
    norms = analysis.grad_norms(ds).sel(step=[1, 20])
    expected = norms.isel(token=ds.is_dead.values).mean("token")
    got = np.array(facts["grad_norms"]["values"])[0, :, 0]  # mean, first and last, dead
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    lattice = ("--lattice", "float16")
    said = trajstore_cli("summary", example_run, *lattice).stdout
    assert said.startswith("W is rounded to float16.")
    facts = json.loads(trajstore_cli("summary", example_run, *lattice, "--json").stdout)
    expected = analysis.summary(ds, "float16").displacement
    np.testing.assert_allclose(facts["displacement"]["values"], expected, rtol=1e-6)


def test_a_summary_leaves_out_a_population_without_tokens(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    path = recorded(tmp_path / "run.zarr", is_dead=np.zeros(TOKENS, bool))
    printed = trajstore_cli("summary", path).stdout
    assert "There are no dead tokens" in printed
    assert not any(text in printed for text in (f"dead ({TOKENS})", "dead (0)", "nan"))
    printed = trajstore_cli("summary", recorded(tmp_path / "untold.zarr", is_dead=None)).stdout
    assert f"all ({TOKENS})" in printed
    assert "trajstore annotate" in printed
    assert "dead (" not in printed


def test_the_summary_names_the_notes_of_its_runs(tmp_path: Path, trajstore_cli: Cli) -> None:
    notes = [
        {"note": text, "first_step": 2, "last_step": 9, "count": count}
        for text, count in (("loss is a sum", 3), ("lr is NaN", 1))
    ]
    for name, kept in (("a", notes), ("b", notes[:1])):
        with begin(tmp_path / name) as run:
            extend(run, range(2))
            run.notes = kept
    shown = trajstore_cli("summary", tmp_path / "a").output
    assert "Note: loss is a sum (3 steps, 2 to 9)." in shown
    assert "Note: lr is NaN (step 2)." in shown
    assert shown.count("dead (2)      1 ") == 1, "one line of each gradient, as of one step"
    assert "Loss: 4.9000 at step 1\n" in shown
    both = trajstore_cli("summary", tmp_path / "a", tmp_path / "b").output
    assert "Note: loss is a sum (2 runs)." in both
    assert f"Note: lr is NaN ({tmp_path / 'a'})." in both


def test_analyze_lists_its_quantities(trajstore_cli: Cli) -> None:
    lines = trajstore_cli("analyze", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*sorted([*QUANTITIES, *ALONE]), *ACROSS_RUNS]
    assert any("Options: since." in line for line in lines)


def test_several_quantities_are_streamed_to_a_file(
    run: Path, trajstore_cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "motion.zarr"
    names, options = ["grad_norms", "regimes"], ("--lattice", "bfloat16", "-o", file)
    assert str(file) in trajstore_cli("analyze", run, *names, *options).stdout
    expected = analysis.compute(open_run(run), names, lattice="bfloat16").compute()
    with xr.open_zarr(file) as opened:
        xr.testing.assert_equal(opened.load(), expected)
        assert opened.regime.attrs["flag_meanings"] == expected.regime.attrs["flag_meanings"]
        assert opened.grad_norms.attrs["units"] == "nat"
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name], "nothing else is left"


def test_tables_have_one_shape_each(trajstore_cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    with begin(run) as made:
        made.append(step=0, **values(0) | {"grad": np.full((TOKENS, 3), np.nan, "f4")})
        extend(made, range(1, 9))
    ds = open_run(run)
    trajstore_cli("analyze", run, "grad_norms", "-o", tmp_path / "norms.csv")
    table = pd.read_csv(tmp_path / "norms.csv").set_index(["step", "token"])["grad_norms"]
    expected = analysis.grad_norms(ds).to_series()
    np.testing.assert_allclose(table.to_numpy(), expected.to_numpy(), rtol=1e-6)
    assert table.index.tolist() == expected.index.tolist()
    done = trajstore_cli("analyze", run, "freeze", "-o", tmp_path / "freeze.csv", "--json")
    files = [Path(file).name for file in json.loads(done.stdout)["files"]]
    assert sorted(files) == ["freeze.step.population.csv", "freeze.token.csv"]
    tokens = pd.read_csv(tmp_path / "freeze.token.csv")
    assert tokens["last_motion"].tolist() == analysis.freeze(ds).last_motion.values.tolist()
    assert tokens["token_text"].tolist() == HOSTILE


def test_options_and_populations_of_the_user(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    ids, file = tmp_path / "tracers.txt", tmp_path / "norms.zarr"
    ids.write_text("0\n6\n")
    ours = ("--population", "late=token > 8", "--population", f"tracers={ids}")
    options = ("--set", "ord=1", "--by-population")
    trajstore_cli("analyze", run, "grad_norms", *options, *ours, "-o", file)
    norms = analysis.grad_norms(open_run(run), ord=1).values
    with xr.open_zarr(file) as opened:
        mean = opened["mean"].load()
    for name, members in (("dead", [4, 5]), ("late", [3, 4, 5]), ("tracers", [0, 2])):
        np.testing.assert_allclose(mean.sel(population=name), norms[:, members].mean(1), 1e-6)
    assert "tracers (2)" in trajstore_cli("summary", run, *ours).stdout
    refused = trajstore_cli("summary", run, "--population", "late=tokens > 8", rc=2)
    assert "(did you mean 'token'?) in the population" in refused.stderr


def test_populations_have_a_line_each_and_a_note_if_they_are_empty(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    masks = {"is_none": np.zeros(TOKENS, bool), "is_first": np.arange(TOKENS) < 1}
    run = recorded(tmp_path / "run.zarr", populations=masks)
    note = "Note: the population none has no token.\n"
    printed = trajstore_cli("info", run).stdout
    assert "Populations: first 1 token, none 0 tokens.\n" in printed
    assert note in printed
    assert note in trajstore_cli("summary", run).stdout
    printed = trajstore_cli("analyze", run, "distinct", "--population", "two=token < 2").stdout
    rows = [line.split() for line in printed.splitlines() if line.startswith("  distinct ")]
    assert [row[1] for row in rows][-3:] == ["none", "first", "two"]
    assert rows[-3][-5:-2] == ["0", "0", "0"]
    assert note in printed


TWO = ("centroid", "--population", "two=token < 2", "--select")


def test_wrong_words_of_analyze_are_answered_by_one_sentence(run: Path, trajstore_cli: Cli) -> None:
    for words, rc, sentence in (
        (("clusters", "--population", "dead"), 2, "with --select population=dead\n"),
        (("clusters", "--set", "population"), 2, "got 'population', expected an option of"),
        (("displacement", "--set", "till=9"), 2, "'till=9'"),
        (("freeze", "speed", "--set", "min_unchanged=3"), 2, "single quantity"),
        (("crossings", "--set", "quantity=batch"), 1, "record it with --variables matrix,batch\n"),
        (("displacement", "--vectors", "centre"), 2, "(did you mean 'centroid'?), expected one of"),
        (("speed", "--min-unchanged", 1), 2, "min_unchanged=1 for speed; only these have it: fre"),
        ((*TWO, "population=twos"), 2, "no population 'twos' (did you mean 'two'?); choose from"),
        (("speed", "--select", "population=dead"), 2, "this result has no populations"),
    ):
        said = trajstore_cli("analyze", run, *words, rc=rc).stderr
        assert sentence in said
        assert len(said.strip().splitlines()) == 1


def test_a_window_is_noted(run: Path, trajstore_cli: Cli) -> None:
    window = ("analyze", run, "freeze", "--select", "step=2:5")
    note = "values are those of the whole run; --within uses the selected steps only"
    assert note in trajstore_cli(*window).stdout
    assert note not in trajstore_cli(*window, "--within").stdout
    for options, number in (((), TOKENS), (("--min-unchanged", 1), 0)):
        printed = trajstore_cli("analyze", run, "freeze", "--json", *options).stdout
        assert json.loads(printed)["frozen_since"]["flags"] == {"not_frozen": number}


def test_a_part_of_the_tokens_or_of_the_result_is_selected(run: Path, trajstore_cli: Cli) -> None:
    options = ("--select", "token=0,6", "--vectors", "grad")
    printed = trajstore_cli("analyze", run, "displacement", *options).stdout
    assert "step 9 × token 2" in printed
    printed = trajstore_cli("analyze", run, *TWO, "population=two,all", "--json").stdout
    assert [*json.loads(printed)["centroid"]["populations"]] == ["two", "all"]


def test_the_meaning_of_minus_one_is_printed(run: Path, trajstore_cli: Cli) -> None:
    printed = trajstore_cli("analyze", run, "clusters").stdout
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "events all no_row_before 4 of 40 10.0%" in lines
    assert not any(line.startswith("cluster outside") for line in lines)
    for name in ("cluster", "events", "herfindahl"):
        rows = [row for row in printed.splitlines() if row.startswith(f"  {name} ")]
        assert all(row.split()[-1] in ("1", "10.0%") for row in rows)


def test_counts_and_rankings_are_printed() -> None:
    labels = {"cause": ["lr", "moments"], "outcome": ["moves", "rests"]}
    counts = xr.DataArray([[1, 2000], [3, 4]], labels, [*labels], name="counts").to_dataset()
    facts = describe(counts)
    assert facts["counts"]["values"] == [[1, 2000], [3, 4]]
    assert facts["counts"]["labels"] == labels
    assert "values" not in describe(counts.astype(float))["counts"]
    near = xr.DataArray([[1000, 3], [7, -1]], {"step": [0, 9], "rank": [1, 2]}, ["step", "rank"])
    found = xr.Dataset({"nearest": near, "distance": near / 2})
    texts = np.array([["a", " b"], ["'", ""]])
    with output.out.capture() as captured:
        print_description(facts)
        print_description(describe(found.assign_coords(text=(near.dims, texts))))
        print_description(describe(found.isel(rank=[0] * 999)))
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["cause", "moves", "rests"] in lines
    assert ["lr", "1", "2,000"] in lines
    assert ["0", "1000", "'a'", "3", "'", "b'"] in lines
    assert ["9", "3.5", "-0.5"] in lines
    assert captured.get().count("writes the values of nearest, distance, too many") == 1
    assert np.isnan(describe(found)["nearest"]["mean"]), "tokens are not averaged"


def test_only_results_are_overwritten(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    own, result = Path(shutil.copytree(run, tmp_path / "run.zarr")), tmp_path / "result.zarr"
    trajstore_cli("analyze", run, "freeze", "-o", result)
    trajstore_cli("analyze", run, "freeze", "-o", result, "--overwrite")
    (tmp_path / "home.token.csv").mkdir()
    for target in (own, tmp_path / "home.csv"):
        done = trajstore_cli("analyze", own, "freeze", "-o", target, "--overwrite", rc=2)
        assert "not an analysis result" in " ".join(done.stderr.split())
    assert verify(own).clean
    # That it is there is said before a run is opened.
    done = trajstore_cli("analyze", tmp_path / "no.zarr", "freeze", "-o", result, rc=2)
    assert "already exists" in " ".join(done.stderr.split())


def test_several_runs(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    with begin(tmp_path / "other.zarr") as other:
        extend(other, range(2))
        extend(other, range(2, 10), seed=1)
    written = tmp_path / "speed.zarr"
    trajstore_cli("analyze", run, other.path, "speed", "-o", written)
    got = xr.open_zarr(written)
    assert got.speed.dims == ("run", "step", "token")
    assert got.run.values.tolist() == [run.stem, "other"]
    reported = trajstore_cli("analyze", tmp_path / "*.zarr", "divergence", rc=1).stderr
    assert "not a run" in reported, "a pattern finds what was written, too"
    words = ("analyze", run, other.path, "divergence", "--select", "step=5:8")
    assert "distance" in trajstore_cli(*words).stdout
    for within, step in (((), 2), (("--within",), 5)):
        facts = json.loads(trajstore_cli(*words, *within, "--json").stdout)
        assert facts["first_difference"]["max"] == step


@pytest.mark.nightly
def test_computing_on_a_cluster(run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
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
    expected = analysis.lifecycle(open_run(run)).compute()
    xr.testing.assert_equal(xr.open_zarr(file).load(), expected)


@pytest.mark.nightly
@pytest.mark.torch
def test_another_parameter_takes_the_place_of_w(tmp_path: Path, trajstore_cli: Cli) -> None:
    pytest.importorskip("torch")
    from trainings import record_gpt2

    run, name = record_gpt2(tmp_path).path, "transformer.wpe.weight"
    chosen = ("--parameter", name, "--population", "first=row < 3")
    file, figure = tmp_path / "moved.zarr", tmp_path / "moved.png"
    trajstore_cli("analyze", run, "displacement", *chosen, "--by-population", "-o", file)
    W = open_run(run).traj.parameter(name).W.values
    expected = np.linalg.norm(W[-1, :3].astype("f8") - W[0, :3], axis=-1).max()
    found = xr.open_zarr(file)["max"].sel(population="first")[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    printed = trajstore_cli("analyze", run, "speed", *chosen, "--select", "row=0,1").stdout
    assert "row 2" in printed
    assert "token" not in printed
    options = ("--set", "metrics=spectral", "--set", "of=qk")
    assert "parameter 4" in trajstore_cli("analyze", run, "layers", *options).stdout
    part = ("--select", "metric=ov:stable_rank", "--select", "parameter=*.h.1.*", "--overwrite")
    for words in (("displacement", *chosen), ("layers", *part)):
        trajstore_cli("plot", run, *words, "-o", figure)
        assert figure.stat().st_size
    lost = analysis.summary(open_run(run)).param_update_lost.sel(when="last", parameter=name)
    (row,) = (line for line in trajstore_cli("summary", run).stdout.splitlines() if name in line)
    assert row.split()[-1] == f"{float(lost):.2%}"


def test_the_first_difference_is_named(run: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    types = {"W": "float32", "logits": "float32"}
    with begin(tmp_path / "other.zarr", variables=types) as other:
        for step in range(7):
            W = values(step)["W"]
            W[2, 0] += step == 4
            other.append(step=step, W=W, logits=np.zeros(TOKENS, "f4"))
    text = trajstore_cli("compare", run, other.path).stdout
    assert "Over 7 common steps and 1 common variable, the runs differ in W.\n" in text
    assert "The first run has 10 rows, the second 7.\n" in text
    assert "Only the first run has grad, loss, lr.\nOnly the second run has logits.\n" in text
    facts = json.loads(trajstore_cli("compare", run, other.path, "--json").stdout)
    assert facts["only_first"] == ["grad", "loss", "lr"]
    found = facts["variables"]["W"]
    assert (found["first_difference"], found["differing_steps"]) == (4, 1)
    assert [value > 0 for value in found["distance"]] == [step == 4 for step in range(7)]


def test_over_names_the_step_from_which_losses_differ(
    run: Path, tmp_path: Path, trajstore_cli: Cli
) -> None:
    with begin(tmp_path / "other.zarr") as other:
        extend(other, range(9))
        words = ("compare", run, other.path, "--over")
        text = trajstore_cli(*words, "1%").stdout
        other.append(step=9, **values(9) | {"loss": np.float32(4.2)})  # in place of 4.1
    assert "are identical, bit for bit" in text
    assert "The losses never differ by more than 1%; the largest difference: 0.000%" in text
    text = " ".join(trajstore_cli(*words, "1%").stdout.split())
    assert "differ by more than 1% from step 9 on, at 1 of 1 step; the largest" in text
    facts = json.loads(trajstore_cli(*words, "50%", "--json").stdout)
    assert facts["loss"]["first_over"] == -1
    assert "expected a percentage" in trajstore_cli(*words, "1", rc=2).stderr


def test_a_name_stands_for_the_two_matrices_of_a_training(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    types = {"W": "float32"}
    for name, seed in (("E", 0), ("W", 1)):
        kept = {"recording": {"parameter": name}}
        with begin(tmp_path / f"un.{name}.zarr", variables=types, attributes=kept) as run:
            run.append(step=0, W=values(0, seed)["W"])
        if name == "E":
            alone = trajstore_cli("compare", tmp_path / "un.zarr", rc=2).stderr
            assert "expected two runs" in alone
    text = trajstore_cli("compare", tmp_path / "un.zarr").stdout
    assert "Over 1 common step and 1 common variable, the runs differ in W.\n" in text


def test_what_cannot_be_compared_says_why(run: Path, tmp_path: Path, trajstore_cli: Cli) -> None:
    for token, rc, told in (
        ([12, 6, 9, 0, 3], 0, "has 6 tokens, the second 5; only the 5 common tokens"),
        ([7, 8], 2, "no common token"),
    ):
        path = tmp_path / f"{rc}.zarr"
        with RunWriter.create(path, token=token, hidden=3, variables={"W": "float32"}) as other:
            other.append(step=0, W=np.zeros((len(token), 3), "f4"))
        done = trajstore_cli("compare", run, path, rc=rc)
        assert told in " ".join((done.stdout + done.stderr).split())


def test_figures(example_run: Path, trajstore_cli: Cli, tmp_path: Path) -> None:
    file, other = tmp_path / "sheet.svg", tmp_path / "other.zarr"
    other.symlink_to(example_run)
    part = ("--select", "step=2:", "--select", "token=live")
    options = ("--style", "dark", "--population", "few=token < 9")
    for words, shown in (
        (("displacement", "loss", *part, "--vectors", "centroid:all"), "centroid of all 1 × 4"),
        (("grad-norms", *options), "few tokens"),
        (("loss",), "gatsby.zarr · W 128 × 4, AdamW, bfloat16"),
        ((other, "divergence", "--common-steps", "--lattice", "native"), "other"),
        (("film", "--frames", "even:3", "--style", "dark"), "frozen ("),
        (("speed", *part, "--select", "population=live"), "live tokens"),
    ):
        out = trajstore_cli("plot", example_run, *words, "-o", file, "--overwrite").stdout
        assert out.startswith(f"Wrote {file}: ")
        assert shown in file.read_text(), words
    assert "dead tokens" not in file.read_text()


def test_wrong_options_of_plot_are_errors(
    example_run: Path, trajstore_cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_text("mine")
    for arguments, code, sentence in (
        (("film", "loss"), 2, "film is drawn alone, got film, loss; draw the others"),
        (("loss", "--frames", 5), 2, "--frames is for film, got loss; leave it out"),
        (("loss", "--select", "step=5:2"), 2, "no recorded step is in '5:2'"),
        (("freeze", "--select", "population=mostly_dead"), 2, "choose from dead, live, all"),
        (("trajectory", "--plane", "hidden_mean"), 1, "hidden_mean"),
        (("loss", "-o", file), 2, "replace it with --overwrite"),
    ):
        error = trajstore_cli("plot", example_run, *arguments, rc=code).stderr
        assert sentence in " ".join(error.split()), arguments
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
    out = trajstore_cli("plot", results, "all", "-o", tmp_path / "results.svg").stdout
    assert "results.svg: text_loss." in out
    assert "text is left out: text has texts" in out
    error = trajstore_cli("plot", results, "freeze", rc=2).stderr
    assert "expected one or more of all, text, text_loss" in error
    error = trajstore_cli("plot", results, example_run, "text_loss", rc=1).stderr
    assert "gatsby.zarr is not the store of an evaluation" in " ".join(error.split())


def test_a_used_address_is_reported_before_a_run_is_read(
    tmp_path: Path, trajstore_cli: Cli
) -> None:
    pytest.importorskip("panel")
    words = ("explore", tmp_path / "no.zarr", "--host", "::1")
    assert "on '::1', port 5006" in trajstore_cli(*words, rc=2).stderr
