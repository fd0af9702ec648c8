"""The page of `trajstore explore` in a browser, while the run is recorded."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from example_run import OPTIMIZER
from growing_runs import HIDDEN, TOKENS, begin, values

from trajstore import RunWriter

if "TRAJSTORE_BROWSER" not in os.environ:
    pytest.skip("takes half a minute: make browser", allow_module_level=True)
for needed in ("datashader", "holoviews", "panel"):
    pytest.importorskip(needed, reason="needs the extra `explore`")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as `chromium`")
COMMAND = Path(sys.executable).with_name("trajstore")
MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    """A run with 8 rows that goes on. Its moments never change, so its steps are skipped."""
    types = dict.fromkeys(MATRICES, "float32") | {"loss": "float32", "lr": "float64"}
    with begin(tmp_path / "run.zarr", variables=types, attributes={"optimizer": OPTIMIZER}) as made:
        append(made, 8)
        yield made


def append(run: RunWriter, stop: int) -> None:
    still = np.ones((TOKENS, HIDDEN), "f4")
    for step in range(run.rows, stop):
        run.append(step=step, exp_avg=still, exp_avg_sq=still, **values(step))
    run._blocks._last.result()


@pytest.fixture
def address(run: RunWriter, tmp_path: Path) -> Iterator[str]:
    """Of the page; when the test is done, Ctrl-C ends the command with a sentence."""
    command = [COMMAND, "explore", tmp_path / "run.zarr", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/", said)
            assert found, said + process.stderr.read()
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert errors.endswith("trajstore: stopped by Ctrl-C\n")
    assert process.returncode == 130


def test_a_run_is_explored_while_it_is_recorded(run: RunWriter, address: str) -> None:
    expect = sync_api.expect
    expect.set_options(timeout=40_000)
    troubles: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1500})
        page.set_default_timeout(60_000)
        page.on(
            "console", lambda said: troubles.append(said.text) if said.type == "error" else None
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(f"alert {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda socket: asked.append(socket.url))
        page.goto(address)
        expect(page.get_by_text("step 7 of 7, loss 4.3000")).to_be_visible()

        # A step: on the slider, and by a click on a curve.
        page.locator("input[type=range]").first.fill("3")
        expect(page.get_by_text("step 3 of 7, loss 4.7000")).to_be_visible()
        loss = page.locator(".bk-Figure").nth(4).bounding_box()
        page.mouse.click(loss["x"] + loss["width"] - 12, loss["y"] + loss["height"] / 2)
        expect(page.get_by_text("step 7 of 7")).to_be_visible()

        # At the end, playing starts from the first row.
        page.get_by_title("Play", exact=True).click()
        expect(page.get_by_text(re.compile("step [0-4] of 7"))).to_be_visible()
        expect(page.get_by_text("step 7 of 7")).to_be_visible()

        # A token: found by its text, and clicked; shown as Python writes it.
        for text, shown, row in (
            ("<SCRIPT>", "'<script>alert(1)</script>' (0)", "'<script>alert(1)</script>'"),
            ("red", r"'\x1b[31mred\x1b]0;title\x07' (3)", r"'\x1b[31mred\x1b]0;title\x07'"),
            ("6", r"'\u202eright' (6)", r"'\u202eright'"),
        ):
            page.locator("input[type=text]").first.fill(text)
            expect(page.get_by_text("1 token", exact=True)).to_be_visible()
            cell = page.locator('.tabulator-cell[tabulator-field="text"]')
            expect(cell).to_have_text(row)
            cell.click()
            expect(page.get_by_text(shown, exact=True)).to_be_visible()
        page.locator("input[type=text]").first.fill("red")
        page.locator("input[type=text]").first.press("Enter")
        expect(page.get_by_text(r"'\x1b[31mred\x1b]0;title\x07' (3)", exact=True)).to_be_visible()
        page.locator("input[type=text]").first.fill("6")
        page.locator("input[type=text]").first.press("Enter")
        expect(page.get_by_text("Never changed, in 7 rows: skipped.")).to_be_visible()

        # A token in the plane: to the right are those that moved.
        plane = page.locator(".bk-Figure").first.bounding_box()
        page.mouse.click(plane["x"] + plane["width"] - 20, plane["y"] + plane["height"] / 2)
        expect(page.get_by_text(re.compile("Last change at step 5"))).to_be_visible()

        # New rows come by themselves; who looked at the last row looks at the new one.
        append(run, 12)
        expect(page.get_by_text("step 11 of 11")).to_be_visible()
        expect(page.get_by_text("recording, 12 rows")).to_be_visible()

        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert troubles == []
    own = urlsplit(address).netloc
    assert len(asked) > 5
    assert {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:"))} == {
        own
    }
    assert answer(address, f"http://{own}") == http.client.SWITCHING_PROTOCOLS
    assert answer(address, "http://elsewhere.example") == http.client.FORBIDDEN


def answer(address: str, origin: str) -> int:
    """What the server says to a page from there that wants to talk to it."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    headers = {
        "Origin": origin,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "bokeh, token",
    }
    connection.request("GET", "/ws", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status
