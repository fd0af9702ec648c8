"""Output of `info`, `summary` and `analyze`, without a process per call."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from click.testing import CliRunner, Result
from growing_runs import HOSTILE, TOKENS, begin, extend

from trajstore import analysis, open_run
from trajstore.analysis.several_quantities import ACROSS_RUNS, ALONE, QUANTITIES
from trajstore.cli import output
from trajstore.cli.main import main
from trajstore.schema import MIN_UNCHANGED


def call(*arguments: Any, rc: int = 0) -> Result:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == rc, done.output
    return done


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


def test_info_names_the_parameter_and_a_recorder_that_is_gone(tmp_path: Path) -> None:
    run = begin(tmp_path / "run.zarr", attributes={"recording": {"parameter": "lm_head.weight"}})
    extend(run, range(4))
    printed = call("info", run.path).stdout
    assert "run.zarr: recording, 4 rows" in printed
    assert "Recorded parameter: lm_head.weight." in printed
    run._lock.release()  # as the system does if a process dies
    for runs in ([run.path], [run.path, run.path]):
        assert "recording, but its process is gone" in call("info", *runs).stdout
    assert json.loads(call("info", run.path, "--json").stdout)["written_to"] is False


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns of the terminal."""
    monkeypatch.setattr(output.out, "width", 80)
    return 80


def test_info_fits_80_columns_and_cuts_no_name(tmp_path: Path, columns: int) -> None:
    names = ["W", "grad", "grad_token_norm", "W_step_norm", "exp_avg_sq"]
    shapes = {name: (TOKENS,) if name.endswith("_norm") else (TOKENS, 3) for name in names}
    with begin(tmp_path / "run.zarr", variables=dict.fromkeys(names, "float32")) as run:
        run.append(step=0, **{name: np.zeros(shape, "f4") for name, shape in shapes.items()})
    lines = call("info", run.path).stdout.splitlines()
    table = lines[[line.split()[:1] == ["array"] for line in lines].index(True) :]
    for name in (*names, "token_text", "text"):
        assert any(name in line.split() for line in table), name
    assert max(len(line.rstrip()) for line in table if "×" in line) <= columns
    assert "…" not in "".join(lines)


def test_texts_of_others_do_no_harm(tmp_path: Path, columns: int) -> None:
    hostile = {text: {text: text} for text in (*HOSTILE[:3], "[bold red]x[/bold red]")}
    path = recorded(tmp_path / "\x1b[31m[red]run\u202e.zarr", config=hostile)
    for name in ("summary", "info"):
        printed = call(name, path).stdout
        assert not [sign for sign in printed if not sign.isprintable() and sign != "\n"]
    assert r"\x1b[31mred\x1b]0;title" in printed
    assert "<script>alert(1)</script>" in printed
    assert "[bold red]x[/bold red] = " in printed.replace("[bold red]x[/bold red].", "")
    assert "\x1b" not in call("info", tmp_path / "\x1b[2Jnothing", rc=2).stderr


@pytest.mark.parametrize("all_dead", [True, False])
def test_a_summary_leaves_out_a_population_without_tokens(all_dead: bool, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.zarr", is_dead=np.full(TOKENS, all_dead))
    printed = call("summary", path).stdout
    assert (f"dead ({TOKENS})" in printed) == all_dead
    assert ("There are no dead tokens" in printed) != all_dead
    assert not any(text in printed for text in ("dead (0)", "live (0)", "nan"))


def test_analyze_lists_its_quantities() -> None:
    lines = call("analyze", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*sorted([*QUANTITIES, *ALONE]), *ACROSS_RUNS]
    assert any("Options: since." in line for line in lines)


def test_populations_have_a_line_each_and_a_note_if_they_are_empty(tmp_path: Path) -> None:
    masks = {"is_none": np.zeros(TOKENS, bool), "is_first": np.arange(TOKENS) < 1}
    run = recorded(tmp_path / "run.zarr", populations=masks)
    note = "Note: the population none has no token.\n"
    printed = call("info", run).stdout
    assert "Populations: first 1 token, none 0 tokens.\n" in printed
    assert note in printed
    assert note in call("summary", run).stdout
    printed = call("analyze", run, "distinct", "--population", "two=token < 2").stdout
    rows = [line.split() for line in printed.splitlines() if line.startswith("  distinct ")]
    assert [row[1] for row in rows][-3:] == ["none", "first", "two"]
    assert rows[-3][-5:-2] == ["0", "0", "0"]
    assert note in printed


TWO = ("centroid", "--population", "two=token < 2", "--select")


@pytest.mark.parametrize(
    ("words", "rc", "sentence"),
    [
        (("clusters", "--population", "dead"), 2, "expected NAME=EXPRESSION or NAME=FILE"),
        (("clusters", "--population", "dead"), 2, "with --select population=dead\n"),
        (("clusters", "--set", "population"), 2, "got 'population', expected an option of"),
        (("crossings", "--set", "quantity=batch"), 1, "record it with --variables matrix,batch\n"),
        (("displacement", "--vectors", "centre"), 2, "(did you mean 'centroid'?), expected one of"),
        (("speed", "--min-unchanged", 1), 2, "min_unchanged=1 for speed; only these have it: fre"),
        ((*TWO, "population=twos"), 2, "no population 'twos' (did you mean 'two'?); choose from"),
        (("speed", "--select", "population=dead"), 2, "this result has no populations"),
    ],
)
def test_wrong_words_of_analyze_are_answered(
    words: tuple[Any, ...], rc: int, sentence: str, run: Path
) -> None:
    assert sentence in call("analyze", run, *words, rc=rc).stderr


def test_other_vectors_take_the_place_of_w(run: Path) -> None:
    printed = call("analyze", run, "displacement", "--vectors", "centroid:all").stdout
    assert "step 10 × token 1" in printed


def test_a_window_is_noted(run: Path) -> None:
    note = "values are those of the whole run; --within uses the selected steps only"
    assert note in call("analyze", run, "freeze", "--select", "step=2:5").stdout
    assert note not in call("analyze", run, "freeze", "--select", "step=2:5", "--within").stdout
    for options, number in (((), TOKENS), (("--min-unchanged", 1), 0)):
        facts = json.loads(call("analyze", run, "freeze", "--json", *options).stdout)
        assert facts["frozen_since"]["flags"] == {"not_frozen": number}
    assert f"default: {MIN_UNCHANGED}." in " ".join(call("analyze", "--help").stdout.split())


def test_a_part_of_the_tokens_or_of_the_result_is_selected(run: Path) -> None:
    printed = call("analyze", run, "displacement", "--select", "token=0,6").stdout
    assert "step 10 × token 2" in printed
    facts = json.loads(call("analyze", run, *TWO, "population=two,all", "--json").stdout)
    assert [*facts["centroid"]["populations"]] == ["two", "all"]


def test_the_meaning_of_minus_one_is_printed(run: Path) -> None:
    printed = call("analyze", run, "clusters").stdout
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "events all no_row_before 4 of 40 10.0%" in lines
    assert not any(line.startswith("cluster outside") for line in lines)
    for name in ("cluster", "events", "herfindahl"):
        rows = [row for row in printed.splitlines() if row.startswith(f"  {name} ")]
        assert all(row.split()[-1] in ("1", "10.0%") for row in rows)


def test_a_result_that_is_there_is_refused_before_a_run_is_opened(tmp_path: Path) -> None:
    (tmp_path / "mine.nc").write_text("mine")
    done = call("analyze", tmp_path / "no.zarr", "freeze", "-o", tmp_path / "mine.nc", rc=2)
    assert "already exists" in done.stderr.replace("\n", " ")


@pytest.mark.nightly
@pytest.mark.torch
def test_another_parameter_takes_the_place_of_w(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trainings import record_gpt2

    run, name = record_gpt2(tmp_path).path, "transformer.wpe.weight"
    chosen = ("--parameter", name, "--population", "first=row < 3")
    call("analyze", run, "displacement", *chosen, "--by-population", "-o", tmp_path / "moved.zarr")
    W = open_run(run).traj.parameter(name).W.values
    expected = np.linalg.norm(W[-1, :3].astype("f8") - W[0, :3], axis=-1).max()
    found = xr.open_zarr(tmp_path / "moved.zarr")["max"].sel(population="first")[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    printed = call("analyze", run, "speed", *chosen, "--select", "row=0,1").stdout
    assert "row 2" in printed
    assert "token" not in printed
    spectral = call("analyze", run, "layers", "--set", "metrics=spectral", "--set", "of=qk").stdout
    assert "parameter 4" in spectral
    pytest.importorskip("matplotlib")
    call("plot", run, "displacement", *chosen, "-o", tmp_path / "moved.png")
    assert (tmp_path / "moved.png").stat().st_size
    part = ("--select", "metric=ov:stable_rank", "--select", "parameter=*.h.1.*")
    call("plot", run, "layers", *part, "-o", tmp_path / "heads.png")
    assert (tmp_path / "heads.png").stat().st_size
    lost = analysis.summary(open_run(run)).param_update_lost.sel(when="last", parameter=name)
    (row,) = (line for line in call("summary", run).stdout.splitlines() if name in line)
    assert row.split()[-1] == f"{float(lost):.2%}"


def test_the_summary_names_the_notes_of_its_runs(tmp_path: Path) -> None:
    notes = [
        {"note": text, "first_step": 2, "last_step": 9, "count": count}
        for text, count in (("loss is a sum", 3), ("lr is NaN", 1))
    ]
    for name, kept in (("a", notes), ("b", notes[:1])):
        with begin(tmp_path / name) as run:
            extend(run, range(10))
            run.notes = kept
    shown = call("summary", tmp_path / "a").output
    assert "Note: loss is a sum (3 steps, 2 to 9)." in shown
    assert "Note: lr is NaN (step 2)." in shown
    both = call("summary", tmp_path / "a", tmp_path / "b").output
    assert "Note: loss is a sum (2 runs)." in both
    assert f"Note: lr is NaN ({tmp_path / 'a'})." in both


def test_a_selected_step_has_the_divergence_of_the_whole_run(run: Path, tmp_path: Path) -> None:
    with begin(tmp_path / "other.zarr") as other:
        extend(other, range(2))
        extend(other, range(2, 10), seed=1)
    words = (run, other.path, "divergence", "--select", "step=5:8", "--json")
    assert json.loads(call("analyze", *words).stdout)["first_difference"]["max"] == 2
    assert json.loads(call("analyze", *words, "--within").stdout)["first_difference"]["max"] == 5


def test_a_run_of_one_step_has_one_line_of_each_gradient(tmp_path: Path) -> None:
    with begin(tmp_path / "run.zarr") as run:
        extend(run, range(2))
    printed = call("summary", run.path).stdout
    assert printed.count("dead (2)      1 ") == 1
    assert "Loss: 4.9000 at step 1\n" in printed


def test_a_used_address_and_a_missing_run_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.analysis.exploring.server.check_panel", lambda: None)
    run = tmp_path / "run.zarr"
    assert "on '::1', port 5006" in call("explore", run, "--host", "::1", rc=2).stderr
    assert "there is no run at" in call("explore", run, "--port", 0, rc=2).stderr


def test_the_page_is_opened_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def serving(*given: object) -> Iterator[Callable[[], int]]:
        yield lambda: signal.SIGTERM

    opened: list[str] = []
    folder = "trajstore.analysis.exploring"
    monkeypatch.setattr(f"{folder}.server.check_panel", lambda: None)
    monkeypatch.setattr(f"{folder}.server.serving", serving)
    monkeypatch.setattr(f"{folder}.page.LiveRun", lambda run, report: contextlib.nullcontext(run))
    monkeypatch.setattr("webbrowser.open", opened.append)
    done = call("explore", "run.zarr", "--port", "0", "--open", rc=128 + signal.SIGTERM)
    (address,) = opened
    assert f"at {address} until Ctrl-C" in done.stdout
