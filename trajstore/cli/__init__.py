"""The command line: each command opens a library object, calls one method, prints the result.

``main`` puts the commands together: those that train (``record_commands``), carry a run out
differently (``what_if_commands``), follow one that is being recorded (``watch_command``, which
shows the ``watch_view``), look into a run (``inspect_commands``), draw it (``figure_commands``),
write and read the files of others (``exchange_commands``), check and mend (``integrity_commands``).
They share ``options``, print ``tables`` and ``exchange_tables`` in ``printable`` texts, show
``progress``, say the ``next_commands``, and stop as ``stop_signals`` ask. What a command calls is
imported inside it, so that help comes at once.
"""
