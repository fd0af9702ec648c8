from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.text import Text

from trajstore.cli.output import PlainConsole, PlainTable, in_command, printable

HOSTILE = "\x1b[31mred\x1b]0;t [bold]<b>[/bold] :smile: \u202e\ud800\x9b"


def test_what_a_terminal_would_obey_is_escaped_and_the_rest_stays() -> None:
    assert printable("plain <é> 漢 ›") == "plain <é> 漢 ›"
    assert printable("\x1b[31m\x07\x9b\u202e\u200b\ud800") == (
        r"\x1b[31m\x07\x9b\u202e\u200b\ud800"
    )
    assert printable("a\nb\r") == r"a\nb\r"
    assert printable("a\nb\r", keep="\n") == "a\nb\\r"


@pytest.mark.parametrize("shown", [HOSTILE, Text(HOSTILE), Text(HOSTILE, "bold")])
def test_a_console_and_its_tables_show_texts_as_they_are(shown: str | Text) -> None:
    written = io.StringIO()
    console = PlainConsole(file=written, width=200)
    table = PlainTable("name")
    table.add_row(shown)
    console.print(shown)
    console.print(table)
    assert written.getvalue().count(printable(HOSTILE)) == 2
    assert "\x1b" not in written.getvalue()


def test_a_closed_standard_error_does_not_end_the_command() -> None:
    code = """
import sys
from trajstore.cli.output import err, out
for number in range(3):
    err.print("x" * 100_000)
print("still heard by nobody", file=sys.stderr, flush=True)
out.print("done")
"""
    readable, writable = os.pipe()
    os.close(readable)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writable, text=True, timeout=60
    )
    os.close(writable)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_command_prints_options_in_place_of_arguments() -> None:
    named = "got every=0; overwrite=True (at=…), map='W=a b'. Or training.device=cpu, data.x=3e-4"
    given = "got --every 0; --overwrite (--at …), --map 'W=a b'. Or --device cpu, --set data.x=3e-4"
    assert in_command(f"{named}, lr=1, join='inner'") == f"{given}, lr=1, --common-steps"
    others = "f(run, at=STEP), 'at=3', --set at=3, at=-1, at=Path('a'), config.training.steps=9"
    assert in_command(others) == others
