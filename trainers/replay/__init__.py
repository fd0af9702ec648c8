"""Proof that every recorded step follows from the one before.

``replay`` goes over the rows of a run (``recorded_rows``) on the kind of device that recorded them
(``replay_device``). From each pair of rows it makes a step: what went in and what was stored after
it, or why that cannot be replayed (``recorded_steps``). The real optimizer carries it out
(``step_simulator``, with ``recorded_optimizer`` on a parameter of the trained shape,
``parameter_placement``). Where the step does not give what is stored (``pending_mismatch``), the
step after it tells which value was altered (``altered_values``, ``flipped_bits``). Beside that,
rows are checked by themselves (``row_checks``), summaries computed again (``summary_checks``) and
cells held against W (``cell_checks``).
What is found (``findings``) becomes the ``replay_result``.
"""
