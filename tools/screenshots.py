"""Make the screenshots of `explore` and `report` for README and the how-to guides.

python tools/screenshots.py docs/figures

Records 300 steps of Gatsby to a temporary folder. Needs Chromium, as `chromium`, and the extra
``dev``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

RUN = "gatsby.zarr"
COMMAND = Path(sys.executable).with_name("trajstore")
FLAGS = shlex.split(
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def record() -> None:
    """Record the run."""
    options = shlex.split(f"record --preset gatsby --steps 300 -o {RUN}")
    subprocess.run([COMMAND, *options], check=True)


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
    record()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        explore(browser, target / "explore.png")
        report(browser, target / "report.png")
        browser.close()


if __name__ == "__main__":
    figures = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(figures)
        os.chdir(figures)
