"""Proof that every recorded step follows from the one before.

``replay`` reads the rows of a run (``recorded_rows``) on the kind of device that recorded them
(``replay_device``). The real optimizer carries out the step between each pair of rows
(``step_simulator``, with ``recorded_optimizer`` on a parameter of the trained shape,
``parameter_placement``). Beside that, rows are checked by themselves (``row_checks``): first row,
clipping, summaries and cells. All of it becomes ``findings``, and these the ``replay_result``.
"""
