"""Explore a run in Chromium, as `chromium`, while it is recorded: `make browser`."""

from __future__ import annotations

import http.client
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from growing_runs import HOSTILE, begin, extend


def main() -> None:
    """Record eight rows, serve the run, record four more; end with an error if a check fails."""
    with tempfile.TemporaryDirectory() as folder, begin(Path(folder, "run.zarr")) as run:
        extend(run, range(8))
        command = [Path(sys.executable).with_name("trajstore"), "explore", run.path, "--port", "0"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
                explore(found[0], lambda: extend(run, range(8, 12)))
            finally:
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
        assert errors.endswith("trajstore: stopped by Ctrl-C\n")
        assert process.returncode == 130


def explore(address: str, add_rows: Callable[[], None]) -> None:
    """Look at steps and tokens, and at rows that come meanwhile; no foreign page may connect."""
    expect.set_options(timeout=40_000)
    troubles: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1500})
        page.on("console", lambda said: troubles.extend([said.text] * (said.type == "error")))
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
        search = page.locator("input[type=text]").first
        for number, text in ((0, "<SCRIPT>"), (3, "red"), (6, "6")):
            shown = repr(HOSTILE[number // 3])
            search.fill(text)
            expect(page.get_by_text("1 token", exact=True)).to_be_visible()
            cell = page.locator('.tabulator-cell[tabulator-field="text"]')
            expect(cell).to_have_text(shown)
            cell.click()
            expect(page.get_by_text(f"{shown} ({number})", exact=True)).to_be_visible()
        search.fill("red")
        search.press("Enter")
        expect(page.get_by_text(f"{HOSTILE[1]!r} (3)", exact=True)).to_be_visible()

        # A token in the plane: to the right are those that moved.
        plane = page.locator(".bk-Figure").first.bounding_box()
        page.mouse.click(plane["x"] + plane["width"] - 20, plane["y"] + plane["height"] / 2)
        expect(page.get_by_text(re.compile("Last change at step 5"))).to_be_visible()

        # New rows come by themselves; who looked at the last row looks at the new one.
        add_rows()
        expect(page.get_by_text("step 11 of 11")).to_be_visible()
        expect(page.get_by_text("recording, 12 rows")).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert troubles == []
    own = urlsplit(address).netloc
    served = {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:"))}
    assert served == {own}
    for origin, status in (
        (f"http://{own}", http.client.SWITCHING_PROTOCOLS),
        ("http://elsewhere.example", http.client.FORBIDDEN),
    ):
        connection = http.client.HTTPConnection(own, timeout=60)
        headers = {"Origin": origin, "Upgrade": "websocket", "Connection": "Upgrade"}
        headers |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
        headers |= {"Sec-WebSocket-Protocol": "bokeh, token"}
        connection.request("GET", "/ws", headers=headers)
        assert connection.getresponse().status == status
        connection.close()


if __name__ == "__main__":
    main()
