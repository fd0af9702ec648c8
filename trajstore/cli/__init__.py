"""The command line: each command opens a library object, calls one method, prints the result.

``exchange_commands``
    Commands that write and read the files of others: export, import.
``info_command``
    The command `info`.
``integrity_commands``
    The commands `verify` and `repair`.
``main``
    The command line: each command opens a library object, calls one method, prints the result.
``options``
    What every command of the command line shares: its run, its --json, and how errors are told.
``printable``
    Texts of others, such as tokens, as a terminal may show them.
``progress``
    Progress of the commands, on standard error, and what ends them early.
``start``
    The command as it is started: Ctrl-C is a sentence also while everything is imported.
``stop_signals``
    Ctrl-C and SIGTERM as a request to stop, not as an end.
``tables``
    What the commands print: tables and JSON on standard output.
``watch_command``
    The command that follows a run while another process records it: watch.
``watch_view``
    What `watch` shows: a view for a terminal, a line for anything else.
"""
