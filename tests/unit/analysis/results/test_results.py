"""Reports print results, load nothing and show control characters as symbols; result files."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from disk import Disk
from example_run import OPTIMIZER
from safetensors import safe_open
from safetensors.numpy import load_file

from trajstore import RunWriter, analysis, open_run
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.results.report_page import write_report, write_runs_report
from trajstore.analysis.results.summary import summary_table
from trajstore.analysis.results.write_results import describe, write_result
from trajstore.analysis.scan.result_variables import flag_attributes
from trajstore.errors import InvalidArgument, RunExists, RunNotFound

ODD = "<script>alert(1)</script>"
ANSI = "\x1b[31mred\x07"


def text_of(page: str) -> str:
    return unescape(re.sub(r"<[^<>]*>", "", page))


def shown_on(page: str) -> str:
    return " ".join(text_of(page).split())


def small_run(path: Path, rows: int = 4, tokens: int = 3, later: float = 0, **options: Any) -> Path:
    """A run of a few steps, one element of which is larger by `later` from step 3 on."""
    texts = [ODD, ANSI, "c", "d"][:tokens]
    known = {"is_dead": np.arange(tokens) == 0, "token_text": texts, "block_rows": 2}
    variables = {"W": "float32", "loss": "float32"}
    with RunWriter.create(
        path, token=np.arange(tokens), hidden=2, variables=variables, **known, **options
    ) as writer:
        for step in range(rows):
            W = np.full((tokens, 2), min(step, 2), "f4")
            W[0, 0] += later * (step > 2)
            writer.append(step, W=W, loss=np.float32("nan" if not step else 3 / step))
    return path


FEW = [FIGURES[name] for name in ("loss", "param_update_lost")]
"""The tests of the figures draw all of them."""


def reported(run: Path, folder: Path, **options: Any) -> str:
    """The page of a run."""
    path = folder / "page.html"
    return write_report(run, path, **{"figures": (), "overwrite": True} | options).read_text()


def test_verdicts_are_those_of_the_analysis(example_run: Path, tmp_path: Path) -> None:
    page = reported(example_run, tmp_path, min_unchanged=3, figures=FEW)
    ds = open_run(example_run)
    rest = analysis.freeze(ds, min_unchanged=3).compute()
    dead = ds.is_dead.values
    when = rest.frozen_since.values[dead].max()
    cause = analysis.freeze_cause(ds).values[:, dead]
    still = cause[cause > 0]
    share = f"{(still == analysis.CAUSES.index('lost_update')).mean():.1%}"
    norms = analysis.grad_norms(ds).values[1:, dead]
    for sentence in (
        "118 dead tokens",
        f"All tokens were frozen at step {when} (unchanged for the last 3 steps or more)",
        f"Causes of {still.size:,} steps without change (tokens × steps): {share} lost",
        f"No gradient was zero, of {norms.size:,} gradients",
        "Not verified.",
    ):
        assert sentence in shown_on(page)
    assert not re.search(r"<(script|link|iframe|object|a)\b", page, re.IGNORECASE)
    sources = re.findall(r'\bsrc(?:set)?="([^"]*)"', page)
    assert len(sources) == 2  # the run lacks param_update_lost
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?:|@import|url\(", page)


def test_a_window_is_of_the_figures_or_of_the_whole_page(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run.zarr", rows=9)
    shown = shown_on(reported(run, tmp_path, steps="4:7"))
    assert "The figures show a window of steps; all other numbers describe the whole run." in shown
    assert "Displacement from step 0 to 8" in shown
    within = shown_on(reported(run, tmp_path, steps="4:7", within=True, min_unchanged=1))
    assert "figures use steps 4 to 6 alone." in within
    assert "unchanged for the last 1 step or more" in within
    assert "Displacement from step 4 to 6" in within


CONFIG = {"data": {"corpus": ODD, "most": None, "size": 1e-05}, "training": {"on": True}}


def test_texts_are_escaped_everywhere(tmp_path: Path) -> None:
    what_if = {"settings": ["a=1"], "caveat": "These are open loop."}
    attributes = {"optimizer": OPTIMIZER, "provenance": {ANSI: ODD, "what_if": what_if}}
    run = small_run(tmp_path / "<b>run.zarr", config=CONFIG, attributes=attributes)
    page = reported(run, tmp_path, check=True, figures=FEW)
    assert not re.search(r"<(script|b)\b", page)
    assert text_of(page).count(ODD) >= 3  # token, corpus, provenance: as text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page)
    assert "␛[31mred␇" in text_of(page)
    assert "This is a what-if run (a=1): These are open loop." in shown_on(page)
    assert "Every stored byte was compared with its checksum: sound; 4 rows" in shown_on(page)
    assert "param_update_lost: " in shown_on(page)
    assert "This run begins with rows of another run" in shown_on(page)
    assert "run.toml" not in shown_on(page)


@pytest.mark.parametrize("name", ["my text.txt", "gatsby stand-in (embedded)"])
def test_how_a_run_is_made_again(tmp_path: Path, name: str) -> None:
    text = {"name": name, "bytes": 12345, "sha256": "ab" * 32}
    attributes = {"provenance": {"corpus": text}}
    run = small_run(tmp_path / "run.zarr", config=CONFIG, attributes=attributes)
    page = reported(run, tmp_path)
    toml = text_of(page).split("as run.toml:")[1].split("Provenance")[0]
    expected = {"data": {"corpus": ODD, "size": 1e-05}, "training": {"on": True}}
    assert tomllib.loads(toml) == expected
    given = name == "my text.txt"
    assert ("--config run.toml --corpus 'my text.txt' -o again.zarr" in shown_on(page)) == given
    assert (f"The text has 12,345 bytes, SHA-256 {'ab' * 32}." in shown_on(page)) == given
    assert ("--config run.toml -o again.zarr" in shown_on(page)) != given


def test_runs_of_which_little_is_known(tmp_path: Path) -> None:
    shown = shown_on(reported(small_run(tmp_path / "a.zarr"), tmp_path))
    assert "The run has no recorded configuration" in shown
    assert "Not computed: causes, because" in shown
    shown = shown_on(reported(small_run(tmp_path / "b.zarr", rows=0), tmp_path, figures=FEW))
    assert "0 rows" in shown
    assert "none of these figures can be drawn" in shown
    run = tmp_path / "changes.zarr"
    with RunWriter.create(run, token=range(3), hidden=2, variables={"delta": "float32"}) as writer:
        for step in range(3):
            writer.append(step, delta=np.full((3, 2), float(step), "f4"))
    shown = shown_on(reported(run, tmp_path))
    assert "Displacement from step 0 to 2" in shown
    assert "Norm of the centroid" not in shown


def test_a_report_needs_a_run_and_a_new_html_file(example_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"expected NAME\.html"):
        write_report(example_run, tmp_path / "page.pdf")
    with pytest.raises(RunNotFound):
        write_report(tmp_path / "none.zarr", tmp_path / "page.html")
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(RunExists):
        write_report(example_run, page)
    assert page.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = []
    for name, lr, differing in (
        ("<s>", 0.1, {}),
        ("same", 0.2, {}),
        ("other", 0.3, {"later": 0.5}),
        ("wide", 0.4, {"tokens": 4}),
    ):
        config = {"optimizer": {"lr": lr}, "<b>": {"x": "<i>"}}
        runs.append(str(small_run(tmp_path / f"{name}.zarr", rows=6, config=config, **differing)))
    few = [FIGURES[name] for name in ("loss", "divergence")]
    page = write_runs_report(runs, tmp_path / "page.html", check=True, figures=few).read_text()
    shown = page.replace("&lt;", "<").replace("&gt;", ">")
    assert f"lr=0.2: W equals that of {runs[0]} at every step, bit for bit." in shown
    assert (
        f"lr=0.3: W differs from that of {runs[0]} since step 3. At step 5, 16.7% of its "
        "elements differ; the distance is 0.5 (L2)."
    ) in shown
    assert "lr=0.4: not compared" in shown
    assert "token has length 3 and 4" in shown
    assert "They differ in lr, 4 complete" in shown
    assert "0.6000" in page, "the final loss"
    assert page.count("checksum: sound;") == 4
    assert page.count("<figure") == 1, "the losses of all runs; one run has no divergence"
    assert "<s>" not in page
    assert not re.search(r"<a |href|<script", page)


def test_a_line_for_each_run(make_run, walk):
    bits = walk(5, 4, 3)
    one = make_run(bits, grad=bits.copy(), is_dead=[True, False, False, True])
    other = one.assign(loss=("step", [4.0, 3, 2, 1, 0.5])).drop_vars("grad")
    found = {name: analysis.summary(ds).compute() for name, ds in {"a": one, "b": other}.items()}
    _, columns, rows = summary_table(found)
    assert columns == [
        "run", "last step", "first loss", "last loss",
        "|grad| dead", "|grad| live", "displacement dead", "displacement live",
    ]  # fmt: skip
    means = found["a"].sel(population=["dead", "live"], statistic="mean")
    moved, grad = (
        [f"{value:.4e}" for value in part.values]
        for part in (means.displacement, means.grad_norms.sel(when="last"))
    )
    assert rows == [
        ["a", "4", "", "", *grad, *moved],
        ["b", "4", "3.0000", "0.5000", "", "", *moved],
    ]


def result() -> xr.Dataset:
    return xr.Dataset({"speed": ("step", np.array([1.0, 3.0, np.nan]))}, {"step": [1, 2, 3]})


@pytest.mark.parametrize("times", [1, 1 << 19])
def test_a_result_is_described_in_memory_and_block_by_block(times: int) -> None:
    def repeated(values: np.ndarray, flags: dict[str, Any]) -> xr.DataArray:
        return xr.DataArray(np.tile(values, times), dims="token", attrs=flags)

    kinds = ("gas", "solid")
    variables = {
        "speed": repeated(np.array([1.0, 3.0, np.nan, 2.0]), {}),
        "none": repeated(np.full(4, np.nan, "f4"), {}),
        "since": repeated(np.array([-1, 4, 8, -1]), flag_attributes({-1: "never"})),
        "kind": repeated(np.int8([0, 1, 1, 1]), flag_attributes(kinds, np.int8)),
    }
    found = describe(xr.Dataset(variables).chunk(token=3 * times))
    numbers = {
        key: [one[name] for name in ("min", "mean", "max", "nan")] for key, one in found.items()
    }
    assert numbers["speed"] == [1, 2, 3, times]
    assert numbers["since"] == [4, 6, 8, 0]
    np.testing.assert_array_equal(numbers["none"], [np.nan] * 3 + [4 * times])
    np.testing.assert_array_equal(numbers["kind"], [np.nan] * 3 + [0])
    assert found["since"]["flags"] == {"never": 2 * times}
    assert found["kind"]["flags"] == {"gas": times, "solid": 3 * times}


def test_a_result_is_written_once_and_by_its_ending(tmp_path: Path) -> None:
    (file,) = write_result(result(), tmp_path / "speed.nc")
    with xr.open_dataset(file) as again:
        xr.testing.assert_identical(again.speed.drop_attrs(), result().speed)
    with pytest.raises(RunExists):
        write_result(result(), tmp_path / "speed.nc")
    with pytest.raises(InvalidArgument, match=r"\.zarr, \.nc, \.csv, \.safetensors"):
        write_result(result(), tmp_path / "speed.txt")


def test_a_result_is_written_for_scripts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "speed": (("step", "token"), rng.normal(size=(7, 5)), {"units": "1"}),
            "frozen": ("token", np.array([True, False, True, True, False])),
            "counts": (("step", "kind"), rng.integers(0, 9, (7, 2))),
            "total": ((), np.float32(3)),
            "none": (("step", "nothing"), np.empty((7, 0), "f4")),
        },
        {"step": np.arange(7), "token": np.arange(5, dtype="i4"), "kind": ["gas", "solid"]},
    ).chunk(step=3, token=2)
    (file,) = write_result(ds, tmp_path / "result.safetensors")
    held = load_file(file)
    assert set(held) == {"speed", "frozen", "counts", "total", "none", "step", "token"}
    for name, array in held.items():
        np.testing.assert_array_equal(array, ds[name].values)
        assert array.dtype == ds[name].dtype
    with safe_open(file, "numpy") as opened:
        metadata = {name: json.loads(text) for name, text in opened.metadata().items()}
    assert metadata["kind"] == ["gas", "solid"]
    assert metadata["dims"]["speed"] == ["step", "token"]
    assert metadata["attributes"]["speed"] == {"units": "1"}
    with pytest.raises(InvalidArgument, match="seen has type complex128"):
        write_result(xr.Dataset({"seen": ("x", [1j])}), tmp_path / "other.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["result.safetensors"]


def test_a_result_stays_until_the_one_that_replaces_it_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "speed.zarr"
    write_result(result(), file)
    disk = Disk(monkeypatch)
    survived: list[bool] = []
    remove = shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        survived.append(disk.survives(file))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    write_result(result() + 1, file, overwrite=True)
    assert survived == [True]
    assert xr.open_zarr(file).speed.values[0] == 2.0
