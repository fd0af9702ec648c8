"""The command line: the program `trajstore`, shared code of commands, and six commands.

The other commands are in `trajstore.analysis.commands` and `trajstore.trainers.commands`. Each
command opens a library object, calls one method and prints the result.

``errors``
    Errors of commands: one sentence on standard error, and an exit code.
``exchange_commands``
    The commands `export` and `import`.
``info_command``
    The command `info`.
``integrity_commands``
    The commands `verify` and `repair`.
``lacking_characters``
    Similar signs for characters that the encoding of a terminal lacks.
``main``
    The command `trajstore`, which finds all commands through their entry points.
``options``
    Arguments and options that several commands share.
``progress``
    Progress bars on standard error.
``start``
    The start of the process: Ctrl-C prints one sentence even during imports.
``stop_signals``
    Ctrl-C and SIGTERM as a request to stop after the current step.
``tables``
    Tables, JSON and notes, escaped so that text from a run cannot control the terminal.
"""
