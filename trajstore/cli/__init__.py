"""The command line: each command opens a library object, calls one method, prints the result.

``start`` is what a shell calls. ``main`` puts the commands together: those that train
(``record_commands``), train many times (``sweep_command``, which starts each as a ``swept_record``
and shows the ``sweep_view``), carry a run out differently (``what_if_commands``), follow one that
is being recorded (``watch_command``, which shows the ``watch_view``), look into a run
(``inspect_commands``), draw it (``figure_commands``), show it in a browser (``explore_command``),
write and read the files of others (``exchange_commands``), tell it of its tokens
(``annotate_command``), check and mend (``integrity_commands``). They share ``options``, print
``tables`` and ``exchange_tables`` in ``printable`` texts, show ``progress``, say the
``next_commands``, and stop as ``stop_signals`` ask. What a command calls is imported inside it, so
that help comes at once.
"""
