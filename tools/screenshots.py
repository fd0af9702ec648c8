"""Make the screenshots of `watch`, `explore` and `report` for README and the how-to guides.

python tools/screenshots.py docs/figures

Records 300 steps of Gatsby to a temporary folder, and takes the picture of `watch` shortly before
the end. Needs Chromium, as `chromium`, and the extra ``dev``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright
from rich.console import Console

from trajstore.cli.watch_view import view
from trajstore.watching.run_follower import RunFollower

RUN = "gatsby.zarr"
COMMAND = Path(sys.executable).with_name("trajstore")
FLAGS = shlex.split(
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
COLUMNS = 100


def watch() -> str:
    """Record the run; return the last view of it before its end, as SVG."""
    options = shlex.split(
        f"record --preset gatsby --steps 300 --set recording.commit_every=1 -o {RUN}"
    )
    follower = RunFollower(RUN)
    drawing = ""
    with subprocess.Popen([COMMAND, *options]) as training:
        while training.poll() is None:
            look = follower.look()
            if look.status == "recording" and look.rows:
                console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
                console.print(view(RUN, look, COLUMNS))
                drawing = console.export_svg(title=f"trajstore watch {RUN}")
            time.sleep(0.2)  # between two views; the recording commits every second
    if training.returncode or not drawing:
        raise SystemExit(f"trajstore {shlex.join(options)} failed")
    return drawing


def terminal(browser: Browser, file: Path, drawing: str) -> None:
    """Picture of a terminal."""
    page = browser.new_page(viewport={"width": 1300, "height": 600})
    page.route("**/*", lambda route: route.abort())  # rich's SVG names a font on the network
    page.set_content(drawing)
    page.locator("svg").screenshot(path=file)


def explore(browser: Browser, file: Path) -> None:
    """Page of `explore` at step 250, with a dead token selected."""
    command = [COMMAND, "explore", RUN, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            address = next(word for word in serving.stdout.readline().split() if "://" in word)
            page = browser.new_page(viewport={"width": 1280, "height": 1180})
            page.goto(address, timeout=120_000)
            expect(page.get_by_text("step 300 of 300")).to_be_visible(timeout=120_000)
            page.locator("input[type=range]").first.fill("250")
            page.locator("input[type=text]").first.fill("@")
            page.locator('.tabulator-cell[tabulator-field="text"]').first.click()
            expect(page.get_by_text("Last change at step")).to_be_visible(timeout=120_000)
            page.wait_for_timeout(10_000)  # plots are drawn after the text
            page.screenshot(path=file)
        finally:
            serving.terminate()


def report(browser: Browser, file: Path) -> None:
    """Top of the page of `report`."""
    subprocess.run([COMMAND, "report", RUN, "--min-unchanged", "3", "--verify"], check=True)
    page = browser.new_page(viewport={"width": 1280, "height": 1180})
    page.goto(Path(RUN).with_suffix(".html").resolve().as_uri())
    page.screenshot(path=file)


def main(target: Path) -> None:
    """Make all screenshots."""
    drawing = watch()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        terminal(browser, target / "watch.png", drawing)
        explore(browser, target / "explore.png")
        report(browser, target / "report.png")
        browser.close()


if __name__ == "__main__":
    figures = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(figures)
        os.chdir(figures)
