"""The report prints results, loads nothing, and shows control characters as symbols."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_run import OPTIMIZER

from trajstore import RunWriter, analysis, open_run
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.results.report_page import write_report, write_runs_report
from trajstore.errors import InvalidArgument, RunExists, RunNotFound

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


ODD = "<script>alert(1)</script>"
ANSI = "\x1b[31mred\x07"


class Page(HTMLParser):
    """Elements with their attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def shown(self) -> str:
        return " ".join(self.text.split())


def small_run(path: Path, rows: int = 4, **attributes: Any) -> Path:
    with RunWriter.create(
        path,
        token=np.arange(3),
        hidden=2,
        variables={"W": "float32", "loss": "float32"},
        is_dead=np.array([True, False, False]),
        token_text=[ODD, ANSI, "c"],
        attributes=attributes,
        block_rows=2,
    ) as writer:
        for step in range(rows):
            W = np.full((3, 2), min(step, 2), "f4")
            writer.append(step, W=W, loss=np.float32("nan" if not step else 3 / step))
    return path


FEW = [FIGURES[name] for name in ("loss", "param_update_lost")]
"""The tests of the figures draw all of them."""


def test_verdicts_are_those_of_the_analysis(example_run: Path, tmp_path: Path) -> None:
    html = write_report(
        example_run, tmp_path / "page.html", min_unchanged=3, figures=FEW
    ).read_text()
    page = Page(html)
    ds = open_run(example_run)
    rest = analysis.freeze(ds, min_unchanged=3).compute()
    dead = ds.is_dead.values
    assert "118 dead tokens" in page.shown
    when = rest.frozen_since.values[dead].max()
    assert (
        f"All tokens were frozen at step {when} (unchanged for the last 3 steps or more)"
        in page.shown
    )
    cause = analysis.freeze_cause(ds).values[:, dead]
    still = cause[cause > 0]
    share = f"{(still == analysis.CAUSES.index('lost_update')).mean():.1%}"
    assert (
        f"Causes of {still.size:,} steps without change (tokens × steps): {share} lost"
        in page.shown
    )
    norms = analysis.grad_norms(ds).values[1:, dead]
    assert (norms > 0).all()
    assert f"No gradient was zero, of {norms.size:,} gradients" in page.shown
    assert "Not verified." in page.shown
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "a"}
    sources = [a[key] for _, a in page.elements for key in ("src", "srcset") if key in a]
    assert len(sources) == 2  # the run lacks param_update_lost
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?:|@import|url\(", html)


def test_a_window_is_of_the_figures_or_of_the_whole_page(example_run: Path, tmp_path: Path) -> None:
    def shown_text(name: str, **options: Any) -> str:
        return Page(
            write_report(
                example_run, tmp_path / name, figures=[FIGURES["loss"]], **options
            ).read_text()
        ).shown

    shown = shown_text("shown.html", steps="12:19")
    assert "The figures show a window of steps; all other numbers describe the whole run." in shown
    assert "No token was frozen (unchanged for the last 50 steps or more)." in shown
    assert "Displacement from step 0 to 20" in shown
    within = shown_text("within.html", steps="12:19", within=True, min_unchanged=1)
    assert "figures use steps 12 to 18 alone." in within
    assert "unchanged for the last 1 step or more" in within
    assert "Displacement from step 12 to 18" in within


def test_texts_are_escaped_everywhere(tmp_path: Path) -> None:
    config = {"data": {"corpus": ODD, "most": None, "size": 1e-05}, "training": {"on": True}}
    run = small_run(
        tmp_path / "<b>run.zarr",
        config=config,
        optimizer=OPTIMIZER,
        provenance={ANSI: ODD, "what_if": {"settings": ["a=1"], "caveat": "These are open loop."}},
    )
    html = write_report(run, tmp_path / "page.html", check=True, figures=FEW).read_text()
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.elements}
    assert "b" not in {tag for tag, _ in page.elements}
    assert page.text.count(ODD) >= 3  # token, corpus, provenance: as text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", html)
    assert "␛[31mred␇" in page.text
    assert "This is a what-if run (a=1): These are open loop." in page.shown
    assert "Every stored byte was compared with its checksum: sound; 4 rows" in page.shown
    assert "param_update_lost: " in page.shown
    assert "This run begins with rows of another run" in page.shown
    assert "run.toml" not in page.shown


@pytest.mark.parametrize("name", ["my text.txt", "gatsby stand-in (embedded)"])
def test_how_a_run_is_made_again(tmp_path: Path, name: str) -> None:
    config = {"data": {"corpus": ODD, "most": None, "size": 1e-05}, "training": {"on": True}}
    text = {"name": name, "bytes": 12345, "sha256": "ab" * 32}
    run = small_run(tmp_path / "run.zarr", config=config, provenance={"corpus": text})
    page = Page(write_report(run, tmp_path / "page.html", figures=()).read_text())
    toml = page.text.split("as run.toml:")[1].split("Provenance")[0]
    assert tomllib.loads(toml) == {
        "data": {"corpus": ODD, "size": 1e-05}, "training": {"on": True}
    }  # fmt: skip
    given = name == "my text.txt"
    assert ("--config run.toml --corpus 'my text.txt' -o again.zarr" in page.shown) == given
    assert (f"The text has 12,345 bytes, SHA-256 {'ab' * 32}." in page.shown) == given
    assert ("--config run.toml -o again.zarr" in page.shown) != given


def test_runs_of_which_little_is_known(tmp_path: Path) -> None:
    page = Page(
        write_report(small_run(tmp_path / "a.zarr"), tmp_path / "a.html", figures=FEW).read_text()
    )
    assert "The run has no recorded configuration" in page.shown
    assert "Not computed: causes, because" in page.shown
    page = Page(
        write_report(
            small_run(tmp_path / "b.zarr", rows=0), tmp_path / "b.html", figures=FEW
        ).read_text()
    )
    assert "0 rows" in page.shown
    assert "none of these figures can be drawn" in page.shown


def test_a_report_needs_a_run_and_a_new_html_file(example_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"expected NAME\.html"):
        write_report(example_run, tmp_path / "page.pdf")
    with pytest.raises(RunNotFound):
        write_report(tmp_path / "none.zarr", tmp_path / "page.html")
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(RunExists, match="already exists"):
        write_report(example_run, page)
    assert page.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_run_of_changes_alone_has_a_summary_without_centroids(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    with RunWriter.create(
        run, token=np.arange(3), hidden=2, variables={"delta": "float32"}, block_rows=2
    ) as writer:
        for step in range(4):
            writer.append(step, delta=np.full((3, 2), float(step), "f4"))
    page = Page(write_report(run, tmp_path / "page.html", figures=FEW).read_text())
    assert "Displacement from step 0 to 3" in page.shown
    assert "Norm of the centroid" not in page.shown


def write(path: Path, *, later: float = 0, tokens: int = 3, lr: float = 0.1) -> str:
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=2,
        variables={"W": "float32", "loss": "float32"},
        config={"training": {"seed": 1}, "optimizer": {"lr": lr}, "<b>": {"x": "<i>"}},
    ) as run:
        for step in range(6):
            W = np.full((tokens, 2), step, "f4")
            W[0, 0] += later * (step > 2)
            run.append(step, W=W, loss=np.float32("nan" if not step else 3 / step))
    return str(path)


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / "<s>.zarr"),
        write(tmp_path / "same.zarr", lr=0.2),
        write(tmp_path / "other.zarr", later=0.5, lr=0.3),
        write(tmp_path / "wide.zarr", tokens=4, lr=0.4),
    ]
    few = [FIGURES[name] for name in ("loss", "divergence")]
    page = write_runs_report(runs, tmp_path / "page.html", check=True, figures=few).read_text()
    shown = page.replace("&lt;", "<").replace("&gt;", ">")
    assert f"lr=0.2: W equals that of {runs[0]} at every step, bit for bit." in shown
    assert (
        f"lr=0.3: W differs from that of {runs[0]} since step 3. At step 5, 16.7% of its "
        "elements differ; the distance is 0.5 (L2)."
    ) in shown
    assert "lr=0.4: not compared" in shown
    assert "They differ in lr, 4 complete" in shown
    assert "0.6000" in page, "the final loss"
    assert page.count("checksum: sound;") == 4
    assert page.count("<figure") == 1, "the losses of all runs; one run has no divergence"
    assert "token has length 3 and 4" in shown
    assert "<s>" not in page
    assert not re.search(r"<a |href|<script", page)
