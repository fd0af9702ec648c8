"""Entry point of the command. Ctrl-C prints one sentence even during imports.

An encoding that lacks characters, such as ASCII, gets similar signs or escapes.
"""

from __future__ import annotations

import codecs
import sys

from trajstore.cli.stop_signals import stop_at_once

_SIMILAR = dict(zip("×·…–—−▁▂▃▄▅▆▇█", "x*~---_.-=+*##", strict=True))  # each as wide


def replace_lacking_characters() -> None:
    """Let standard output and standard error replace what their encoding lacks."""
    codecs.register_error("trajstore.similar", _similar)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by who started the process
            stream.reconfigure(errors="trajstore.similar")  # type: ignore[union-attr]


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    signs = (_SIMILAR.get(sign) or sign.encode("unicode_escape").decode() for sign in lacking)
    return "".join(signs), error.end


def main() -> None:
    """Import the commands and run the one given on the command line."""
    stop_at_once()
    replace_lacking_characters()
    from trajstore.cli.main import main as commands

    commands(prog_name="trajstore")
