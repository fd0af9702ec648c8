"""What may be wrong with a run, and what can be done about it.

``verify`` has everything checked: ``metadata_checks`` (with ``array_json_checks``,
``duplicate_metadata`` and ``root_attribute_checks``) the documents, which are then
``checked_metadata``; ``coordinate_checks`` and ``chunk_checks`` (with ``shard_checks``) what the
arrays hold, ``fingerprint_checks`` whether all of it is what was committed, ``checkpoint_checks``
the checkpoints, and ``leftovers`` what is no part of the run. Each returns what it has found, every
``problem`` with it. ``repair`` carries out what ``repair_plan`` decides. A new check goes where its
files are read.
"""
