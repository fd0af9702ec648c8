"""Verification and repair of runs.

``verify`` checks a run. ``repair`` applies the plan of ``repair_plan``. Each finding is a
``problem``.

A new check belongs to the module that reads its files:

- metadata: ``metadata_checks``, with ``metadata_faults``; the result is ``checked_metadata``
- coordinates: ``coordinate_checks``
- variables: ``array_checks``; ``chunk_checks`` compares every chunk with its checksum and label
- checkpoints: ``checkpoint_checks``; files outside the run: ``leftovers``
"""
