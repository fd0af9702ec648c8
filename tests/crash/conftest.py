"""The last line of a run of these tests: how often it killed, and how often it looked meanwhile."""

from __future__ import annotations

import pytest
from crashing import tally


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tally.kills:
        terminalreporter.write_line(
            f"{tally.kills} kills, {tally.opens} opens by live readers meanwhile"
        )
