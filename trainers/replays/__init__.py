"""Verification that every recorded step follows from the previous row.

``replay`` reads the rows of a run (``recorded_rows``) on the kind of device that recorded them
(``replay_device``). The real optimizer takes the step between each pair of rows
(``recorded_optimizer``). Its parameter has the trained shape (``parameter_placement``).
``row_checks`` checks rows on their own: first row, clipping, summaries and cells. It also counts
all differences, of which ``findings`` finds the first. ``replay_result`` is the result.
"""
